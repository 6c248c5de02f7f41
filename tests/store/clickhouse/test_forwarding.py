"""What is in a journal is in ClickHouse, once, whatever happens to either.

The engine is ClickHouse's own, from chDB, with its own deduplication and views; the HTTP in front
of it is of the tests.
"""

import shutil
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from clickhouse_connect.driver.exceptions import OperationalError
from sqlalchemy import Engine, Table, select, text

from agent.catalog.causes import Cause
from agent.records.engine import EngineSample
from agent.records.event import Confidence, Event, EventKind
from agent.store.agent_state import AgentState
from agent.store.amending import request_amend
from agent.store.clickhouse import claims, destination, forwarded_rows
from agent.store.clickhouse.upkeep import ClickHouseUpkeep, merge_minutes_there
from agent.store.clickhouse.vector_rows import encoded_from
from agent.store.connection import for_writing, open_engine
from agent.store.journal.waiting import Lag
from agent.store.migrating import upgrade
from agent.store.minute_sums import MERGED, merge_minutes
from agent.store.minutes import MinuteStore
from agent.store.observations import ObservationStore
from agent.store.rollups import FIGURES, Series
from agent.store.tables import engine_minutes, engine_samples, events, gpu_samples, requests
from tests.real_parts.clickhouse import ClickHouseServer
from tests.real_parts.clickhouse_lossy import lossy_way
from tests.real_parts.waiting import eventually
from tests.records.minutes import minute
from tests.store.explaining import explain, explained, missed, share, summed_causes
from tests.store.journal.forwarded import Forwarding, forwarding, journal_in, new_run
from tests.store.making import NOON, WITHIN_S, gpu_sample, rollup_bytes, some, store, stored_keys
from tests.store.views import DUE, JUDGE, JoiningAgent, engine_view, proxy_view, states

NOTED = (requests, engine_samples, gpu_samples, events, engine_minutes)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What changes waits less for the next batch than that of an agent."""
    monkeypatch.setattr(destination.ClickHouseDestination, "idle_s", 0.05)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Engine]:
    with journal_in(tmp_path) as engine:
        yield engine


@pytest.fixture
def shared(clickhouse_url: str) -> Iterator[Engine]:
    """A migrated database that keeps what is older than the server's clock lets it."""
    engine = open_engine(clickhouse_url)
    upgrade(engine)
    with engine.connect() as connection:
        for table in ("rollups", "fleet_rollups", "cause_rollups"):
            connection.execute(text(f"ALTER TABLE {table} REMOVE TTL"))
    yield engine
    engine.dispose()


def stored(engine: Engine, table: Table) -> Sequence[dict[str, Any]]:
    """All rows of a table, without the numbers that each database gives."""
    names = [column.name for column in table.c if column.name != "id"]
    with engine.connect() as connection:
        found = connection.execute(select(*(table.c[name] for name in names))).mappings()
        return sorted(({name: row[name] for name in names} for row in found), key=str)


def summed(engine: Engine) -> dict[tuple[Any, ...], tuple[bytes | None, ...]]:
    """The rollups of ClickHouse as another database would store them."""
    place = ("width_s", "starts_at", *Series._fields)
    inner = (
        f"SELECT {', '.join(place)}, figure, place, sum(n) AS number FROM rollups "
        f"GROUP BY {', '.join(place)}, figure, place HAVING number != 0"
    )
    query = (
        f"SELECT {', '.join(place)}, figure, groupArray(place), groupArray(number) "
        f"FROM ({inner}) GROUP BY {', '.join(place)}, figure"
    )
    vectors: dict[tuple[Any, ...], dict[str, bytes | None]] = {}
    with engine.connect() as connection:
        for *key, figure, places, numbers in connection.execute(text(query)):
            vectors.setdefault(tuple(key), {})[figure] = encoded_from(places, numbers)
    return {key: tuple(found.get(name) for name in FIGURES) for key, found in vectors.items()}


def of_fleet(engine: Engine, table: str) -> Sequence[tuple[Any, ...]]:
    """The sums of a table of rollups over all agents and engines."""
    place = "width_s, starts_at, model, tenant, input_length, judged_by, figure, place"
    query = (
        f"SELECT {place}, sum(n) AS number FROM {table} GROUP BY {place} "
        f"HAVING number != 0 ORDER BY {place}"
    )
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(text(query))]


def causes(engine: Engine) -> dict[tuple[Any, ...], list[Any]]:
    place = ("width_s", "starts_at", "tenant", "objective", "limit_name", "cause")
    query = (
        f"SELECT {', '.join(place)}, sum(requests) AS counted, sum(top_requests), "
        f"round(sum(excess_s), 6) FROM cause_rollups GROUP BY {', '.join(place)} HAVING counted > 0"
    )
    with engine.connect() as connection:
        return {tuple(row[:6]): [*row[6:]] for row in connection.execute(text(query))}


