"""What is in an agent's file is in ClickHouse, once, whatever happens to either.

The engine is ClickHouse's own, from chDB; the HTTP in front of it is of the tests.
"""

import time
from typing import Any

import pytest
from sqlalchemy import Engine, LargeBinary, insert, select, text

from agent.catalog.causes import Cause
from agent.records.queries import Selection, Window
from agent.store import claim
from agent.store.claim import DEAD_AFTER_S, AgentState, NameTaken
from agent.store.clickhouse import claims, destination
from agent.store.clickhouse.queries import ClickHouseQueries
from agent.store.clickhouse.upkeep import ClickHouseUpkeep, merge_minutes_there
from agent.store.connection import for_writing, open_engine
from agent.store.migrating import require_newest, upgrade
from agent.store.minute_sums import MERGED, merge_minutes
from agent.store.minutes import MinuteStore
from agent.store.observations import ObservationStore
from agent.store.publishing.changes import Lag
from agent.store.rollup_queries import BINARY
from agent.store.store_queries import StoreQueries
from agent.store.tables import engine_minutes, events, requests, rollup_series, rollups
from tests.real_parts.clickhouse import ClickHouseServer, lossy_way
from tests.real_parts.waiting import eventually
from tests.records.minutes import minute
from tests.store.explaining import explain, explained, missed, share
from tests.store.making import (
    NOON,
    WITHIN_S,
    Clock,
    restart,
    rollup_bytes,
    some,
    store,
    stored_keys,
)
from tests.store.publishing.published import (
    Publishing,
    copied,
    publishing,
    restored,
    same_in_both,
    stored,
    summed,
)


def test_vectors_are_the_same_bytes(file: Engine, shared: Engine) -> None:
    everything = bytes(range(256))
    row: dict[str, Any] = {"width_s": 86400, "series": 1, "starts_at": 0, "counts": everything}
    row |= {"ttft_s": everything[::-1], "tpot_s": b"\xff\x00", "e2e_s": b"", "queue_s": None}
    names = ("agent", "engine", "model", "tenant", "input_length")
    with for_writing(file).begin() as connection:
        series = {"id": 1, **dict.fromkeys(names, ""), "judged_by": "[]"}
        connection.execute(insert(rollup_series), series)
        connection.execute(insert(rollups), row)
    with publishing(file, shared):
        pass
    columns = [each for each in rollups.c if isinstance(each.type, LargeBinary)]
    with shared.connect() as connection:
        found = connection.execute(select(*columns), execution_options=BINARY).one()
    assert dict(found._mapping) == {column.name: row[column.name] for column in columns}


def test_a_row_that_is_refused_for_its_content_is_left_out_and_counted(
    file: Engine, shared: Engine
) -> None:
    store(file, some(range(30)))
    with for_writing(file).begin() as connection:
        connection.execute(text("UPDATE requests SET ttft_s = 'soon' WHERE id = 7"))
    with publishing(file, shared) as running:
        pass
    assert len(stored_keys(shared)) == 29
    assert running.refused == 1
    assert summed(shared) == rollup_bytes(file)


def test_requests_of_more_months_than_a_block_may_have_are_taken(
    file: Engine, shared: Engine
) -> None:
    """A sender's clock is wrong in ever other ways."""
    months = [(number, NOON - number * 31 * 86400) for number in range(110)]
    store(file, [each for n, at in months for each in some([n], started_at=at, ended_at=at + 1)])
    with publishing(file, shared):
        pass
    same_in_both(file, shared)


# Once


@pytest.mark.parametrize(
    ("loses", "sends_again"),
    [
        ("INSERT INTO requests", "the driver"),
        ("INSERT INTO published_files", "the publisher"),
        ("INSERT INTO requests", "the next start"),
        ("INSERT INTO published_files", "the next start"),
    ],
)
def test_a_batch_whose_response_was_lost_is_stored_once(
    file: Engine,
    shared: Engine,
    clickhouse_url: str,
    clickhouse_server: ClickHouseServer,
    sends_again: str,
    loses: str,
) -> None:
    """The response to its rows, or the one to its number."""
    database = clickhouse_url.rpartition("/")[2]
    late = missed(9)
    store(file, [*some(range(5)), late])
    ObservationStore(file, "agent-0").write_event(restart(NOON))
    explain(file, explained(late, share(Cause.BURST, 0.5)))
    with lossy_way(clickhouse_server.http) as (way, port):
        way.status = None if sends_again == "the driver" else 500
        way.loses = loses
        running = Publishing(file, clickhouse_server.url(database, port))
        running.publisher.start()
        try:
            eventually(lambda: way.lost > 0, within_s=WITHIN_S, what="a lost response")
            if sends_again != "the next start":
                way.loses = None
                running.all_published()
        finally:
            running.publisher.close(WITHIN_S)
    store(file, some(range(5, 8)))
    with publishing(file, shared):
        pass
    same_in_both(file, shared)
    assert len(stored(shared, events)) == 1


