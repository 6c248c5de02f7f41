"""ClickHouse has each row and sum once, also after lost answers, kills and restored journals."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from clickhouse_connect.driver.exceptions import OperationalError
from sqlalchemy import Engine, text

from agent.catalog.causes import Cause
from agent.store.clickhouse import destination, forwarded_rows
from agent.store.observations import ObservationStore
from tests.real_parts.clickhouse import ClickHouseServer, lossy_way
from tests.real_parts.waiting import eventually
from tests.store.clickhouse.compared import (
    event,
    same_in_both,
)
from tests.store.explaining import explain, explained, missed, share
from tests.store.journal.forwarded import Forwarding, forwarding, new_run
from tests.store.making import NOON, WITHIN_S, some, store, stored_keys


@pytest.mark.parametrize("sends_again", ["the driver", "the forwarder"])
def test_a_batch_whose_response_was_lost_is_stored_once(
    journal: Engine,
    shared: Engine,
    clickhouse_url: str,
    clickhouse_server: ClickHouseServer,
    sends_again: str,
) -> None:
    database = clickhouse_url.rpartition("/")[2]
    with lossy_way(clickhouse_server.http) as (way, port):
        url = clickhouse_server.url(database, port)
        way.status = None if sends_again == "the driver" else 500
        # That of sums, and that of rows.
        for loses in ("insert_deduplication_token", "async_insert"):
            way.loses, before = loses, way.lost
            store(journal, some(range(before * 10, before * 10 + 5)))
            ObservationStore(journal, "agent-0").write_event(event(before))
            late = missed(before * 10 + 9)
            store(journal, [late])
            explain(journal, explained(late, share(Cause.BURST, 0.5)))
            with forwarding(journal, url):
                eventually(lambda: way.lost > before, within_s=WITHIN_S, what="a lost answer")  # noqa: B023
                way.loses = None
            same_in_both(journal, shared)


def test_a_batch_is_stored_once_when_the_agent_was_killed_before_the_response(
    journal: Engine, shared: Engine, clickhouse_url: str, clickhouse_server: ClickHouseServer
) -> None:
    database = clickhouse_url.rpartition("/")[2]
    store(journal, some(range(5)))
    with lossy_way(clickhouse_server.http) as (way, port):
        way.loses = "insert_deduplication_token"
        killed = Forwarding(journal, clickhouse_server.url(database, port))
        killed.forwarder.start()
        eventually(lambda: way.lost > 0, within_s=WITHIN_S, what="a lost answer")
        killed.forwarder.close(WITHIN_S)
    assert killed.waiting() > 0
    new_run(journal)
    store(journal, some(range(5, 8)))
    with forwarding(journal, clickhouse_url):
        pass
    same_in_both(journal, shared)


def test_a_batch_is_stored_once_when_the_journal_does_not_know_that_it_was_sent(
    journal: Engine, shared: Engine, clickhouse_url: str
) -> None:
    """It was restored from a backup."""
    store(journal, some(range(5)))
    ObservationStore(journal, "agent-0").write_event(event(0))
    before = backup_of(journal)
    with forwarding(journal, clickhouse_url):
        pass
    restore(journal, before)
    new_run(journal)
    store(journal, some(range(5, 8)))
    with forwarding(journal, clickhouse_url):
        pass
    same_in_both(journal, shared)


def backup_of(journal: Engine) -> Path:
    file = Path(str(journal.url.database))
    before = file.with_name("before.db")
    with closing(sqlite3.connect(file)) as source, closing(sqlite3.connect(before)) as copy:
        source.backup(copy)
    return before


def restore(journal: Engine, before: Path) -> None:
    file = Path(str(journal.url.database))
    journal.dispose()
    for ending in ("-wal", "-shm"):
        Path(f"{file}{ending}").unlink(missing_ok=True)
    shutil.copy(before, file)


def test_what_comes_after_a_restored_backup_is_stored_though_the_server_has_more_of_its_run(
    journal: Engine, shared: Engine, clickhouse_url: str
) -> None:
    store(journal, some(range(5)))
    before = backup_of(journal)
    store(journal, some(range(5, 15)))
    with forwarding(journal, clickhouse_url):
        pass
    restore(journal, before)
    new_run(journal)
    store(journal, some(range(15, 20)))
    with forwarding(journal, clickhouse_url) as forwarded:
        pass
    assert forwarded.forwarded > 0
    assert len(stored_keys(shared)) == 20


def test_a_batch_that_fails_after_one_that_was_not_forgotten_has_its_own_sums_alone(
    journal: Engine, shared: Engine, clickhouse_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent was killed when a batch was stored, and the next one is refused once."""
    store(journal, some(range(5)))
    before = backup_of(journal)
    with forwarding(journal, clickhouse_url):
        pass
    restore(journal, before)
    store(journal, some(range(5, 8)))
    write, failures = forwarded_rows.write_sums, [OperationalError("the network is down")]

    def write_sums(*given: Any) -> None:
        if failures:
            raise failures.pop()
        write(*given)

    monkeypatch.setattr(destination, "write_sums", write_sums)
    with forwarding(journal, clickhouse_url):
        pass
    assert not failures
    same_in_both(journal, shared)


