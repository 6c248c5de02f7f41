"""Fixtures: databases of each kind, SQLite and PostgreSQL."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from agent.store.clickhouse.destination import ClickHouseDestination
from agent.store.connection import open_engine
from agent.store.publishing import publisher
from agent.store.publishing.postgres import PostgresDestination
from agent.store.store_queries import StoreQueries
from tests.store.emptied_postgres import emptied_postgres_url, one_postgres_url
from tests.store.migrated import migrated_in
from tests.store.publishing.published import file_in

__all__ = ["emptied_postgres_url", "one_postgres_url"]

KINDS = ("sqlite", "postgresql")


@pytest.fixture(params=KINDS)
def new_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a new database of each kind, without tables."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'goodput.db'}"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture
def empty_database(new_url: str) -> Iterator[Engine]:
    engine = open_engine(new_url)
    yield engine
    engine.dispose()


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[Engine]:
    """A migrated SQLite database, for behaviour of SQLite alone."""
    with migrated_in(tmp_path) as engine:
        yield engine


@pytest.fixture
def postgres(emptied_postgres_url: str) -> Iterator[Engine]:
    """A migrated PostgreSQL database, for behaviour of PostgreSQL alone."""
    engine = open_engine(emptied_postgres_url)
    yield engine
    engine.dispose()


@pytest.fixture(params=("sqlite", "postgres"), ids=KINDS)
def database(request: pytest.FixtureRequest) -> Engine:
    """A migrated database of each kind, without rows."""
    engine: Engine = request.getfixturevalue(request.param)
    return engine


@pytest.fixture
def queries(database: Engine) -> StoreQueries:
    return StoreQueries(database)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Engine]:
    with file_in(tmp_path) as engine:
        yield engine


@pytest.fixture(autouse=True)
def published_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A publisher waits less for changes, and after a failure, than that of an agent."""
    for destination in (PostgresDestination, ClickHouseDestination):
        monkeypatch.setattr(destination, "idle_s", 0.05)
    monkeypatch.setattr(publisher, "FIRST_WAIT_S", 0.1)