def test_what_a_restored_file_stored_while_clickhouse_was_away_is_published(
    file: Engine, shared: Engine
) -> None:
    store(file, some(range(5)))
    with publishing(file, shared):
        pass
    backup = copied(file)
    store(file, some(range(5, 10)))
    with publishing(file, shared):
        pass
    restored(file, backup)
    # These are more transactions than those that are lost.
    for number in range(10, 20):
        store(file, some([number]))
    with publishing(file, shared):
        pass
    assert len(stored_keys(shared)) == len(stored_keys(file)) == 20


def test_a_restored_file_goes_on_after_a_batch_that_was_written_in_part(
    file: Engine,
    shared: Engine,
    clickhouse_url: str,
    clickhouse_server: ClickHouseServer,
) -> None:
    """Else the rows of the part would stay, because their numbers are higher."""
    minutes = MinuteStore(file, "agent-0")
    with publishing(file, shared):
        minutes.write([minute()], (), NOON)
    backup = copied(file)
    for requests_seen in range(2, 30):
        minutes.write([minute(requests=requests_seen)], (), NOON)
    with lossy_way(clickhouse_server.http) as (way, port):
        way.loses, way.status = "INSERT INTO engine_minutes", 500
        database = clickhouse_url.rpartition("/")[2]
        running = Publishing(file, clickhouse_server.url(database, port))
        running.publisher.start()
        eventually(lambda: way.lost > 0, within_s=WITHIN_S, what="a part of a batch")
        running.publisher.close(WITHIN_S)
    restored(file, backup)
    with publishing(file, shared) as running:
        assert running.publisher.is_complete(WITHIN_S)
        minutes.write([minute(requests=99)], (), NOON)
    assert [row["requests"] for row in stored(shared, engine_minutes)] == [99]


# While ClickHouse is away


def test_a_server_that_is_killed_and_comes_back_gets_everything(
    file: Engine, shared: Engine, clickhouse_server: ClickHouseServer
) -> None:
    with publishing(file, shared) as running:
        store(file, some(range(5)))
        running.all_published()
        clickhouse_server.kill()
        store(file, some(range(5, 10)))
        reason = str(eventually(running.publisher.problem, within_s=WITHIN_S, what="the reason"))
        assert "s3cret" not in reason
        assert "127.0.0.1" not in reason
        clickhouse_server.restart()
    assert running.publisher.problem() is None
    same_in_both(file, shared)


