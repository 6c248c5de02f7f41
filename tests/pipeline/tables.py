"""Hides a table of the database for a while, and reads stored columns."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Engine, select, text


@contextmanager
def without(database: Engine, table: str) -> Iterator[None]:
    """The database while this table is missing."""
    rename(database, table, "elsewhere")
    try:
        yield
    finally:
        rename(database, "elsewhere", table)


def rename(database: Engine, table: str, name: str) -> None:
    """Rename a table."""
    with database.begin() as connection:
        connection.execute(text(f"ALTER TABLE {table} RENAME TO {name}"))


def stored(database: Engine, column: Any) -> list[Any]:
    """The values of a column, oldest row first."""
    with database.connect() as connection:
        return list(connection.scalars(select(column).order_by(column.table.c.id)))
