"""What is in an agent's file is in the shared database, once, whatever happens to either."""

import shutil
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, Table, select, text

from agent import __version__
from agent.catalog.causes import Cause
from agent.records.engine import EngineSample
from agent.records.event import Confidence, Event, EventKind
from agent.store.claim import NameClaim
from agent.store.connection import for_writing, without_number
from agent.store.minutes import MinuteStore
from agent.store.observations import ObservationStore
from agent.store.publishing import publisher
from agent.store.publishing.changes import file_state
from agent.store.tables import (
    agents,
    engine_minutes,
    engine_samples,
    events,
    gpu_samples,
    objectives,
    requests,
)
from agent.store.transactions import request_amend
from tests.real_parts.postgres import PostgresServer
from tests.real_parts.waiting import eventually
from tests.records.minutes import minute
from tests.store.explaining import explain, explained, missed, share, summed_causes
from tests.store.making import (
    NOON,
    WITHIN_S,
    counted_rollups,
    counted_rows,
    fold,
    gpu_sample,
    rollup_bytes,
    some,
    store,
    stored_keys,
)
from tests.store.publishing.published import CUT_OFF_S, Publishing, file_in, opened, publishing
from tests.store.views import DUE, JUDGE, JoiningAgent, engine_view, proxy_view, states

PUBLISHED = (requests, engine_samples, gpu_samples, events, engine_minutes)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Engine]:
    """A new file of an agent."""
    with file_in(tmp_path) as engine:
        yield engine


def stored(engine: Engine, table: Table) -> Sequence[dict[str, Any]]:
    """All rows of a table, without the numbers that each database gives."""
    names = [column.name for column in table.c if column.name != "id"]
    with engine.connect() as connection:
        found = connection.execute(select(*(table.c[name] for name in names))).mappings()
        return sorted(({name: row[name] for name in names} for row in found), key=str)


def same_in_both(file: Engine, shared: Engine) -> None:
    """Rows, rollups and causes are equal, and the rollups are the sums of the rows."""
    for table in PUBLISHED:
        assert stored(file, table) == stored(shared, table), table.name
    assert rollup_bytes(file) == rollup_bytes(shared)
    assert counted_rollups(shared) == counted_rows(shared)
    assert summed_causes(file) == summed_causes(shared)


def event(second: int) -> Event:
    return Event(
        at=NOON + second, engine="chat-0", kind=EventKind.RESTART, confidence=Confidence.CERTAIN
    )


def test_every_kind_of_row_is_published_as_it_is(
    file: Engine, postgres: Engine, emptied_postgres_url: str
) -> None:
    observations = ObservationStore(file, "agent-0")
    with publishing(file, emptied_postgres_url):
        store(file, some(range(20)))
        observations.write_engine_sample(
            EngineSample(engine="chat-0", at=NOON, dialect="vllm", model="llama", facts={})
        )
        observations.write_gpu_samples([gpu_sample(NOON), gpu_sample(NOON + 1)])
        observations.write_event(event(0))
        MinuteStore(file, "agent-0").write([minute()], (), NOON)
    assert [len(stored(postgres, table)) for table in PUBLISHED] == [20, 1, 2, 1, 1]
    assert [row["name"] for row in stored(postgres, objectives)] == ["chat"]
    same_in_both(file, postgres)


