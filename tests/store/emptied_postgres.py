"""Fixtures: one migrated PostgreSQL database for all tests, emptied before each."""

from collections.abc import Iterator

import pytest
from sqlalchemy import text

from agent.store.connection import open_engine
from agent.store.tables import metadata
from tests.real_parts.postgres import PostgresServer
from tests.store.migrated import migrated

_EARLIER_DAYS = text(
    "SELECT relname FROM pg_class WHERE relispartition AND relkind = 'r' "
    "AND substring(relname FROM '_([0-9]{8})$') < to_char(now() AT TIME ZONE 'UTC', 'YYYYMMDD')"
)


@pytest.fixture(scope="session")
def one_postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """One migrated database for all tests."""
    with postgres_server.new_database() as url:
        with migrated(url):
            pass
        yield url


@pytest.fixture
def emptied_postgres_url(one_postgres_url: str) -> str:
    """One migrated database for all tests, emptied: creating a new one takes far longer."""
    engine = open_engine(one_postgres_url)
    with engine.begin() as connection:
        connection.execute(text(f"TRUNCATE {', '.join(metadata.tables)} RESTART IDENTITY"))
        # Those of a simulated clock.
        for partition in connection.execute(_EARLIER_DAYS).scalars():
            connection.execute(text(f"DROP TABLE {partition}"))
    engine.dispose()
    return one_postgres_url
