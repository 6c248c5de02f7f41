"""What is read of a host, and deaths that follow from it."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.analysis.failures import FailureDetection, Poll
from agent.records.engine import EngineSample, HostSample
from agent.records.event import Event
from agent.sources.host.source import HostSource, process_locator
from tests.real_parts.waiting import eventually
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
    found = [(each.role.value, each.state, each.cpu_s) for each in seen.processes or ()]
    assert found == [("front", "S", 7.5), ("core", "S", 90.0)]
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


@settings(max_examples=25, deadline=None)
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


def test_reads_leave_no_file_open(engine: StandIn, log: Path) -> None:
    watch = HostSource(url=engine.url, log=log)
    watch.read(1.0)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(5):
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


def test_the_addresses_and_the_name_of_this_machine_are_here() -> None:
    interfaces = psutil.net_if_addrs().values()
    kinds = (socket.AF_INET, socket.AF_INET6)
    own = [each.address for found in interfaces for each in found if each.family in kinds]
    hosts = [f"[{address}]" if ":" in address else address for address in own if "%" not in address]
    assert "127.0.0.1" in hosts
    for host in (*hosts, socket.gethostname()):
        assert process_locator(f"http://{host}:8000").same_machine, host


# A core that takes more memory than its cgroup may have

CGROUPS = Path("/sys/fs/cgroup")
LIMIT_BYTES = 64 * 1024 * 1024
WITHIN_S = 20.0

# By version of cgroups: where a new one goes, and the file that limits it.
_REAL = {1: (CGROUPS / "memory", "memory.limit_in_bytes"), 2: (CGROUPS, "memory.max")}


def versions_here() -> list[int]:
    """The versions whose memory controller is mounted here and obeys us."""
    return [version for version in _REAL if _can_limit(version)]


def _can_limit(version: int) -> bool:
    try:
        with limited(version):
            return True
    except OSError:
        return False


@contextmanager
def limited(version: int) -> Iterator[Path]:
    """A new cgroup with little memory. Raises OSError where there can be none."""
    parent, limit = _REAL[version]
    folder = parent / f"goodput-agent-test-{os.getpid()}"
    if version == 2 and "memory" not in (parent / "cgroup.subtree_control").read_text().split():
        raise OSError("no memory controller")
    folder.mkdir()
    try:
        # Opened without creating: on a plain file system nothing would be limited.
        with open(os.open(folder / limit, os.O_WRONLY), "w") as file:
            file.write(str(LIMIT_BYTES))
        yield folder
    finally:
        eventually(lambda: _removed(folder), within_s=WITHIN_S, what=f"the end of {folder}")


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError:
        return not folder.exists()
    return True


def judged(before: HostSample, after: HostSample) -> list[tuple[str, str, object]]:
    """The events of an engine that was well at the first poll and gone at the second."""
    sample = EngineSample(engine="chat", at=1.0, dialect="vllm", model="m", facts={})
    well = Poll(engine="chat", at=1.0, clock_s=1.0, sample=sample, host=before)
    gone = Poll(engine="chat", at=6.0, clock_s=6.0, failure="connection", host=after)
    detection = FailureDetection()
    detection.observe(well)
    events = detection.observe(gone)
    return [
        (event.kind.value, event.confidence.value, event.evidence.get("victims"))
        for event in events
    ]


@pytest.mark.parametrize(
    "version", versions_here(), ids=lambda version: f"by-the-kernel-itself-cgroup-v{version}"
)
def test_a_core_that_is_really_killed_for_want_of_memory_is_a_host_oom(
    version: int, engine: StandIn
) -> None:
    with limited(version) as folder:
        (folder / "cgroup.procs").write_text(str(engine.core_pid))
        watch = HostSource(url=engine.url)
        before = watch.read(1.0)
        assert engine.eat() == "lost -9"
        after = watch.read(6.0)
        watch.close()
    assert before.cgroup is not None
    assert after.cgroup is not None
    assert (before.cgroup.oom_kills, after.cgroup.oom_kills) == (0, 1)
    assert before.cgroup.limit_bytes == LIMIT_BYTES
    assert (after.node_oom_kills or 0) > (before.node_oom_kills or 0)
    victim = f"VLLM::EngineCore ({engine.core_pid})"
    assert ("HOST_OOM", "certain", victim) in judged(before, after)


@pytest.mark.parametrize("version", [1, 2], ids=lambda version: f"from-recorded-files-v{version}")
def test_a_core_that_was_killed_in_recorded_files_is_a_host_oom(
    version: int, machine: PaperMachine
) -> None:
    at = {1: "4:memory:/docker/abc\n0::/\n", 2: "0::/docker/abc\n"}[version]
    write = {1: machine.cgroup_v1, 2: machine.cgroup_v2}[version]
    machine.runs(10, sockets=(SOCKET,), cgroup=at)
    machine.runs(11, "VLLM::EngineCor", parent=10, title="VLLM::EngineCore", cgroup=at)
    machine.listens({SOCKET: 8000})
    write("/docker/abc", (10, 11))
    watch = HostSource(url="http://127.0.0.1:8000", proc=machine.proc, cgroups=machine.cgroups)
    before = watch.read(1.0)
    machine.ends(11)
    machine.kills(1)
    write("/docker/abc", (10,), kills=1)
    after = watch.read(6.0)
    watch.close()
    assert ("HOST_OOM", "certain", "VLLM::EngineCore (11)") in judged(before, after)


# The last log lines of a real vLLM 0.32 and the events that they give

LOGS = Path(__file__).parent / "logs"
CHATTER = b'INFO:     127.0.0.1:50150 - "GET /metrics HTTP/1.1" 200 OK\n'


def words(log: str) -> list[bytes]:
    return (LOGS / f"{log}.txt").read_bytes().splitlines(keepends=True)


def polls(machine: PaperMachine, path: Path, pieces: list[bytes], *, up: bool) -> Iterator[Event]:
    """An engine that is `up` at first, and at whose next polls these pieces of log were there."""
    path.touch()
    watch = HostSource(
        url="http://127.0.0.1:8000", log=path, proc=machine.proc, cgroups=machine.cgroups
    )
    detection = FailureDetection()
    watch.read(0.0)
    for number, piece in enumerate([CHATTER, *pieces, b"", b""]):
        with path.open("ab") as file:
            file.write(piece)
        at = 5.0 * number
        answers = up and number == 0
        sample = EngineSample(engine="chat", at=at, dialect="vllm", model="m", facts={})
        poll = Poll(
            engine="chat",
            at=at,
            clock_s=at,
            sample=sample if answers else None,
            failure=None if answers else "connection",
            host=watch.read(at),
        )
        yield from detection.observe(poll)
    watch.close()


@pytest.mark.parametrize(
    ("log", "up", "expected"),
    [
        ("vllm-0.32.0-stopped", True, ["UNREACHABLE"]),
        ("vllm-0.32.0-core-killed", True, ["UNREACHABLE", "ENGINE_DEAD"]),
        ("vllm-0.32.0-cache-too-small", False, ["SIZING_ERROR"]),
    ],
)
@pytest.mark.parametrize("first_lines", [0, 1, 3, 1000])
def test_a_recorded_end_is_judged_alike_wherever_a_poll_cuts_the_log(
    machine: PaperMachine, tmp_path: Path, log: str, up: bool, expected: list[str], first_lines: int
) -> None:
    said = words(log)
    pieces = [b"".join(said[:first_lines]), b"".join(said[first_lines:])]
    events = polls(machine, tmp_path / "engine.log", pieces, up=up)
    assert [event.kind.value for event in events] == expected
