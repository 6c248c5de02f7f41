"""Grafana's read-only role, created on a real PostgreSQL by its script."""

import os
import subprocess
from collections.abc import Iterator

import pytest
from sqlalchemy import URL, Engine, create_engine, text
from sqlalchemy.exc import InternalError, ProgrammingError

from agent.store.connection import open_engine
from agent.store.migrating import upgrade
from tests.deploy.kit import mounted

SCRIPT = mounted("postgres", "/docker-entrypoint-initdb.d/grafana-reader.sh")


def make_reader(owner: URL) -> URL:
    variables = {
        "PGHOST": str(owner.host),
        "PGPORT": str(owner.port),
        "POSTGRES_USER": str(owner.username),
        "POSTGRES_DB": str(owner.database),
        # A quote would break a script that does not quote the password.
        "GRAFANA_READER_PASSWORD": "it's",
    }
    subprocess.run(["sh", SCRIPT], env={**os.environ, **variables}, check=True, capture_output=True)
    return owner.set(username="grafana_reader", password="it's")


@pytest.fixture
def owner(postgres_url: str) -> Iterator[Engine]:
    engine = open_engine(postgres_url)
    yield engine
    with engine.begin() as connection:
        connection.execute(text("DROP OWNED BY grafana_reader"))
        connection.execute(text("DROP ROLE grafana_reader"))
    engine.dispose()


@pytest.fixture
def reader(owner: Engine) -> Iterator[Engine]:
    engine = create_engine(make_reader(owner.url))
    # The tables are created after the role, as in the container.
    upgrade(owner)
    yield engine
    engine.dispose()


def test_the_reader_reads_tables_created_after_it(reader: Engine) -> None:
    with reader.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM requests")) == 0


@pytest.mark.parametrize("statement", ["DELETE FROM requests", "CREATE TABLE mine (a integer)"])
def test_the_reader_changes_nothing_even_in_a_read_write_transaction(
    reader: Engine, statement: str
) -> None:
    with pytest.raises(InternalError, match="read-only"), reader.connect() as connection:
        connection.execute(text(statement))
    with reader.connect() as connection:
        connection.execute(text("SET TRANSACTION READ WRITE"))
        with pytest.raises(ProgrammingError, match="permission denied"):
            connection.execute(text(statement))