def same_in_both(journal: Engine, shared: Engine) -> None:
    for table in NOTED:
        assert stored(journal, table) == stored(shared, table), table.name
    assert summed(shared) == rollup_bytes(journal)
    assert of_fleet(shared, "fleet_rollups") == of_fleet(shared, "rollups")
    assert causes(shared) == summed_causes(journal)


def event(second: int) -> Event:
    return Event(
        at=NOON + second, engine="chat-0", kind=EventKind.RESTART, confidence=Confidence.CERTAIN
    )


def test_every_kind_of_row_is_forwarded_as_it_is(
    journal: Engine, shared: Engine, clickhouse_url: str
) -> None:
    observations = ObservationStore(journal, "agent-0")
    with forwarding(journal, clickhouse_url):
        store(journal, some(range(20), model="o'neil \\ %s \N{SNOWMAN}"))
        observations.write_engine_sample(
            EngineSample(engine="chat-0", at=NOON, dialect="vllm", model="llama", facts={})
        )
        observations.write_gpu_samples([gpu_sample(NOON), gpu_sample(NOON + 1)])
        observations.write_event(event(0))
        MinuteStore(journal, "agent-0").write([minute()], (), NOON)
    assert [len(stored(shared, table)) for table in NOTED] == [20, 1, 2, 1, 1]
    same_in_both(journal, shared)


def test_what_changes_after_it_was_forwarded_is_forwarded_again(
    journal: Engine, shared: Engine, clickhouse_url: str
) -> None:
    agent, minutes = JoiningAgent(journal), MinuteStore(journal, "agent-0")
    with forwarding(journal, clickhouse_url) as forwarded:
        agent.take(proxy_view(1), proxy_view(2), proxy_view(3), engine_view(4))
        forwarded.all_forwarded()
        assert stored_keys(shared) == []
        agent.settle(DUE)
        forwarded.all_forwarded()
        assert states(shared) == [("engine", True, False)] + [("proxy", True, False)] * 3
        # The late views make joined rows of those that were settled alone. The last one began
        # in another month than its other view.
        agent.take(engine_view(1), engine_view(2), proxy_view(4, started_at=NOON - 40 * 86400))
        forwarded.all_forwarded()
        assert states(shared) == [("joined", True, False)] * 3 + [("proxy", True, False)]
        late = missed(9)
        store(journal, [late])
        explain(journal, explained(late, share(Cause.BURST, 0.5)))
        minutes.write([minute()], (), NOON)
        forwarded.all_forwarded()
        explain(journal, explained(late, share(Cause.KV_PRESSURE, 0.25)))
        minutes.write([minute(requests=7)], (), NOON)
        superseded = proxy_view(3).record
        request_amend(journal, JUDGE)({}, [(superseded.trace_id, superseded.span_id)])
    same_in_both(journal, shared)
    assert [row["requests"] for row in stored(shared, engine_minutes)] == [7]
    assert {place[-1] for place in causes(shared)} == {"kv_pressure"}


