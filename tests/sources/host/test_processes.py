"""Processes of an engine on its machine, and its command line."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.catalog import engine_facts as fact
from agent.records.engine import EngineProcess, ProcessRole
from agent.sources.host.processes import (
    ProcessFinder,
    ProcessLocator,
    command_line,
    limits_given,
    read_processes,
)
from agent.sources.host.procfs import HostUnreadable, Procfs
from agent.sources.host.source import process_locator
from tests.sources.host.conftest import StandIn
from tests.sources.host.machine import TICKS_PER_S, PaperMachine

URL = "http://127.0.0.1:8000"
SOCKET, OTHER_SOCKET = 4711, 4712


def finder(
    machine: PaperMachine, url: str = URL, pids: Sequence[int] = (), *, here: bool | None = None
) -> ProcessFinder:
    return ProcessFinder(
        Procfs(machine.proc), process_locator(url, pids, here), ticks_per_s=TICKS_PER_S
    )


def real_finder(url: str, pids: Sequence[int] = ()) -> ProcessFinder:
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    return ProcessFinder(Procfs(Path("/proc")), process_locator(url, pids), ticks_per_s=ticks_per_s)


def roles(processes: Sequence[EngineProcess]) -> dict[int, str]:
    return {process.pid: process.role.value for process in processes}


def runs_vllm(machine: PaperMachine, front: int = 10, *, socket: int = SOCKET) -> None:
    """A front with a core, a worker and a helper of Python's."""
    machine.runs(front, "vllm", sockets=(socket,))
    machine.runs(front + 1, "VLLM::EngineCor", parent=front, title="VLLM::EngineCore")
    machine.runs(front + 2, "VLLM::Worker_TP", parent=front + 1, title="VLLM::Worker_TP0")
    machine.runs(front + 3, "python3", parent=front)


VLLM_ROLES = {10: "front", 11: "core", 12: "worker", 13: "other"}


def test_a_real_engine_is_found_by_its_port(engine: StandIn) -> None:
    seen = real_finder(engine.url).read(0.0)
    assert roles(seen) == {engine.front_pid: "front", engine.core_pid: "core"}
    core = next(process for process in seen if process.role is ProcessRole.CORE)
    assert core.name == "VLLM::EngineCore"
    elsewhere = real_finder("http://engine.example:8000", [engine.front_pid])
    assert roles(elsewhere.read(0.0)) == roles(seen)


@pytest.mark.parametrize(
    ("socket", "url", "here", "left"),
    [
        (SOCKET, URL, None, VLLM_ROLES),
        # A port that another program maps, and one of a shared PID namespace: by the titles.
        (999, URL, None, VLLM_ROLES),
        (999, "http://engine:8000", True, VLLM_ROLES),
        # What a killed front left behind.
        (None, URL, None, {11: "core", 12: "worker"}),
    ],
    ids=["port", "mapped port", "shared namespace", "killed front"],
)
def test_the_tree_of_the_engine_is_found_by_its_port_or_by_its_titles(
    machine: PaperMachine, socket: int | None, url: str, here: bool | None, left: dict[int, str]
) -> None:
    runs_vllm(machine, socket=socket or 999)
    if socket is None:
        machine.ends(10)
        machine.runs(11, "VLLM::EngineCor", parent=1, title="VLLM::EngineCore")
        machine.listens({})
    elif socket == SOCKET:
        runs_vllm(machine, 50, socket=OTHER_SOCKET)
        machine.listens({SOCKET: 8000, OTHER_SOCKET: 8001})
    else:
        machine.runs(70, "docker-proxy", sockets=(SOCKET,))
    seen = finder(machine, url, here=here).read(0.0)
    assert roles(seen) == left
    assert not [process.name for process in seen if "secret" in process.name]


def test_of_a_tree_the_top_holder_of_the_port_is_the_front(machine: PaperMachine) -> None:
    """A script may have started it, and a forked core holds the socket too."""
    machine.runs(9, "bash")
    machine.runs(10, parent=9, sockets=(SOCKET,))
    machine.runs(11, parent=10, sockets=(SOCKET,))
    machine.listens({SOCKET: 8000})
    assert roles(finder(machine).read(0.0)) == {10: "front", 11: "other"}
    script = finder(machine, pids=[9]).read(0.0)
    assert roles(script) == {9: "other", 10: "front", 11: "other"}


