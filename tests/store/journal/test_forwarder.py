"""What is in a journal is in the shared database, once, whatever happens to either."""

import shutil
import sqlite3
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
from agent.store.amending import request_amend
from agent.store.claim import NameClaim
from agent.store.connection import for_writing
from agent.store.journal import forwarder
from agent.store.minutes import MinuteStore
from agent.store.observations import ObservationStore
from agent.store.tables import (
    agents,
    engine_minutes,
    engine_samples,
    events,
    gpu_samples,
    objectives,
    requests,
)
from tests.real_parts.postgres import PostgresServer
from tests.real_parts.waiting import eventually
from tests.records.minutes import minute
from tests.store.explaining import explain, explained, missed, share, summed_causes
from tests.store.journal.forwarded import CUT_OFF_S, Forwarding, forwarding, journal_in, new_run
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
from tests.store.views import DUE, JUDGE, JoiningAgent, engine_view, proxy_view, states

NOTED = (requests, engine_samples, gpu_samples, events, engine_minutes)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Engine]:
    """A new journal."""
    with journal_in(tmp_path) as engine:
        yield engine


def stored(engine: Engine, table: Table) -> Sequence[dict[str, Any]]:
    """All rows of a table, without the numbers that each database gives."""
    names = [column.name for column in table.c if column.name != "id"]
    with engine.connect() as connection:
        found = connection.execute(select(*(table.c[name] for name in names))).mappings()
        return sorted(({name: row[name] for name in names} for row in found), key=str)


def same_in_both(journal: Engine, shared: Engine) -> None:
    """Rows, rollups and causes are equal, and the rollups are the sums of the rows."""
    for table in NOTED:
        assert stored(journal, table) == stored(shared, table), table.name
    assert rollup_bytes(journal) == rollup_bytes(shared)
    assert counted_rollups(shared) == counted_rows(shared)
    assert summed_causes(journal) == summed_causes(shared)


def event(second: int) -> Event:
    return Event(
        at=NOON + second, engine="chat-0", kind=EventKind.RESTART, confidence=Confidence.CERTAIN
    )


def test_every_kind_of_row_is_forwarded_as_it_is(
    journal: Engine, postgres: Engine, emptied_postgres_url: str
) -> None:
    observations = ObservationStore(journal, "agent-0")
    with forwarding(journal, emptied_postgres_url):
        store(journal, some(range(20)))
        observations.write_engine_sample(
            EngineSample(engine="chat-0", at=NOON, dialect="vllm", model="llama", facts={})
        )
        observations.write_gpu_samples([gpu_sample(NOON), gpu_sample(NOON + 1)])
        observations.write_event(event(0))
        MinuteStore(journal, "agent-0").write([minute()], (), NOON)
    assert [len(stored(postgres, table)) for table in NOTED] == [20, 1, 2, 1, 1]
    assert [row["name"] for row in stored(postgres, objectives)] == ["chat"]
    same_in_both(journal, postgres)


def test_what_changes_after_it_was_forwarded_is_forwarded_again(
    journal: Engine, postgres: Engine, emptied_postgres_url: str
) -> None:
    agent = JoiningAgent(journal)
    minutes = MinuteStore(journal, "agent-0")
    with forwarding(journal, emptied_postgres_url) as forwarded:
        agent.take(proxy_view(1), proxy_view(2), proxy_view(3))
        forwarded.all_forwarded()
        assert stored_keys(postgres) == []
        agent.settle(DUE)
        forwarded.all_forwarded()
        assert states(postgres) == [("proxy", True, False)] * 3
        # The late views make joined rows of those that were settled alone.
        agent.take(engine_view(1), engine_view(2))
        forwarded.all_forwarded()
        assert states(postgres)[:2] == [("joined", True, False)] * 2
        fold(journal)
        fold(postgres)
        late = missed(9)
        store(journal, [late])
        explain(journal, explained(late, share(Cause.BURST, 0.5)))
        minutes.write([minute()], (), NOON)
        forwarded.all_forwarded()
        explain(journal, explained(late, share(Cause.KV_PRESSURE, 0.25)))
        minutes.write([minute(requests=7)], (), NOON)
        superseded = proxy_view(3).record
        request_amend(journal, JUDGE)({}, [(superseded.trace_id, superseded.span_id)])
    same_in_both(journal, postgres)
    assert len(states(postgres)) == 3
    assert [row["requests"] for row in stored(postgres, engine_minutes)] == [7]
    assert {place[-1] for place in summed_causes(postgres)} == {"kv_pressure"}


