"""A writer that is killed, and a shared database that is away."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
from sqlalchemy import Engine

from agent.errors import StoreUnavailable
from agent.store.minute_sums import merge_minutes
from agent.store.minutes import MinuteStore
from agent.store.objectives import ObjectiveStore
from agent.store.retention import Retention
from agent.store.store_queries import StoreQueries
from tests.real_parts.postgres import PostgresServer
from tests.store.making import (
    NOON,
    Key,
    counted_rollups,
    counted_rows,
    some,
    store,
    stored_keys,
)
from tests.store.write_until_killed import BATCH

ACKNOWLEDGED_BEFORE_THE_END = 200


def test_requests_that_a_killed_process_acknowledged_are_stored(sqlite: Engine) -> None:
    command = [sys.executable, "-m", "tests.store.write_until_killed", str(sqlite.url)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            reported = [process.stdout.readline() for _ in range(ACKNOWLEDGED_BEFORE_THE_END)]
        finally:
            process.kill()
        reported += process.stdout.readlines()
    acknowledged = {_key(line) for line in reported if line.endswith("\n")}
    assert len(acknowledged) >= ACKNOWLEDGED_BEFORE_THE_END
    stored = stored_keys(sqlite)
    assert acknowledged <= set(stored)
    # A commit is atomic, rollups included.
    assert len(stored) % BATCH == 0
    assert counted_rollups(sqlite) == counted_rows(sqlite)
    assert len(store(sqlite, some(range(-5, 0)))) == 5


def _key(line: str) -> Key:
    trace_id, span_id = line.split()
    return trace_id, span_id


@pytest.fixture
def outage(postgres_server: PostgresServer) -> Iterator[PostgresServer]:
    """The server; it runs again after the test, also after a failed one."""
    yield postgres_server
    postgres_server.kill()
    postgres_server.restart()


def test_every_part_of_the_store_reports_an_unreachable_database_and_works_when_it_is_back(
    postgres: Engine, outage: PostgresServer
) -> None:
    queries, minutes = StoreQueries(postgres), MinuteStore(postgres, "agent-0")
    tasks = (
        lambda: ObjectiveStore(postgres, "agent-0").write_in_force([], NOON),
        lambda: Retention(postgres).expire(0, 0, NOON),
        lambda: minutes.expire(NOON),
        lambda: merge_minutes(postgres, "agent-0", NOON),
        lambda: queries.request("request-1"),
        lambda: queries.newest_gpu_samples(NOON),
    )
    for task in tasks:
        task()
    outage.kill()
    for task in tasks:
        with pytest.raises(StoreUnavailable) as refused:
            task()
        assert "\n" not in str(refused.value)
    outage.restart()
    for task in tasks:
        task()