def test_several_fronts_are_all_fronts(machine: PaperMachine) -> None:
    machine.runs(10, "vllm")
    for pid in (11, 12):
        title = f"VLLM::APIServer_{pid}"
        machine.runs(pid, title[:15], parent=10, title=title, sockets=(SOCKET,))
    machine.listens({SOCKET: 8000})
    assert set(roles(finder(machine).read(0.0)).values()) == {"front"}


@pytest.mark.parametrize(
    ("fronts", "ports", "url", "why"),
    [
        # Titles of two engines are no proof of either.
        ({10: 999, 50: 998}, {}, URL, "8000"),
        # An engine on another port.
        ({50: OTHER_SOCKET}, {OTHER_SOCKET: 8001}, URL, "8000"),
        ({10: SOCKET}, {SOCKET: 8000}, "http://engine.example:8000", "not of this machine"),
    ],
)
def test_an_engine_that_is_not_certain_is_not_taken(
    machine: PaperMachine, fronts: dict[int, int], ports: dict[int, int], url: str, why: str
) -> None:
    for front, inode in fronts.items():
        runs_vllm(machine, front, socket=inode)
    machine.listens(ports)
    with pytest.raises(HostUnreadable, match=why):
        finder(machine, url).read(0.0)


def test_a_stranger_is_not_taken_up_when_the_own_engine_is_gone(machine: PaperMachine) -> None:
    runs_vllm(machine)
    runs_vllm(machine, 50, socket=OTHER_SOCKET)
    machine.listens({SOCKET: 8000, OTHER_SOCKET: 8001})
    follows = finder(machine)
    follows.read(0.0)
    for pid in VLLM_ROLES:
        machine.ends(pid)
    machine.listens({OTHER_SOCKET: 8001})
    assert follows.read(5.0) == ()


@pytest.mark.parametrize(
    ("first", "then", "found"),
    [
        # Another program, which got the PID; the engine anew; a core that takes its title late.
        ({"comm": "vllm"}, {"comm": "cron", "started_s": 99.0}, {}),
        ({"comm": "vllm"}, {"comm": "vllm", "started_s": 99.0}, {10: "front"}),
        ({}, {"comm": "VLLM::EngineCor", "title": "VLLM::EngineCore"}, {10: "core"}),
    ],
)
def test_a_given_pid_is_the_engine_while_its_program_is(
    machine: PaperMachine, first: dict[str, Any], then: dict[str, Any], found: dict[int, str]
) -> None:
    machine.runs(10, **first)
    follows = finder(machine, pids=[10])
    (before,) = follows.read(0.0)
    assert roles([before]) == {10: "front"}
    machine.runs(10, **then)
    after = follows.read(60.0)
    assert roles(after) == found
    assert (before.identity in {each.identity for each in after}) is ("started_s" not in then)


def test_changes_below_a_front_are_seen_at_the_next_read(machine: PaperMachine) -> None:
    runs_vllm(machine)
    machine.runs(12, "python3", parent=11)
    follows = finder(machine)
    before = follows.read(0.0)
    assert roles(before)[12] == "other"
    # A title that comes late, a process in the place of another, a PID that another program got.
    machine.runs(12, "VLLM::Worker_TP", parent=11, title="VLLM::Worker_TP0")
    assert roles(follows.read(1.0))[12] == "worker"
    machine.ends(12)
    machine.runs(15, "VLLM::Worker_TP", parent=11, title="VLLM::Worker_TP0")
    assert roles(follows.read(2.0))[15] == "worker"
    machine.runs(11, "cat", parent=1, started_s=99.0)
    after = follows.read(7.0)
    assert {p.identity for p in before} - {p.identity for p in after} == {(11, 10.0), (12, 10.0)}
    assert 11 not in roles(after)


def test_a_new_engine_is_found_as_soon_as_the_old_front_is_gone(machine: PaperMachine) -> None:
    runs_vllm(machine)
    machine.listens({SOCKET: 8000})
    follows = finder(machine)
    follows.read(0.0)
    machine.ends(10)
    assert set(roles(follows.read(1.0)).values()) == {"core", "worker", "other"}
    runs_vllm(machine, 60, socket=OTHER_SOCKET)
    machine.listens({OTHER_SOCKET: 8000})
    assert roles(follows.read(2.0))[60] == "front"


SERVE = ("-m", "vllm", "--model", "m", "--port", "8000")


