"""An agent's file, and a ClickHouse to publish it to."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from agent.store import claim
from agent.store.clickhouse import destination
from agent.store.connection import open_engine
from agent.store.migrating import upgrade
from tests.store.publishing.published import file_in


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes wait less for the next batch than those of an agent."""
    monkeypatch.setattr(destination.ClickHouseDestination, "idle_s", 0.05)
    # A publisher that could not give the name back has ended.
    monkeypatch.setattr(claim, "DEAD_AFTER_S", 0.0)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Engine]:
    with file_in(tmp_path) as engine:
        yield engine


@pytest.fixture
def shared(clickhouse_url: str) -> Iterator[Engine]:
    """A migrated database."""
    engine = open_engine(clickhouse_url)
    upgrade(engine)
    yield engine
    engine.dispose()
