"""How many bytes a database has."""

from sqlalchemy import Engine, text

from agent.store.connection import in_transaction
from agent.store.sqlite_place import sqlite_files

_OF_POSTGRES = text("SELECT pg_database_size(current_database())")


def database_bytes(engine: Engine) -> int | None:
    """The size of a database: of SQLite its files, of PostgreSQL all agents' tables together.

    None of a SQLite database without a file. Raises StoreUnavailable.
    """
    if engine.dialect.name == "postgresql":
        size = in_transaction(engine, lambda connection: connection.scalar(_OF_POSTGRES))
        return None if size is None else int(size)
    files = sqlite_files(engine.url)
    return sum(file.stat().st_size for file in files if file.exists()) if files else None
