"""Fixtures: one migrated PostgreSQL database for all tests, emptied before each."""

from collections.abc import Iterator

import pytest
from sqlalchemy import text

from agent.store.connection import open_engine
from agent.store.tables import metadata
from tests.real_parts.postgres import PostgresServer
from tests.store.migrated import migrated


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
    engine.dispose()
    return one_postgres_url
