"""Migrated databases, and their schema. SQLite's are copies of one that is migrated once."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Engine, inspect

from agent.store.connection import open_engine
from agent.store.migrating import upgrade
from agent.store.tables import metadata


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


_PARTITION = re.compile(r"_(\d{8}|other_days)$")
# On PostgreSQL these have the time as well: see tests/store/test_day_partitions.py.
_KEYS = re.compile(r"uq_requests_trace_id_(proxy_)?span_id(_started_at)?")


def table_names(engine: Engine) -> set[str]:
    """The tables of a database, without their partitions."""
    return {name for name in inspect(engine).get_table_names() if not _PARTITION.search(name)}


def differences(engine: Engine) -> list[Any]:
    """Differences between the database and the tables that this version declares."""
    by_day = engine.dialect.name == "postgresql"

    def is_compared(_: object, name: str | None, kind: str, _found: bool, _other: object) -> bool:
        if kind == "table":
            return _PARTITION.search(name or "") is None
        return not (by_day and _KEYS.fullmatch(name or ""))

    options = {
        "compare_type": True,
        "compare_server_default": True,
        "include_object": is_compared,
    }
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts=options)
        return list(compare_metadata(context, metadata))
