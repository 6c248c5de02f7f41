"""Migrated databases. SQLite's are migrated once in each process of the tests, and copied."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from sqlalchemy import Engine

from agent.store.connection import open_engine
from agent.store.migrating import upgrade


@contextmanager
def migrated(url: str) -> Iterator[Engine]:
    """The database at this URL, migrated; that of SQLite is new."""
    engine = open_engine(url)
    if engine.dialect.name == "sqlite":
        Path(str(engine.url.database)).write_bytes(migrated_file())
    else:
        upgrade(engine)
    yield engine
    engine.dispose()


@contextmanager
def migrated_in(folder: Path) -> Iterator[Engine]:
    """A new, migrated SQLite database in this folder."""
    with migrated(f"sqlite:///{folder / 'goodput.db'}") as engine:
        yield engine


@cache
def migrated_file() -> bytes:
    """The content of a migrated SQLite database."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "goodput.db"
        engine = open_engine(f"sqlite:///{file}")
        upgrade(engine)
        engine.dispose()
        return file.read_bytes()
