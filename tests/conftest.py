"""Fixtures that tests in any folder may ask for, and the choice of fast tests."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import rerun
from tests.fast import forbid_parts, needs_parts, runs_parts
from tests.real_parts.clickhouse import clickhouse_server, clickhouse_url
from tests.real_parts.postgres import postgres_server, postgres_url

__all__ = ["clickhouse_server", "clickhouse_url", "postgres_server", "postgres_url"]

# What is imported and collected stays to the end, so searching it for garbage is wasted: a sixth of
# the time until the first test, and again whenever a test makes many objects.
gc.disable()

# Other work on the machine must not fail a property.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")
# `make test` has a hundred examples of each property.
settings.register_profile("fast", deadline=None, max_examples=15)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--fast` leaves out every test that needs real parts or seconds."""
    parser.addoption("--fast", action="store_true", help="only tests that need no real parts")
    rerun.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """`--fast` tries fewer examples of each property."""
    if config.getoption("--fast"):
        settings.load_profile("fast")
    rerun.register(config)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no module that `--fast` leaves out."""
    left_out = config.getoption("--fast") and collection_path.suffix == ".py"
    return True if left_out and runs_parts(collection_path) else None


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