@pytest.mark.parametrize(
    ("flags", "starts", "found"),
    [
        # A core that is forked has no title of its own at first.
        (SERVE, {20: {}, 21: {"parent": 20}}, {20: "front", 21: "other"}),
        (SERVE, {20: {"flags": (*SERVE, "--dtype", "auto")}}, {20: "front"}),
        (SERVE, {20: {"flags": ("-m", "vllm", "--port=8000")}}, {20: "front"}),
        (SERVE, {20: {"flags": (*SERVE[:-1], "8002")}}, {}),
        (SERVE, {20: {"flags": ("-m", "bench", *SERVE[2:])}}, {}),
        (SERVE, {20: {"comm": "bash"}}, {}),
        (SERVE[:4], {20: {}}, {20: "front"}),
        (SERVE[:4], {20: {"flags": (*SERVE[:4], "--config", "other.yaml")}}, {}),
        # One of several may be the engine, and one that ran beside it is another engine.
        (SERVE, {20: {}, 21: {}}, {}),
        (SERVE, {20: {"started_s": 29.0}}, {}),
    ],
    ids=[
        *("the same", "other flags", "another spelling", "another port", "another module"),
        *("another program", "no port", "no port and other flags", "two", "an older one"),
    ],
)
def test_an_engine_that_starts_again_is_found_before_it_listens(
    machine: PaperMachine,
    flags: tuple[str, ...],
    starts: dict[int, dict[str, Any]],
    found: dict[int, str],
) -> None:
    """Also while other engines run and start on the machine."""
    machine.runs(10, flags=flags, sockets=(SOCKET,))
    runs_vllm(machine, 50, socket=OTHER_SOCKET)
    runs_vllm(machine, 60, socket=999)
    machine.runs(70, "bash", started_s=30.0)
    machine.listens({SOCKET: 8000, OTHER_SOCKET: 8001})
    follows = finder(machine)
    assert roles(follows.read(0.0)) == {10: "front"}
    machine.ends(10)
    machine.listens({OTHER_SOCKET: 8001})
    assert follows.read(1.0) == ()
    for pid, how in starts.items():
        machine.runs(pid, **{"started_s": 31.0, "flags": flags, **how})
    assert roles(follows.read(2.0)) == found


def test_a_core_that_outlives_its_front_says_nothing_of_how_fronts_start(
    machine: PaperMachine,
) -> None:
    core: dict[str, Any] = {"title": "VLLM::EngineCore", "sockets": (SOCKET,)}
    machine.runs(10, flags=SERVE, sockets=(SOCKET,))
    machine.runs(11, "VLLM::EngineCor", parent=10, **core)
    machine.listens({SOCKET: 8000})
    follows = finder(machine)
    follows.read(0.0)
    machine.ends(10)
    machine.runs(11, "VLLM::EngineCor", parent=1, **core)
    assert roles(follows.read(1.0)) == {11: "core"}
    machine.ends(11)
    machine.listens({})
    machine.runs(20, flags=SERVE, started_s=20.0)
    assert roles(follows.read(2.0)) == {20: "front"}


@pytest.mark.parametrize(("first_s", "later_s"), [(0.0, 20.0), (1e9, 5.0)])
def test_children_that_come_later_are_found_in_time_also_when_the_clock_goes_back(
    machine: PaperMachine, first_s: float, later_s: float
) -> None:
    machine.runs(10, "vllm", sockets=(SOCKET,))
    machine.listens({SOCKET: 8000})
    follows = finder(machine)
    assert roles(follows.read(first_s)) == {10: "front"}
    runs_vllm(machine)
    assert roles(follows.read(later_s)) == VLLM_ROLES


HERE = ProcessLocator(port=8000)


@pytest.fixture
def machine(tmp_path: Path) -> PaperMachine:
    """A machine on which a socket listens on port 8000."""
    machine = PaperMachine(tmp_path)
    machine.listens({SOCKET: 8000})
    return machine


def test_flags_are_read_in_every_spelling() -> None:
    words = (
        "vllm serve m -tp 2 --pipeline_parallel_size=3 --enforce-eager --max-num-seqs 64 "
        "--otlp-traces-endpoint http://a:4317 --no-enable-prefix-caching -sc {} --api-key x"
    )
    line = command_line(words.split())
    assert line.flags == {
        "--tensor-parallel-size": "2",
        "--pipeline-parallel-size": "3",
        "--enforce-eager": "",
        "--otlp-traces-endpoint": "http://a:4317",
        "--no-enable-prefix-caching": "",
        "--speculative-config": "{}",
    }
    assert line.limits == {fact.MAX_RUNNING_REQUESTS.name: 64}
    assert line.whole


@pytest.mark.parametrize("words", ["--config file.yaml", "--config=file.yaml"])
def test_a_file_of_flags_leaves_the_others_open(words: str) -> None:
    assert not command_line(f"vllm serve m {words}".split()).whole


