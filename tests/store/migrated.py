"""Migrated databases, and their schema. SQLite's are copies of one that is migrated once."""

import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, inspect

from agent.store.connection import open_engine
from agent.store.migrating import newest_revision, upgrade
from agent.store.tables import metadata

CHECKOUT = Path(__file__).resolve().parents[2]

# A revision that no checkout has.
ONE_MORE = f"""
from alembic import op
import sqlalchemy as sa

revision = "more"
down_revision = "{newest_revision()}"

def upgrade():
    op.create_table("more", sa.Column("n", sa.Integer))
"""


def of_the_next_version(folder: Path) -> ScriptDirectory:
    """The migrations and one more, which makes the table `more`; loaded, as threads share them."""
    shutil.copytree(CHECKOUT / "migrations", folder / "migrations")
    (folder / "migrations" / "versions" / "more.py").write_text(ONE_MORE)
    scripts = ScriptDirectory(str(folder / "migrations"))
    assert scripts.get_current_head() == "more"
    return scripts


@contextmanager
def migrated(url: str) -> Iterator[Engine]:
    """The database at this URL, migrated; that of SQLite is new."""
    engine = open_engine(url)
    if engine.dialect.name == "sqlite":
        Path(str(engine.url.database)).write_bytes(_new_file())
    else:
        upgrade(engine)
    yield engine
    engine.dispose()


@contextmanager
def migrated_in(folder: Path) -> Iterator[Engine]:
    """A new, migrated SQLite database in this folder."""
    with migrated(f"sqlite:///{folder / 'goodput.db'}") as engine:
        yield engine


def _new_file() -> bytes:
    """A migrated file with an id of its own."""
    content = migrated_file()
    # Also in the index of the key.
    (found,) = {*re.findall(rb"[0-9a-f]{32}", content)}
    return content.replace(found, secrets.token_hex(16).encode())


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
# On PostgreSQL these have the time as well: see tests/store/test_retention.py.
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