def test_what_changes_after_it_was_published_is_published_again(
    file: Engine, postgres: Engine, emptied_postgres_url: str
) -> None:
    agent = JoiningAgent(file)
    minutes = MinuteStore(file, "agent-0")
    with publishing(file, emptied_postgres_url) as running:
        agent.take(proxy_view(1), proxy_view(2), proxy_view(3))
        running.all_published()
        assert stored_keys(postgres) == []
        agent.settle(DUE)
        running.all_published()
        assert states(postgres) == [("proxy", True, False)] * 3
        # The late views make joined rows of those that were settled alone.
        agent.take(engine_view(1), engine_view(2))
        running.all_published()
        assert states(postgres)[:2] == [("joined", True, False)] * 2
        fold(file)
        late = missed(9)
        store(file, [late])
        explain(file, explained(late, share(Cause.BURST, 0.5)))
        minutes.write([minute()], (), NOON)
        running.all_published()
        explain(file, explained(late, share(Cause.KV_PRESSURE, 0.25)))
        minutes.write([minute(requests=7)], (), NOON)
        superseded = proxy_view(3).record
        request_amend(file, JUDGE)({}, [(superseded.trace_id, superseded.span_id)])
    same_in_both(file, postgres)
    assert len(states(postgres)) == 3
    assert [row["requests"] for row in stored(postgres, engine_minutes)] == [7]
    assert {place[-1] for place in summed_causes(postgres)} == {"kv_pressure"}


def test_batches_may_end_anywhere(
    file: Engine, postgres: Engine, emptied_postgres_url: str
) -> None:
    agent = JoiningAgent(file)
    with publishing(file, emptied_postgres_url, rows_per_batch=3) as to:
        for number in range(4):
            agent.take(proxy_view(number))
        agent.settle(DUE)
        for number in range(4):
            agent.take(engine_view(number))
        for number in range(100, 110):
            store(file, some([number]))
    # Before each batch, senders come first.
    assert to.given_way >= 10 / 3
    same_in_both(file, postgres)
    assert states(postgres).count(("joined", True, False)) == 4


def test_a_joined_row_takes_the_place_of_the_engines_row_that_began_later(
    file: Engine, postgres: Engine, emptied_postgres_url: str
) -> None:
    agent = JoiningAgent(file)
    with publishing(file, emptied_postgres_url) as running:
        agent.take(engine_view(1), engine_view(2))
        agent.settle(DUE)
        running.all_published()
        assert states(postgres) == [("engine", True, False)] * 2
        # It goes to the partition of the day before.
        before_midnight = proxy_view(2, started_at=NOON - NOON % 86400 - 1)
        agent.take(proxy_view(1), before_midnight)
    same_in_both(file, postgres)
    assert states(postgres) == [("joined", True, False)] * 2


def test_views_of_two_agents_and_their_sums_stand_side_by_side(
    file: Engine, postgres: Engine, emptied_postgres_url: str, tmp_path: Path
) -> None:
    with file_in(tmp_path, "other.db") as other:
        store(file, some(range(5)))
        store(other, some(range(5, 9), agent="agent-1"))
        with (
            publishing(file, emptied_postgres_url),
            publishing(other, emptied_postgres_url, agent="agent-1"),
        ):
            pass
    assert counted_rollups(postgres) == counted_rows(postgres)
    assert len(stored_keys(postgres)) == 9


def test_each_beat_writes_what_waits(
    file: Engine,
    postgres: Engine,
    emptied_postgres_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publisher, "BEAT_EVERY_S", 0.0)
    store(file, some(range(20)))

    def waiting_rows() -> int | None:
        rows: list[int | None] = [row["waiting_rows"] for row in stored(postgres, agents)]
        return rows[0] if rows else None

    with postgres.begin() as connection:
        connection.execute(text("LOCK TABLE requests"))
        running = Publishing(file, emptied_postgres_url)
        waiting = running.waiting()
        running.publisher.start()
        eventually(lambda: waiting_rows() == waiting == 20, within_s=WITHIN_S, what="the lag")
    eventually(lambda: waiting_rows() == 0, within_s=WITHIN_S, what="a lag of nothing")
    (row,) = stored(postgres, agents)
    assert (row["lag_s"], row["version"]) == (0.0, __version__)
    running.publisher.close(WITHIN_S)
    (row,) = stored(postgres, agents)
    assert row["stopped_at"] is not None