def test_the_front_is_read_before_the_script_that_started_it(machine: PaperMachine) -> None:
    machine.runs(40, flags=("start.sh", "--enforce-eager"))
    machine.runs(41, parent=40, sockets=(SOCKET,), flags=("-m", "vllm", "--shutdown-timeout", "9"))
    machine.runs(42, parent=41, title="VLLM::EngineCore")
    found = read_processes(HERE, 0.0, proc=machine.proc)
    assert found.pids == {41, 42}
    assert "secret" not in str(found)
    assert found.command_line is not None
    assert found.command_line.flags == {"--shutdown-timeout": "9"}
    assert found.addresses == frozenset({"127.0.0.1"})
    assert found.problem is None


def test_a_rust_frontend_is_known_by_its_name(machine: PaperMachine) -> None:
    machine.runs(40, title="VLLM::EngineCore", sockets=(SOCKET,))
    assert not read_processes(HERE, 0.0, proc=machine.proc).rust_frontend
    machine.runs(41, "vllm-rs", parent=40)
    assert read_processes(HERE, 0.0, proc=machine.proc).rust_frontend


@pytest.mark.parametrize("words", [("nginx",), ("-m", "http.server", "8000"), ()])
def test_the_flags_of_another_program_say_nothing(
    machine: PaperMachine, words: tuple[str, ...]
) -> None:
    machine.runs(41, sockets=(SOCKET,), flags=words)
    found = read_processes(HERE, 0.0, proc=machine.proc)
    assert found.command_line is None
    assert "shows vLLM's command line" in (found.problem or "")


@pytest.mark.parametrize(
    ("locator", "problem"),
    [
        (HERE, "no visible process listens on port 8000"),
        (ProcessLocator(port=8000, same_machine=False), "not of this machine"),
    ],
)
def test_an_engine_that_cannot_be_seen_has_a_reason(
    machine: PaperMachine, locator: ProcessLocator, problem: str
) -> None:
    found = read_processes(locator, 0.0, proc=machine.proc)
    assert found.pids == frozenset()
    assert found.command_line is None
    assert found.addresses is None
    assert problem in (found.problem or "")


# Limits

RUNNING, STEP = fact.MAX_RUNNING_REQUESTS.name, fact.MAX_STEP_TOKENS.name
CONTEXT = fact.MAX_CONTEXT_TOKENS.name


@pytest.mark.parametrize(
    ("line", "limits"),
    [
        ("vllm serve m --max-num-seqs 64", {RUNNING: 64}),
        ("vllm serve m --max-num-seqs=64 --max-num-batched-tokens=8192", {RUNNING: 64, STEP: 8192}),
        ("python -m vllm.x --max_num_seqs 64 --max_model_len=4096", {RUNNING: 64, CONTEXT: 4096}),
        ("vllm serve m --max-model-len 1k", {CONTEXT: 1000}),
        ("vllm serve m --max-model-len 25.6k", {CONTEXT: 25600}),
        ("vllm serve m --max-model-len 128K", {CONTEXT: 131072}),
        ("vllm serve m --max-num-batched-tokens 1M", {STEP: 1048576}),
        ("vllm serve m --max-num-seqs 64 --max-num-seqs 32", {RUNNING: 32}),
        ("vllm serve m --max-num-seqs 64 --max-num-active-seqs 16", {RUNNING: 16}),
        ("vllm serve m --max-num-scheduled-tokens 99 --max-num-batched-tokens 100", {STEP: 99}),
        ("", {}),
        ("vllm serve m --max-model-len auto", {}),
        ("vllm serve m --max-model-len -1", {}),
        ("vllm serve m --max-num-seqs", {}),
        ("vllm serve m --max-num-seqs --api-key", {}),
        ("vllm serve m --max-num-seqs= 64", {}),
        ("vllm serve m --max-num-seqs 0", {}),
        ("vllm serve m --max-model-len 1.5K", {}),
        ("vllm serve m --max-num-seqs-of-others 64", {}),
        ("vllm serve m --no-max-num-seqs 64", {}),
    ],
)
def test_a_limit_that_was_given_as_a_number_is_known(line: str, limits: dict[str, int]) -> None:
    assert limits_given(line.split()) == limits


@given(st.lists(st.text() | st.sampled_from(["--max-num-seqs", "--max-model-len=", "5k"])))
def test_any_words_are_read(words: list[str]) -> None:
    assert all(limit > 0 for limit in limits_given(words).values())
