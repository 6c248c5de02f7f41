"""The role that Grafana reads with, made on the real PostgreSQL by the script that makes it."""

import os
import subprocess
from collections.abc import Iterator

import pytest
from sqlalchemy import URL, Engine, create_engine, text
from sqlalchemy.exc import InternalError, ProgrammingError

from agent.store.connection import open_engine
from agent.store.migrating import upgrade
from tests.deploy.composed import mounted

SCRIPT = mounted("postgres", "/docker-entrypoint-initdb.d/grafana-reader.sh")


def make_reader(owner: URL) -> URL:
    told = {
        "PGHOST": str(owner.host),
        "PGPORT": str(owner.port),
        "POSTGRES_USER": str(owner.username),
        "POSTGRES_DB": str(owner.database),
        # A quote would end a careless script's string.
        "GRAFANA_READER_PASSWORD": "it's",
    }
    subprocess.run(["sh", SCRIPT], env={**os.environ, **told}, check=True, capture_output=True)
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
    # The tables come after the role, as in the container.
    upgrade(owner)
    yield engine
    engine.dispose()


def test_the_reader_reads_tables_that_come_after_it(reader: Engine) -> None:
    with reader.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM requests")) == 0


@pytest.mark.parametrize("statement", ["DELETE FROM requests", "CREATE TABLE mine (a integer)"])
def test_the_reader_changes_nothing_even_if_it_asks_for_more(
    reader: Engine, statement: str
) -> None:
    with pytest.raises(InternalError, match="read-only"), reader.connect() as connection:
        connection.execute(text(statement))
    with reader.connect() as connection:
        connection.execute(text("SET TRANSACTION READ WRITE"))
        with pytest.raises(ProgrammingError, match="permission denied"):
            connection.execute(text(statement))
