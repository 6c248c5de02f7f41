"""Fixtures that tests in any folder may ask for, and the choice of fast tests."""

import fcntl
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import rerun
from tests.fast import forbid_parts, needs_parts, runs_parts
from tests.real_parts.clickhouse import clickhouse_server, clickhouse_url
from tests.real_parts.postgres import postgres_server, postgres_url

__all__ = ["clickhouse_server", "clickhouse_url", "postgres_server", "postgres_url"]

# Before numpy is imported, also by programs that tests start: its threads wait for each other by
# computing, which takes most of a busy machine's time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# What is imported and collected stays to the end, so searching it for garbage is wasted: a sixth of
# the time until the first test, and again whenever a test makes many objects.
gc.disable()

# Other work on the machine must not fail a property.
settings.register_profile("any machine", deadline=None, max_examples=50)
settings.load_profile("any machine")
# `make test` has fifty examples of each property.
settings.register_profile("fast", deadline=None, max_examples=15)

# Tests commit thousands of times, and a disk takes milliseconds for each. What they show of kills
# is the same in memory, which outlives a process.
_IN_MEMORY, _ROOM_BYTES = Path("/dev/shm"), 2 << 30


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--fast` leaves out every test that needs real parts or seconds."""
    parser.addoption("--fast", action="store_true", help="only tests that need no real parts")
    rerun.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Keep temporary folders in memory; `--fast` tries fewer examples of each property."""
    if _has_room_in_memory():
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_IN_MEMORY))
    if config.getoption("--fast"):
        settings.load_profile("fast")
    rerun.register(config)


def _has_room_in_memory() -> bool:
    """Whether it takes files, and also libraries and programs: containers often allow neither."""
    if not _IN_MEMORY.is_dir():
        return False
    found = os.statvfs(_IN_MEMORY)
    return found.f_bavail * found.f_frsize > _ROOM_BYTES and not found.f_flag & os.ST_NOEXEC


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no module that `--fast` leaves out."""
    left_out = config.getoption("--fast") and collection_path.suffix == ".py"
    return True if left_out and runs_parts(collection_path) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Of several processes, let the first compile the modules of a new checkout for the others."""
    worker = getattr(session.config, "workerinput", {}).get("workerid")
    if worker is None or session.config.cache is None:
        return (yield)
    lock = session.config.cache.mkdir("collecting") / "lock"
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if worker == "gw0" else fcntl.LOCK_SH)
        return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the modules that need seconds; `--fast` leaves their slow tests out."""
    rerun.mark(items)
    slow = {item for item in items if needs_parts(item)}
    if config.getoption("--fast"):
        config.hook.pytest_deselected(items=[*slow])
        items[:] = [item for item in items if item not in slow]
    else:
        # Of several processes, none has a long module left when the others have ended.
        modules = {item.path for item in slow}
        items.sort(key=lambda item: item.path not in modules)


def pytest_collection_finish() -> None:
    """Search for garbage from here on, in what the tests themselves make."""
    gc.freeze()
    # With Python's own thresholds the search takes a seventh of the processor time of all tests.
    gc.set_threshold(5_000, 20, 50)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def no_part_in_a_fast_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """With `--fast`, starting a real part is an error."""
    with pytest.MonkeyPatch.context() as patched:
        if request.config.getoption("--fast"):
            forbid_parts(patched)
        yield