def test_a_change_counts_also_after_the_clock_was_set_back(
    journal: Engine, shared: Engine, clickhouse_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    minutes = MinuteStore(journal, "agent-0")
    minutes.write([minute()], (), NOON)
    with forwarding(journal, clickhouse_url):
        pass
    monkeypatch.setattr(time, "time_ns", lambda: 10**18)
    minutes.write([minute(requests=7)], (), NOON)
    with forwarding(journal, clickhouse_url):
        pass
    assert [row["requests"] for row in stored(shared, engine_minutes)] == [7]


def test_agents_stand_side_by_side(
    journal: Engine, shared: Engine, clickhouse_url: str, tmp_path: Path
) -> None:
    with journal_in(tmp_path, "other.db") as other:
        store(journal, some(range(5)))
        store(other, some(range(5, 9), agent="agent-1"))
        with (
            forwarding(journal, clickhouse_url, notes_per_batch=3),
            forwarding(other, clickhouse_url, agent="agent-1"),
        ):
            pass
        assert summed(shared) == rollup_bytes(journal) | rollup_bytes(other)
    assert len(stored_keys(shared)) == 9


# Once


@pytest.mark.parametrize("sends_again", ["the driver", "the forwarder"])
def test_a_batch_whose_answer_was_lost_is_stored_once(
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


def test_a_batch_is_stored_once_when_the_agent_was_killed_before_the_answer(
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


def test_a_row_that_is_refused_for_its_content_is_left_out_and_counted(
    journal: Engine, shared: Engine, clickhouse_url: str
) -> None:
    store(journal, some(range(30)))
    with for_writing(journal).begin() as connection:
        connection.execute(text("UPDATE requests SET ttft_s = 'soon' WHERE id = 7"))
    with forwarding(journal, clickhouse_url) as forwarded:
        pass
    assert len(stored_keys(shared)) == 29
    # Of its insert and of its change.
    assert forwarded.refused == 2
    assert summed(shared) == rollup_bytes(journal)


def test_sums_that_are_refused_are_sent_again_in_smaller_batches(
    journal: Engine, shared: Engine, clickhouse_url: str
) -> None:
    for number in range(4):
        store(journal, some([number], tenant=f"t-{number}"))
    with for_writing(journal).begin() as connection:
        connection.execute(text("UPDATE journal_rollups SET starts_at = 'x' WHERE tenant = 't-2'"))
    with forwarding(journal, clickhouse_url) as forwarded:
        pass
    assert forwarded.refused == 1
    assert {place[5] for place in summed(shared)} == {"t-0", "t-1", "t-3"}
    assert len(stored_keys(shared)) == 4


def test_a_server_that_is_killed_and_comes_back_gets_everything(
    journal: Engine, tmp_path: Path
) -> None:
    (folder := tmp_path / "server").mkdir()
    server = ClickHouseServer(folder)
    server.execute("CREATE DATABASE goodput")
    with forwarding(journal, server.url("goodput")) as forwarded:
        store(journal, some(range(5)))
        forwarded.all_forwarded()
        server.kill()
        store(journal, some(range(5, 10)))
        reason = str(eventually(forwarded.forwarder.problem, within_s=WITHIN_S, what="the reason"))
        assert "s3cret" not in reason
        assert "127.0.0.1" not in reason
        server.restart()
    assert forwarded.forwarder.problem() is None
    engine = open_engine(server.url("goodput"))
    assert len(stored_keys(engine)) == 10
    days = {key: found for key, found in rollup_bytes(journal).items() if key[0] == 86400}
    assert {key: found for key, found in summed(engine).items() if key[0] == 86400} == days
    engine.dispose()
    server.stop()


def test_a_server_that_is_frozen_is_not_waited_for_long(
    journal: Engine,
    clickhouse_url: str,
    clickhouse_server: ClickHouseServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(destination, "STATEMENT_S", 0.5)
    with forwarding(journal, clickhouse_url) as forwarded:
        eventually(
            lambda: forwarded.forwarder.problem() is None, within_s=WITHIN_S, what="the begin"
        )
        with clickhouse_server.frozen():
            store(journal, some(range(5)))
            eventually(forwarded.forwarder.problem, within_s=WITHIN_S, what="the reason")
        monkeypatch.undo()


# Upkeep


def test_old_minutes_are_merged_there_as_in_the_other_databases(
    journal: Engine, shared: Engine, clickhouse_url: str
) -> None:
    minutes = [minute(-number, requests=number) for number in range(300)]
    MinuteStore(journal, "agent-0").write(minutes, (), NOON)
    with forwarding(journal, clickhouse_url):
        pass
    later = NOON + MERGED[0][1]
    assert merge_minutes_there(shared, "agent-0", later) > 0
    merge_minutes(journal, "agent-0", later)
    assert stored(shared, engine_minutes) == stored(journal, engine_minutes)
    assert len(stored(shared, engine_minutes)) < 300


def test_the_server_deletes_what_is_older_than_the_settings_say(
    journal: Engine, clickhouse_url: str
) -> None:
    store(journal, some(range(3)))
    store(journal, some(range(3, 5), started_at=time.time(), ended_at=time.time()))
    with forwarding(journal, clickhouse_url):
        pass
    keeping = ClickHouseUpkeep(
        clickhouse_url, "agent-0", keep_requests_s=7200.0, keep_rollups_s=1e8, max_series=1
    )
    keeping.expire(time.time())
    engine = open_engine(clickhouse_url)
    with engine.connect() as connection:
        connection.execute(text("OPTIMIZE TABLE requests FINAL"))
    assert len(stored_keys(engine)) == 2
    engine.dispose()
    keeping.close()


def test_what_is_kept_for_a_century_is_kept(journal: Engine, clickhouse_url: str) -> None:
    store(journal, some(range(3), started_at=time.time(), ended_at=time.time()))
    with forwarding(journal, clickhouse_url):
        pass
    century_s = 100 * 365 * 86400.0
    keeping = ClickHouseUpkeep(
        clickhouse_url,
        "agent-0",
        keep_requests_s=century_s,
        keep_rollups_s=century_s,
        max_series=1,
    )
    keeping.expire(time.time())
    keeping.close()
    engine = open_engine(clickhouse_url)
    with engine.connect() as connection:
        for table in ("requests", "rollups"):
            connection.execute(text(f"OPTIMIZE TABLE {table} FINAL"))
    assert len(stored_keys(engine)) == 3
    assert {key[0] for key in summed(engine)} >= {86400}
    engine.dispose()


def test_an_agent_keeps_its_name_when_the_servers_clock_was_set_back(
    shared: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = claims.server_now_us

    def claim(instance: str) -> claims.ClickHouseClaim:
        return claims.ClickHouseClaim(
            "agent-0", instance, state=AgentState(), lag=lambda: Lag(0, 0.0)
        )

    monkeypatch.setattr(claims, "server_now_us", lambda client: before(client) + 3_600_000_000)
    first = claim("here:1:1")
    first.take(shared)
    first.release(shared)
    monkeypatch.setattr(claims, "server_now_us", before)
    second = claim("here:2:2")
    second.take(shared)
    second.beat(shared)