def test_a_server_that_is_frozen_is_not_waited_for_long(
    file: Engine,
    clickhouse_url: str,
    clickhouse_server: ClickHouseServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(destination, "STATEMENT_S", 0.5)
    with publishing(file, clickhouse_url) as running:
        eventually(lambda: running.publisher.problem() is None, within_s=WITHIN_S, what="the begin")
        with clickhouse_server.frozen():
            store(file, some(range(5)))
            eventually(running.publisher.problem, within_s=WITHIN_S, what="the reason")
        monkeypatch.undo()


def test_unknown_seconds_of_a_cause_are_null(file: Engine, shared: Engine) -> None:
    """One request had known seconds of it, until it was explained anew."""
    one, other = missed(1), missed(2)
    store(file, [one, other])
    with publishing(file, shared) as running:
        explain(file, explained(one, share(Cause.BURST, 0.5)))
        running.all_published()
        explain(file, explained(one, share(Cause.KV_PRESSURE, 0.5)))
        explain(file, explained(other, share(Cause.BURST, None)))
    window = Window(from_s=int(NOON) // 60 * 60, until=NOON + 60)
    queries = (StoreQueries(file), ClickHouseQueries(shared))
    found = [each.causes(window, Selection(objective="chat")) for each in queries]
    assert found[0] == found[1]
    burst = [each for place, each in found[1].items() if place.cause == Cause.BURST]
    assert [each.excess_s for each in burst] == [None]


# Upkeep


def test_old_minutes_are_merged_there_as_in_the_other_databases(
    file: Engine, shared: Engine
) -> None:
    minutes = [minute(-number, requests=number) for number in range(300)]
    MinuteStore(file, "agent-0").write(minutes, (), NOON)
    with publishing(file, shared):
        pass
    later = NOON + MERGED[0][1]
    assert merge_minutes_there(shared, "agent-0", later) > 0
    merge_minutes(file, "agent-0", later)

    def merged(engine: Engine) -> list[dict[str, Any]]:
        return [row | {"changed": None} for row in stored(engine, engine_minutes)]

    assert merged(shared) == merged(file)
    assert len(merged(shared)) < 300


@pytest.mark.parametrize("kept_s", [7200.0, 100 * 365 * 86400.0])
def test_the_server_deletes_what_is_older_than_the_settings_say(
    file: Engine, clickhouse_url: str, kept_s: float
) -> None:
    """What is to be kept for a century is kept."""
    old, now = time.time() - 3 * 86400, time.time()
    store(file, some(range(3), started_at=old, ended_at=old))
    store(file, some(range(3, 5), started_at=now, ended_at=now))
    with publishing(file, clickhouse_url):
        pass
    keeping = ClickHouseUpkeep(
        clickhouse_url, "agent-0", keep_requests_s=kept_s, keep_rollups_s=kept_s
    )
    keeping.expire(now)
    keeping.close()
    engine = open_engine(clickhouse_url)
    with engine.connect() as connection:
        for table in (requests, rollups):
            connection.execute(text(f"OPTIMIZE TABLE {table.name} FINAL"))
    is_short = kept_s < 86400
    assert len(stored_keys(engine)) == (2 if is_short else 5)
    days = {place[1] for place in summed(engine) if place[0] == 86400}
    assert len(days) == (1 if is_short else 2)
    # Narrow rollups go sooner than the settings say.
    assert len({place[1] for place in summed(engine) if place[0] == 10}) == 1
    engine.dispose()


def test_an_agent_keeps_its_name_when_the_servers_clock_was_set_back(
    shared: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = claims.server_now_us

    def claim_of(instance: str) -> claims.ClickHouseClaim:
        return claims.ClickHouseClaim(
            "agent-0", instance, state=AgentState(), lag=lambda: Lag(0, 0.0)
        )

    monkeypatch.setattr(claims, "server_now_us", lambda client: before(client) + 3_600_000_000)
    first = claim_of("here:1:1")
    first.take(shared)
    first.release(shared)
    monkeypatch.setattr(claims, "server_now_us", before)
    second = claim_of("here:2:2")
    second.take(shared)
    second.beat(shared)


def test_a_name_is_taken_as_long_as_its_agent_counts_beats(
    shared: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim, "DEAD_AFTER_S", DEAD_AFTER_S)
    clock = Clock(5.0)
    first, second = (
        claims.ClickHouseClaim(
            "agent-0", f"elsewhere:{number}:a", clock, state=AgentState(), lag=lambda: Lag(0, 0.0)
        )
        for number in (1, 2)
    )
    first.take(shared)
    for _ in range(3):
        with pytest.raises(NameTaken):
            second.take(shared)
        clock.now += DEAD_AFTER_S
        first.beat(shared)
    with pytest.raises(NameTaken):
        second.take(shared)
    clock.now += DEAD_AFTER_S
    second.take(shared)
    with pytest.raises(NameTaken, match="took over"):
        first.beat(shared)


def test_a_database_of_a_version_before_the_first_release_is_refused(clickhouse_url: str) -> None:
    engine = open_engine(clickhouse_url)
    upgrade(engine)
    with engine.connect() as connection:
        connection.execute(text("TRUNCATE TABLE schema_versions"))
        connection.execute(text("INSERT INTO schema_versions (version) VALUES (1)"))
    for prepare in (upgrade, require_newest):
        with pytest.raises(Exception, match="never released"):
            prepare(engine)
    engine.dispose()
