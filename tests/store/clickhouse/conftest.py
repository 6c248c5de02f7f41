"""A journal, and a ClickHouse to forward it to."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from agent.store.clickhouse import destination
from agent.store.connection import open_engine
from agent.store.migrating import upgrade
from tests.store.journal.forwarded import journal_in


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What changes waits less for the next batch than that of an agent."""
    monkeypatch.setattr(destination.ClickHouseDestination, "idle_s", 0.05)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Engine]:
    with journal_in(tmp_path) as engine:
        yield engine


@pytest.fixture
def shared(clickhouse_url: str) -> Iterator[Engine]:
    """A migrated database that keeps what is older than the server's clock lets it."""
    engine = open_engine(clickhouse_url)
    upgrade(engine)
    with engine.connect() as connection:
        for table in ("rollups", "fleet_rollups", "cause_rollups"):
            connection.execute(text(f"ALTER TABLE {table} REMOVE TTL"))
    yield engine
    engine.dispose()
