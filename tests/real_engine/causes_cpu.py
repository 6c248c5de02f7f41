"""Takes most of the processor away from running processes."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import Popen

import psutil

_GROUPS = Path("/sys/fs/cgroup/cpu")
_PERIOD_US, _QUOTA_US = 100_000, 25_000
_BURNERS = 6


@contextmanager
def short_of_processor(pid: int) -> Iterator[None]:
    """This process and its children have a quarter of a processor inside the block.

    By a cgroup's quota, as a container's limit does it; where none can be made, beside programs
    that take the one processor on which all of them have to run.
    """
    process = psutil.Process(pid)
    pids = [pid, *(child.pid for child in process.children(recursive=True))]
    group = _GROUPS / f"goodput-agent-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        with _beside_burners(pids):
            yield
    else:
        with _in_group(group, pids):
            yield


@contextmanager
def _in_group(group: Path, pids: Sequence[int]) -> Iterator[None]:
    (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
    (group / "cpu.cfs_quota_us").write_text(str(_QUOTA_US))
    before = _GROUPS / _group_of(pids[0]) / "cgroup.procs"
    try:
        _move(pids, group / "cgroup.procs")
        yield
    finally:
        _move(pids, before)
        group.rmdir()


def _group_of(pid: int) -> str:
    """The path of a process' cgroup of processors, below all of them."""
    lines = Path(f"/proc/{pid}/cgroup").read_text(encoding="ascii").splitlines()
    groups = (line.split(":", 2) for line in lines)
    return next(path.strip("/") for _, names, path in groups if "cpu" in names.split(","))


def _move(pids: Sequence[int], members: Path) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            members.write_text(str(pid))


@contextmanager
def _beside_burners(pids: Sequence[int]) -> Iterator[None]:
    allowed = os.sched_getaffinity(pids[0])
    one = {max(allowed)}
    burners = [Popen([sys.executable, "-c", "while True: pass"]) for _ in range(_BURNERS)]
    try:
        for burner in burners:
            os.sched_setaffinity(burner.pid, one)
        _pin(pids, one)
        yield
    finally:
        _pin(pids, allowed)
        for burner in burners:
            burner.kill()
            burner.wait()


def _pin(pids: Sequence[int], processors: set[int]) -> None:
    """Let all threads of these processes run on these processors alone."""
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), processors)
