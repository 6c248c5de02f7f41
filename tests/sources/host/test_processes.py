import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from agent.records.host import EngineProcess, ProcessRole
from agent.sources.host.processes import ProcessFinder
from agent.sources.host.procfs import Procfs
from agent.sources.host.source import process_locator
from agent.sources.host.unreadable import HostUnreadable
from tests.real_parts.waiting import eventually
from tests.sources.host.conftest import StandIn
from tests.sources.host.machine import TICKS_PER_S, PaperMachine

URL = "http://127.0.0.1:8000"
SOCKET, OTHER_SOCKET = 4711, 4712
WITHIN_S = 10.0


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


def test_a_real_core_whose_front_was_killed_is_still_followed(engine: StandIn) -> None:
    follows = real_finder(engine.url)
    follows.read(0.0)
    engine.process.kill()
    engine.process.wait()
    os.kill(engine.core_pid, signal.SIGSTOP)
    seen = eventually(
        lambda: [p for p in follows.read(1.0) if p.stopped], within_s=WITHIN_S, what="a stop"
    )
    assert roles(seen) == {engine.core_pid: "core"}


def test_a_real_core_that_was_killed_and_not_yet_buried_is_gone(engine: StandIn) -> None:
    follows = real_finder(engine.url)
    follows.read(0.0)
    os.kill(engine.core_pid, signal.SIGKILL)
    alone = {engine.front_pid: "front"}
    eventually(
        lambda: roles(follows.read(1.0)) == alone, within_s=WITHIN_S, what="the end of the core"
    )


def test_the_tree_below_the_holder_of_the_port_is_the_engine(machine: PaperMachine) -> None:
    runs_vllm(machine)
    runs_vllm(machine, 50, socket=OTHER_SOCKET)
    machine.listens({SOCKET: 8000, OTHER_SOCKET: 8001})
    seen = finder(machine).read(0.0)
    assert roles(seen) == VLLM_ROLES
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


def test_titles_find_an_engine_whose_port_is_mapped(machine: PaperMachine) -> None:
    runs_vllm(machine, socket=999)
    machine.runs(70, "docker-proxy", sockets=(SOCKET,))
    machine.listens({SOCKET: 8000})
    assert roles(finder(machine).read(0.0)) == VLLM_ROLES


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


def test_what_a_killed_front_left_behind_is_found_by_its_titles(machine: PaperMachine) -> None:
    runs_vllm(machine)
    machine.ends(10)
    machine.runs(11, "VLLM::EngineCor", parent=1, title="VLLM::EngineCore")
    assert roles(finder(machine).read(0.0)) == {11: "core", 12: "worker"}


def test_an_engine_in_a_shared_pid_namespace_is_found_by_its_titles(machine: PaperMachine) -> None:
    runs_vllm(machine, socket=999)
    assert roles(finder(machine, "http://engine:8000", here=True).read(0.0)) == VLLM_ROLES


def test_a_process_that_got_the_pid_of_another_is_another(machine: PaperMachine) -> None:
    runs_vllm(machine)
    machine.listens({SOCKET: 8000})
    follows = finder(machine)
    before = follows.read(0.0)
    machine.runs(11, "cat", parent=1, started_s=99.0)
    after = follows.read(5.0)
    assert {p.identity for p in before} - {p.identity for p in after} == {(11, 10.0)}
    assert 11 not in roles(after)


def test_a_given_pid_that_another_program_got_is_not_the_engine(machine: PaperMachine) -> None:
    machine.runs(10, "vllm")
    follows = finder(machine, pids=[10])
    assert roles(follows.read(0.0)) == {10: "front"}
    machine.runs(10, "cron", started_s=99.0)
    assert follows.read(5.0) == ()


def test_a_given_pid_that_the_engine_got_again_is_the_engine(machine: PaperMachine) -> None:
    machine.runs(10, "vllm")
    follows = finder(machine, pids=[10])
    (first,) = follows.read(0.0)
    machine.runs(10, "vllm", started_s=99.0)
    (second,) = follows.read(5.0)
    assert first.identity != second.identity


def test_a_given_core_may_take_its_title_late(machine: PaperMachine) -> None:
    machine.runs(10, "python3")
    follows = finder(machine, pids=[10])
    follows.read(0.0)
    machine.runs(10, "VLLM::EngineCor", title="VLLM::EngineCore")
    assert roles(follows.read(60.0)) == {10: "core"}


def test_a_process_may_take_its_title_after_it_was_found(machine: PaperMachine) -> None:
    runs_vllm(machine)
    machine.runs(12, "python3", parent=11)
    machine.listens({SOCKET: 8000})
    follows = finder(machine)
    assert roles(follows.read(0.0))[12] == "other"
    machine.runs(12, "VLLM::Worker_TP", parent=11, title="VLLM::Worker_TP0")
    assert roles(follows.read(1.0))[12] == "worker"


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


def test_a_process_that_took_the_place_of_another_is_found_at_once(machine: PaperMachine) -> None:
    runs_vllm(machine)
    machine.listens({SOCKET: 8000})
    follows = finder(machine)
    follows.read(0.0)
    machine.ends(12)
    machine.runs(15, "VLLM::Worker_TP", parent=11, title="VLLM::Worker_TP0")
    assert roles(follows.read(1.0))[15] == "worker"


def test_times_are_in_seconds(machine: PaperMachine) -> None:
    machine.runs(10, sockets=(SOCKET,), started_s=12.5, cpu_s=3.25, state="R")
    machine.listens({SOCKET: 8000})
    (front,) = finder(machine).read(0.0)
    assert (front.started_after_boot_s, front.cpu_s, front.state) == (12.5, 3.25, "R")
