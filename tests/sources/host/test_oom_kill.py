"""A core that takes more memory than its cgroup may have.

The kernel itself kills it where a memory controller is mounted and we may make cgroups; the names
of the tests show which one did. The recorded files of both versions are read in any case.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.analysis.failures import FailureDetection, Poll
from agent.records.engine import EngineSample, HostSample
from agent.sources.host.source import HostSource
from tests.real_parts.waiting import eventually
from tests.sources.host.conftest import StandIn
from tests.sources.host.machine import PaperMachine

CGROUPS = Path("/sys/fs/cgroup")
LIMIT_BYTES = 64 * 1024 * 1024
SOCKET = 4711
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
