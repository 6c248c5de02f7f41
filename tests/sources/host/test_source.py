import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.sources.host.source import HostSource, process_locator
from tests.sources.host.conftest import StandIn
from tests.sources.host.machine import PaperMachine

OOM = b"torch.OutOfMemoryError: CUDA out of memory.\n"
SOCKET = 4711


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "engine.log"
    path.touch()
    return path


@pytest.fixture
def watch(machine: PaperMachine, log: Path) -> Iterator[HostSource]:
    watch = HostSource(
        url="http://127.0.0.1:8000", log=log, proc=machine.proc, cgroups=machine.cgroups
    )
    yield watch
    watch.close()


def runs_engine(machine: PaperMachine) -> None:
    machine.runs(10, sockets=(SOCKET,), cgroup="0::/front\n", cpu_s=7.5)
    machine.runs(
        11, "VLLM::EngineCor", parent=10, title="VLLM::EngineCore", cgroup="0::/core\n", cpu_s=90.0
    )
    machine.listens({SOCKET: 8000})
    machine.cgroup_v2("/front", (10,), kills=1)
    machine.cgroup_v2("/core", (11,), kills=2)
    machine.kills(3)


def test_a_sample_has_every_part(machine: PaperMachine, watch: HostSource, log: Path) -> None:
    runs_engine(machine)
    watch.read(1.0)
    with log.open("ab") as file:
        file.write(OOM)
    seen = watch.read(2.0)
    assert seen.at == 2.0
    found = [(process.role.value, process.cpu_s) for process in seen.processes or ()]
    assert found == [("front", 7.5), ("core", 90.0)]
    assert seen.cgroup is not None
    assert (seen.cgroup.path, seen.cgroup.oom_kills) == ("/core", 2)
    assert seen.node_oom_kills == 3
    assert seen.log is not None
    assert [finding.line for finding in seen.log.findings] == [OOM.decode().strip()]
    assert seen.unread == {}


def test_what_cannot_be_seen_is_unknown_and_named(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    watch = HostSource(
        url="http://127.0.0.1:8000", log=nowhere, proc=nowhere, cgroups=nowhere, pids=[10]
    )
    seen = watch.read(1.0)
    assert (seen.processes, seen.cgroup, seen.node_oom_kills, seen.log) == (None,) * 4
    assert set(seen.unread) == {"processes", "cgroup", "node_oom_kills", "log"}
    assert all(seen.unread.values())


def test_one_part_that_cannot_be_seen_hides_no_other(
    machine: PaperMachine, watch: HostSource, log: Path
) -> None:
    runs_engine(machine)
    (machine.proc / "vmstat").write_bytes(b"\xff\x00")
    (machine.proc / "11/cgroup").unlink()
    log.unlink()
    seen = watch.read(1.0)
    assert len(seen.processes or ()) == 2
    assert set(seen.unread) == {"cgroup", "node_oom_kills", "log"}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_is_in_the_files_a_read_ends(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    machine = PaperMachine(tmp_path_factory.mktemp("garbage"))
    runs_engine(machine)
    watch = HostSource(url="http://127.0.0.1:8000", proc=machine.proc, cgroups=machine.cgroups)
    files = sorted(p for p in (machine.proc.parent).rglob("*") if p.is_file())
    for path in data.draw(st.lists(st.sampled_from(files), unique=True)):
        path.write_bytes(data.draw(st.binary(max_size=60)))
    watch.read(1.0)
    seen = watch.read(2.0)
    watch.close()
    assert seen.log is None
    assert "log" not in seen.unread


def test_an_engine_that_ended_has_no_processes_and_still_its_cgroup(
    machine: PaperMachine, watch: HostSource
) -> None:
    runs_engine(machine)
    watch.read(1.0)
    machine.ends(10)
    machine.ends(11)
    machine.listens({})
    machine.cgroup_v2("/core", (), kills=4)
    seen = watch.read(2.0)
    assert seen.processes == ()
    assert seen.cgroup is not None
    assert seen.cgroup.oom_kills == 4


def test_reads_leave_no_file_open(engine: StandIn, log: Path) -> None:
    watch = HostSource(url=engine.url, log=log)
    watch.read(1.0)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(20):
        watch.read(60.0 * number)
    assert len(os.listdir("/proc/self/fd")) == before
    watch.close()
    assert len(os.listdir("/proc/self/fd")) < before


@pytest.mark.parametrize(
    ("url", "port", "here"),
    [
        ("http://127.0.0.1:8000", 8000, True),
        ("http://localhost:8000/", 8000, True),
        ("http://[::1]:8000", 8000, True),
        ("http://0.0.0.0:8000", 8000, True),
        ("https://localhost", 443, True),
        ("http://10.0.0.7:8000", 8000, False),
        ("http://engine", 80, False),
    ],
)
def test_a_url_has_the_port_and_shows_whether_it_is_of_this_machine(
    url: str, port: int, here: bool
) -> None:
    found = process_locator(url)
    assert (found.port, found.same_machine) == (port, here)


def test_a_real_command_line_gives_its_limits_and_nothing_else(tmp_path: Path) -> None:
    running = StandIn(tmp_path, "--max-num-seqs", "64", "--api-key", "secret")
    watch = HostSource(url=running.url)
    try:
        seen = watch.read(1.0)
    finally:
        watch.close()
        running.end()
    assert seen.limits == {"llm_engine_max_running_requests": 64}
    assert "secret" not in repr(seen)
