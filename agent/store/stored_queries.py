"""What differs by the kind of database: the queries of the API, and the size in bytes."""

from sqlalchemy import Engine, text

from agent.store.clickhouse.connecting import CLICKHOUSE
from agent.store.clickhouse.queries import ClickHouseQueries
from agent.store.connection import reading
from agent.store.sqlite_place import sqlite_files
from agent.store.store_queries import StoreQueries

_KINDS = {CLICKHOUSE: ClickHouseQueries}


def stored_queries(engine: Engine) -> StoreQueries:
    """The queries of the API."""
    return _KINDS.get(engine.dialect.name, StoreQueries)(engine)


_OF_SERVER = {
    "postgresql": text("SELECT pg_database_size(current_database())"),
    CLICKHOUSE: text(
        "SELECT coalesce(sum(bytes_on_disk), 0) FROM system.parts "
        "WHERE database = currentDatabase() AND active"
    ),
}


def database_bytes(engine: Engine) -> int | None:
    """The size of a database: of SQLite its files, of a server all agents' tables together.

    None of a SQLite database without a file. Raises StoreUnavailable.
    """
    query = _OF_SERVER.get(engine.dialect.name)
    if query is not None:
        with reading(engine) as connection:
            return int(connection.execute(query).scalar_one())
    files = sqlite_files(engine.url)
    return sum(file.stat().st_size for file in files if file.exists()) if files else None
