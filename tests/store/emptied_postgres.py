"""Fixtures: one migrated PostgreSQL database for all tests, emptied before each."""

from collections.abc import Iterator

import pytest
from sqlalchemy import text

from agent.store.connection import open_engine
from tests.real_parts.postgres import PostgresServer
from tests.store.migrated import migrated

# To truncate a table takes new files for it and for its indexes: 0.1 s of a processor for all 28
# tables, of which a test uses a few. A table without a page has had no row since the last time.
_EMPTY = text(
    """
    DO $$
    DECLARE used text;
    BEGIN
        SELECT string_agg(oid::regclass::text, ', ') INTO used FROM pg_class
        WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace
            AND relname <> 'alembic_version' AND pg_relation_size(oid) > 0;
        IF used IS NOT NULL THEN
            EXECUTE 'TRUNCATE ' || used || ' CASCADE';
        END IF;
        PERFORM setval(oid::regclass, 1, false) FROM pg_class
        WHERE relkind = 'S' AND relnamespace = 'public'::regnamespace;
    END $$
    """
)
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
        connection.execute(_EMPTY)
        # As in an agent's file, so that tests may write by SQLAlchemy here, too.
        connection.execute(text("INSERT INTO publishing VALUES ('', 1, 0, now())"))
        # Those of a simulated clock.
        for partition in connection.execute(_EARLIER_DAYS).scalars():
            connection.execute(text(f"DROP TABLE {partition}"))
    engine.dispose()
    return one_postgres_url