def test_batches_may_end_anywhere(
    journal: Engine, postgres: Engine, emptied_postgres_url: str
) -> None:
    agent = JoiningAgent(journal)
    with forwarding(journal, emptied_postgres_url, notes_per_batch=3) as to:
        agent.take(*map(proxy_view, range(4)))
        agent.settle(DUE)
        agent.take(*map(engine_view, range(4)))
        store(journal, some(range(100, 110)))
    # Before each batch, senders come first.
    assert to.given_way >= to.forwarded / 3
    same_in_both(journal, postgres)
    assert states(postgres).count(("joined", True, False)) == 4


def test_a_joined_row_takes_the_place_of_the_proxys_row(
    journal: Engine, postgres: Engine, emptied_postgres_url: str
) -> None:
    """The note that the proxy's row is gone was dropped by its age."""
    agent = JoiningAgent(journal)
    with forwarding(journal, emptied_postgres_url):
        agent.take(proxy_view(1))
        agent.settle(DUE)
    agent.take(engine_view(1))
    with for_writing(journal).begin() as connection:
        connection.execute(text("DELETE FROM journal_notes WHERE row IS NULL"))
    with forwarding(journal, emptied_postgres_url):
        pass
    same_in_both(journal, postgres)
    assert states(postgres) == [("joined", True, False)]


def test_a_joined_row_takes_the_place_of_the_engines_row_that_began_later(
    journal: Engine, postgres: Engine, emptied_postgres_url: str
) -> None:
    agent = JoiningAgent(journal)
    with forwarding(journal, emptied_postgres_url) as forwarded:
        agent.take(engine_view(1), engine_view(2))
        agent.settle(DUE)
        forwarded.all_forwarded()
        assert states(postgres) == [("engine", True, False)] * 2
        # It goes to the partition of the day before.
        before_midnight = proxy_view(2, started_at=NOON - NOON % 86400 - 1)
        agent.take(proxy_view(1), before_midnight)
    same_in_both(journal, postgres)
    assert states(postgres) == [("joined", True, False)] * 2


def test_views_of_two_agents_and_their_sums_stand_side_by_side(
    journal: Engine, postgres: Engine, emptied_postgres_url: str, tmp_path: Path
) -> None:
    with journal_in(tmp_path, "other.db") as other:
        store(journal, some(range(5)))
        store(other, some(range(5, 9), agent="agent-1"))
        with (
            forwarding(journal, emptied_postgres_url),
            forwarding(other, emptied_postgres_url, agent="agent-1"),
        ):
            pass
    assert counted_rollups(postgres) == counted_rows(postgres)
    assert len(stored_keys(postgres)) == 9


def test_each_beat_writes_the_lag_of_the_journal(
    journal: Engine,
    postgres: Engine,
    emptied_postgres_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forwarder, "BEAT_EVERY_S", 0.0)
    store(journal, some(range(20)))

    def waiting_rows() -> int | None:
        rows: list[int | None] = [row["waiting_rows"] for row in stored(postgres, agents)]
        return rows[0] if rows else None

    with postgres.begin() as connection:
        connection.execute(text("LOCK TABLE requests"))
        running = Forwarding(journal, emptied_postgres_url)
        waiting = running.waiting()
        running.forwarder.start()
        eventually(lambda: waiting_rows() == waiting > 20, within_s=WITHIN_S, what="the lag")
    eventually(lambda: waiting_rows() == 0, within_s=WITHIN_S, what="a lag of nothing")
    (row,) = stored(postgres, agents)
    assert (row["lag_s"], row["version"]) == (0.0, __version__)
    running.forwarder.close(WITHIN_S)
    (row,) = stored(postgres, agents)
    assert row["stopped_at"] is not None