def test_a_row_waits_since_it_came_and_not_since_the_row_before_it(
    file: Engine,
    postgres: Engine,
    emptied_postgres_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publisher, "BEAT_EVERY_S", 0.0)
    store(file, some([1]))
    with publishing(file, emptied_postgres_url) as running:
        running.all_published()
        with without_number(for_writing(file)).begin() as connection:
            connection.execute(text("UPDATE publishing SET complete_at = '2020-01-01 00:00:00'"))

        def is_noted() -> bool:
            with file.connect() as connection:
                return time.time() - file_state(connection).complete_at < WITHIN_S

        eventually(is_noted, within_s=WITHIN_S, what="the time at which nothing waited")


def test_nothing_is_published_while_another_agent_has_the_name(
    file: Engine, postgres: Engine, emptied_postgres_url: str
) -> None:
    taken = NameClaim("agent-0", "elsewhere:1:other")
    taken.take(postgres)
    store(file, some([1]))
    with publishing(file, emptied_postgres_url) as running:
        eventually(
            lambda: "another agent" in str(running.publisher.problem()),
            within_s=WITHIN_S,
            what="the reason",
        )
        assert stored_keys(postgres) == []
        taken.release(postgres)
    assert len(stored_keys(postgres)) == 1


# Once


def copied(file: Engine) -> Path:
    """A backup of the file."""
    path = Path(str(file.url.database))
    backup = path.with_name("backup.db")
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(backup)) as copy:
        source.backup(copy)
    return backup


def restored(file: Engine, backup: Path) -> None:
    """Put the backup in the place of the file, and start with it."""
    file.dispose()
    path = str(file.url.database)
    for ending in ("-wal", "-shm"):
        Path(f"{path}{ending}").unlink(missing_ok=True)
    shutil.copy(backup, path)
    opened(file)


def test_a_batch_whose_commit_got_no_response_is_stored_once(
    file: Engine, postgres: Engine, emptied_postgres_url: str
) -> None:
    """The agent was killed after the commit there, before it was noted here."""
    store(file, some(range(5)))
    ObservationStore(file, "agent-0").write_event(event(0))
    with publishing(file, emptied_postgres_url):
        pass
    with for_writing(file).begin() as connection:
        connection.execute(text("UPDATE publishing SET published = 0"))
    store(file, some(range(5, 8)))
    ObservationStore(file, "agent-0").write_event(event(1))
    with publishing(file, emptied_postgres_url):
        pass
    same_in_both(file, postgres)
    assert len(stored_keys(postgres)) == 8
    assert len(stored(postgres, events)) == 2


def test_a_file_that_was_restored_from_a_backup_gets_back_what_was_published_since(
    file: Engine, postgres: Engine, emptied_postgres_url: str
) -> None:
    agent = JoiningAgent(file)
    store(file, some(range(5)))
    agent.take(proxy_view(7))
    with publishing(file, emptied_postgres_url):
        pass
    backup = copied(file)
    late = missed(20)
    with publishing(file, emptied_postgres_url):
        agent.take(engine_view(7))
        store(file, [*some(range(5, 10)), late])
        explain(file, explained(late, share(Cause.BURST, 0.5)))
        MinuteStore(file, "agent-0").write([minute()], (), NOON)
    restored(file, backup)
    with publishing(file, emptied_postgres_url) as running:
        assert running.publisher.is_complete(WITHIN_S)
        # Its senders send some of them again.
        store(file, some(range(3, 12)))
        agent.take(proxy_view(7), engine_view(7))
    same_in_both(file, postgres)
    assert len(stored_keys(postgres)) == 14
    assert len(stored(postgres, engine_minutes)) == 1


def test_the_sums_of_a_file_that_was_lost_stay(
    file: Engine, postgres: Engine, emptied_postgres_url: str, tmp_path: Path
) -> None:
    store(file, some(range(5)))
    with publishing(file, emptied_postgres_url):
        pass
    with file_in(tmp_path, "next.db") as following:
        store(following, some(range(5, 9)))
        with publishing(following, emptied_postgres_url):
            pass
    assert counted_rollups(postgres) == counted_rows(postgres)
    assert len(stored_keys(postgres)) == 9