@pytest.mark.parametrize("table", ["rollups", "fleet_rollups"])
def test_sums_that_one_table_did_not_take_are_added_there_later(
    journal: Engine, shared: Engine, clickhouse_url: str, table: str
) -> None:
    """The block is stored, and a view of it fails; meanwhile the agent starts anew."""
    store(journal, some(range(3)))
    with forwarding(journal, clickhouse_url):
        pass
    with shared.connect() as connection:
        connection.execute(text(f"ALTER TABLE {table} ADD CONSTRAINT refuses CHECK n < 0"))
    store(journal, some(range(3, 8)))
    ended = Forwarding(journal, clickhouse_url)
    ended.forwarder.start()
    eventually(ended.forwarder.problem, within_s=WITHIN_S, what="a begin")
    eventually(lambda: blocks(shared) > 1, within_s=WITHIN_S, what="the block")
    ended.forwarder.close(WITHIN_S)
    assert ended.waiting() > 0
    with shared.connect() as connection:
        connection.execute(text(f"ALTER TABLE {table} DROP CONSTRAINT refuses"))
    new_run(journal)
    store(journal, some(range(8, 9)))
    with forwarding(journal, clickhouse_url):
        pass
    same_in_both(journal, shared)


def blocks(engine: Engine) -> int:
    query = "SELECT uniqExact(last) FROM forwarded WHERE what != 'mark'"
    with engine.connect() as connection:
        return int(connection.execute(text(query)).scalar_one())


def test_requests_of_more_months_than_a_block_may_have_are_taken(
    journal: Engine, shared: Engine, clickhouse_url: str
) -> None:
    """A sender's clock is wrong in ever other ways."""
    for month in range(30):
        at = NOON - month * 31 * 86400
        store(journal, some([month], started_at=at, ended_at=at + 1))
    with forwarding(journal, clickhouse_url):
        pass
    same_in_both(journal, shared)


def test_a_batch_that_was_sent_long_ago_is_looked_for(
    journal: Engine,
    shared: Engine,
    clickhouse_url: str,
    clickhouse_server: ClickHouseServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others sent so many blocks since that the server does not know it by its token."""
    database = clickhouse_url.rpartition("/")[2]
    with shared.connect() as connection:
        for table in ("forwarded", "rollups", "fleet_rollups"):
            none_known = "MODIFY SETTING non_replicated_deduplication_window = 0"
            connection.execute(text(f"ALTER TABLE {table} {none_known}"))
    monkeypatch.setattr(destination, "_TOKEN_TRUSTED_S", 0.0)
    store(journal, some(range(5)))
    with lossy_way(clickhouse_server.http) as (way, port):
        way.loses, way.status = "insert_deduplication_token", 500
        with forwarding(journal, clickhouse_server.url(database, port)):
            eventually(lambda: way.lost > 0, within_s=WITHIN_S, what="a lost answer")
            way.loses = None
    same_in_both(journal, shared)
