"""What is in a journal is in ClickHouse, once, whatever happens to either.

The engine is ClickHouse's own, from chDB, with its own deduplication and views; the HTTP in front
of it is of the tests.
"""

import time
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from agent.catalog.causes import Cause
from agent.records.engine import EngineSample
from agent.records.queries import Selection, Window
from agent.store.agent_state import AgentState
from agent.store.amending import request_amend
from agent.store.clickhouse import claims, destination
from agent.store.clickhouse.queries import ClickHouseQueries
from agent.store.clickhouse.upkeep import ClickHouseUpkeep, merge_minutes_there
from agent.store.connection import for_writing, open_engine
from agent.store.journal.backlog import Lag
from agent.store.minute_sums import MERGED, merge_minutes
from agent.store.minutes import MinuteStore
from agent.store.observations import ObservationStore
from agent.store.store_queries import StoreQueries
from agent.store.tables import engine_minutes
from tests.real_parts.clickhouse import ClickHouseServer
from tests.real_parts.waiting import eventually
from tests.records.minutes import minute
from tests.store.clickhouse.compared import NOTED, causes, event, same_in_both, stored, summed
from tests.store.explaining import explain, explained, missed, share
from tests.store.journal.forwarded import forwarding, journal_in
from tests.store.making import NOON, WITHIN_S, gpu_sample, rollup_bytes, some, store, stored_keys
from tests.store.views import DUE, JUDGE, JoiningAgent, engine_view, proxy_view, states


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


def test_unknown_seconds_of_a_cause_are_null(
    journal: Engine, shared: Engine, clickhouse_url: str
) -> None:
    """One request had known seconds of it, until it was explained anew."""
    one, other = missed(1), missed(2)
    store(journal, [one, other])
    with forwarding(journal, clickhouse_url) as forwarded:
        explain(journal, explained(one, share(Cause.BURST, 0.5)))
        forwarded.all_forwarded()
        explain(journal, explained(one, share(Cause.KV_PRESSURE, 0.5)))
        explain(journal, explained(other, share(Cause.BURST, None)))
    window = Window(from_s=int(NOON) // 60 * 60, until=NOON + 60)
    queries = (StoreQueries(journal), ClickHouseQueries(shared))
    found = [each.causes(window, Selection(objective="chat")) for each in queries]
    assert found[0] == found[1]
    burst = [each for place, each in found[1].items() if place.cause == Cause.BURST]
    assert [each.excess_s for each in burst] == [None]


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