def test_a_row_that_the_shared_database_refuses_is_left_out_and_counted(
    file: Engine, postgres: Engine, emptied_postgres_url: str
) -> None:
    store(file, some(range(30)))
    store(file, some([30], model="m" * 5000))
    store(file, some(range(31, 60)))
    with publishing(file, emptied_postgres_url) as running:
        pass
    assert len(stored_keys(postgres)) == 59
    # Its row, its series and the rollups of this series.
    assert running.refused > 1
    assert counted_rollups(postgres) == counted_rows(postgres)


def test_a_database_that_is_too_slow_for_a_batch_gets_smaller_ones(
    file: Engine, postgres: Engine, emptied_postgres_url: str
) -> None:
    slow = f"BEGIN PERFORM pg_sleep({CUT_OFF_S / 50}); RETURN NEW; END"
    with postgres.begin() as connection:
        connection.execute(
            text(f"CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS '{slow}'")
        )
        connection.execute(
            text(
                "CREATE TRIGGER slow BEFORE INSERT ON requests FOR EACH ROW EXECUTE FUNCTION slow()"
            )
        )
    for number in range(0, 80, 8):
        store(file, some(range(number, number + 8)))
    try:
        with publishing(file, emptied_postgres_url):
            pass
    finally:
        with postgres.begin() as connection:
            connection.execute(text("DROP FUNCTION slow CASCADE"))
    same_in_both(file, postgres)
    assert len(stored_keys(postgres)) == 80


# While the shared database is away


@contextmanager
def stopped(server: PostgresServer, _url: str) -> Iterator[None]:
    server.stop()
    try:
        yield
    finally:
        server.restart()


@contextmanager
def killed(server: PostgresServer, _url: str) -> Iterator[None]:
    server.kill()
    try:
        yield
    finally:
        server.restart()


@contextmanager
def frozen(server: PostgresServer, _url: str) -> Iterator[None]:
    with server.frozen():
        yield


def _sql(url: str, statement: str) -> None:
    # Of another database: this one may refuse connections.
    place = url.replace("+psycopg", "").rpartition("/")[0]
    with psycopg.connect(f"{place}/postgres", autocommit=True) as connection:
        connection.execute(statement.encode())


@contextmanager
def out_of_connections(_server: PostgresServer, url: str) -> Iterator[None]:
    name = url.rpartition("/")[2]
    _sql(url, f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
    _sql(url, f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")
    try:
        yield
    finally:
        _sql(url, f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")


@pytest.mark.slow
@pytest.mark.parametrize("outage", [stopped, killed, frozen, out_of_connections])
def test_what_is_stored_in_an_outage_is_published_in_order_after_it(
    file: Engine,
    postgres: Engine,
    emptied_postgres_url: str,
    postgres_server: PostgresServer,
    outage: Any,
) -> None:
    observations = ObservationStore(file, "agent-0")
    with publishing(file, emptied_postgres_url) as running:
        store(file, some(range(10)))
        running.all_published()
        with outage(postgres_server, emptied_postgres_url):
            for second in range(30):
                store(file, some(range(10 * second + 10, 10 * second + 20)))
                observations.write_event(event(second))
            eventually(
                lambda: running.publisher.problem() is not None,
                within_s=WITHIN_S,
                what="the reason",
            )
            assert not running.publisher.is_complete(0)
            assert running.waiting() > 300
            store(file, some(range(1000, 1010)))
        # New rows keep coming while it catches up.
        store(file, some(range(2000, 2010)))
        running.all_published()
        eventually(
            lambda: running.publisher.problem() is None, within_s=WITHIN_S, what="no problem"
        )
    same_in_both(file, postgres)
    assert len(stored_keys(postgres)) == 330
    with postgres.connect() as connection:
        times = connection.execute(select(events.c.at).order_by(events.c.id)).scalars().all()
    assert times == [NOON + second for second in range(30)]
