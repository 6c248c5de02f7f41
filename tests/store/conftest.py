"""An empty database of each kind, for every test that asks for one."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from agent.store.connection import open_engine
from agent.store.migrating import upgrade
from agent.store.questions import Questions


def _sqlite_url(request: pytest.FixtureRequest) -> str:
    folder: Path = request.getfixturevalue("tmp_path")
    return f"sqlite:///{folder / 'goodput.db'}"


def _postgres_url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue("postgres_url"))


URLS: dict[str, Callable[[pytest.FixtureRequest], str]] = {
    "sqlite": _sqlite_url,
    "postgresql": _postgres_url,
}


@pytest.fixture(params=URLS)
def database_url(request: pytest.FixtureRequest) -> str:
    """Where a new, empty database of each kind is."""
    return URLS[request.param](request)


@pytest.fixture
def database(database_url: str) -> Iterator[Engine]:
    """A migrated database of each kind."""
    yield from opened(database_url)


@pytest.fixture
def sqlite(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """A migrated SQLite database, for what only SQLite does."""
    yield from opened(_sqlite_url(request))


@pytest.fixture
def postgres(postgres_url: str) -> Iterator[Engine]:
    """A migrated PostgreSQL database, for what only PostgreSQL does."""
    yield from opened(postgres_url)


@pytest.fixture
def questions(database: Engine) -> Questions:
    """What can be asked of the database."""
    return Questions(database)


def opened(url: str) -> Iterator[Engine]:
    """The migrated database behind a URL, its connections closed afterwards."""
    engine = open_engine(url)
    upgrade(engine)
    yield engine
    engine.dispose()