def test_nothing_is_forwarded_while_another_agent_has_the_name(
    journal: Engine, postgres: Engine, emptied_postgres_url: str
) -> None:
    taken = NameClaim("agent-0", "elsewhere:1:other")
    taken.take(postgres)
    store(journal, some([1]))
    with forwarding(journal, emptied_postgres_url) as forwarded:
        eventually(
            lambda: "another agent" in str(forwarded.forwarder.problem()),
            within_s=WITHIN_S,
            what="the reason",
        )
        assert stored_keys(postgres) == []
        taken.release(postgres)
    assert len(stored_keys(postgres)) == 1


# Once


def test_a_batch_whose_commit_got_no_response_is_stored_once(
    journal: Engine, postgres: Engine, emptied_postgres_url: str
) -> None:
    """The agent was killed between the commit there and the forgetting here."""
    file = Path(str(journal.url.database))
    store(journal, some(range(5)))
    ObservationStore(journal, "agent-0").write_event(event(0))
    before = file.with_name("before.db")
    with closing(sqlite3.connect(file)) as source, closing(sqlite3.connect(before)) as copy:
        source.backup(copy)
    with forwarding(journal, emptied_postgres_url):
        pass
    journal.dispose()
    for ending in ("-wal", "-shm"):
        Path(f"{file}{ending}").unlink(missing_ok=True)
    shutil.copy(before, file)
    new_run(journal)
    store(journal, some(range(5, 8)))
    ObservationStore(journal, "agent-0").write_event(event(1))
    with forwarding(journal, emptied_postgres_url):
        pass
    same_in_both(journal, postgres)
    assert len(stored_keys(postgres)) == 8
    assert len(stored(postgres, events)) == 2


def test_a_row_that_the_shared_database_refuses_is_left_out_and_counted(
    journal: Engine, postgres: Engine, emptied_postgres_url: str
) -> None:
    store(journal, some(range(30)))
    store(journal, some([30], model="m" * 5000))
    store(journal, some(range(31, 60)))
    with forwarding(journal, emptied_postgres_url) as forwarded:
        pass
    assert len(stored_keys(postgres)) == 59
    # Its row, and its difference of the rollups.
    assert forwarded.refused == 2
    assert counted_rollups(postgres) == counted_rows(postgres)


def test_a_database_that_is_too_slow_for_a_batch_gets_smaller_ones(
    journal: Engine, postgres: Engine, emptied_postgres_url: str
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
    store(journal, some(range(80)))
    try:
        with forwarding(journal, emptied_postgres_url):
            pass
    finally:
        with postgres.begin() as connection:
            connection.execute(text("DROP FUNCTION slow CASCADE"))
    same_in_both(journal, postgres)
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
def test_what_is_stored_in_an_outage_is_forwarded_in_order_after_it(
    journal: Engine,
    postgres: Engine,
    emptied_postgres_url: str,
    postgres_server: PostgresServer,
    outage: Any,
) -> None:
    observations = ObservationStore(journal, "agent-0")
    with forwarding(journal, emptied_postgres_url) as forwarded:
        store(journal, some(range(10)))
        forwarded.all_forwarded()
        with outage(postgres_server, emptied_postgres_url):
            for second in range(30):
                store(journal, some(range(10 * second + 10, 10 * second + 20)))
                observations.write_event(event(second))
            eventually(
                lambda: forwarded.forwarder.problem() is not None,
                within_s=WITHIN_S,
                what="the reason",
            )
            assert not forwarded.forwarder.has_caught_up(0)
            assert forwarded.waiting() > 300
            store(journal, some(range(1000, 1010)))
        # New rows keep coming while it catches up.
        store(journal, some(range(2000, 2010)))
        forwarded.all_forwarded()
        eventually(
            lambda: forwarded.forwarder.problem() is None, within_s=WITHIN_S, what="no problem"
        )
    same_in_both(journal, postgres)
    assert len(stored_keys(postgres)) == 330
    with postgres.connect() as connection:
        times = connection.execute(select(events.c.at).order_by(events.c.id)).scalars().all()
    assert times == [NOON + second for second in range(30)]
