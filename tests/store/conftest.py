"""Fixtures: databases of each kind, SQLite and PostgreSQL."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Engine

from agent.store.clickhouse.destination import ClickHouseDestination
from agent.store.connection import open_engine
from agent.store.publishing import publisher
from agent.store.publishing.postgres import PostgresDestination
from agent.store.store_queries import StoreQueries
from tests.store.emptied_postgres import emptied_postgres_url, one_postgres_url
from tests.store.migrated import migrated
from tests.store.publishing.published import file_in

__all__ = ["emptied_postgres_url", "one_postgres_url"]

UrlOf = Callable[[pytest.FixtureRequest], str]


def _sqlite_url(request: pytest.FixtureRequest) -> str:
    folder: Path = request.getfixturevalue("tmp_path")
    return f"sqlite:///{folder / 'goodput.db'}"


def _postgres_url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue("postgres_url"))


def _emptied_postgres_url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue("emptied_postgres_url"))


NEW: dict[str, UrlOf] = {"sqlite": _sqlite_url, "postgresql": _postgres_url}
WITHOUT_ROWS: dict[str, UrlOf] = {"sqlite": _sqlite_url, "postgresql": _emptied_postgres_url}


@pytest.fixture(params=NEW)
def new_url(request: pytest.FixtureRequest) -> str:
    """URL of a new database of each kind, without tables."""
    return NEW[request.param](request)


@pytest.fixture
def empty_database(new_url: str) -> Iterator[Engine]:
    engine = open_engine(new_url)
    yield engine
    engine.dispose()


@pytest.fixture(params=WITHOUT_ROWS)
def database_url(request: pytest.FixtureRequest) -> str:
    """URL of a database of each kind, with the tables of `database` and without rows."""
    return WITHOUT_ROWS[request.param](request)


@pytest.fixture
def database(database_url: str) -> Iterator[Engine]:
    """A migrated database of each kind, without rows."""
    # That of PostgreSQL has its tables already.
    opening = migrated if database_url.startswith("sqlite") else _opened
    with opening(database_url) as engine:
        yield engine


@contextmanager
def _opened(url: str) -> Iterator[Engine]:
    engine = open_engine(url)
    yield engine
    engine.dispose()


@pytest.fixture
def sqlite(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """A migrated SQLite database, for behaviour of SQLite alone."""
    with migrated(_sqlite_url(request)) as engine:
        yield engine


@pytest.fixture
def postgres(emptied_postgres_url: str) -> Iterator[Engine]:
    """A migrated PostgreSQL database, for behaviour of PostgreSQL alone."""
    with _opened(emptied_postgres_url) as engine:
        yield engine


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
