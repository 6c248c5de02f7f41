"""What both kinds of shared databases get of an agent's file, whatever happens to it.

ClickHouse is its own engine, from chDB; the HTTP in front of it is of the tests.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, select

from agent.catalog.causes import Cause
from agent.store import claim
from agent.store.connection import open_engine
from agent.store.migrating import upgrade
from agent.store.minutes import MinuteStore
from agent.store.tables import engine_minutes, requests
from agent.store.transactions import request_amend
from tests.records.minutes import minute
from tests.store.explaining import explain, explained, missed, share, summed_causes
from tests.store.making import (
    NOON,
    WITHIN_S,
    counted_rows,
    decoded,
    rollup_bytes,
    some,
    store,
    stored_keys,
)
from tests.store.publishing.published import (
    PUBLISHED,
    copied,
    file_in,
    publishing,
    restored,
    same_in_both,
    store_every_kind,
    stored,
    summed,
)
from tests.store.views import DUE, JUDGE, JoiningAgent, engine_view, proxy_view, states


@pytest.fixture(params=["postgresql", "clickhouse"])
def shared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    # A publisher that could not give the name back has ended.
    monkeypatch.setattr(claim, "DEAD_AFTER_S", 0.0)
    is_postgres = request.param == "postgresql"
    url = request.getfixturevalue("emptied_postgres_url" if is_postgres else "clickhouse_url")
    engine = open_engine(url)
    upgrade(engine)
    yield engine
    engine.dispose()


def test_every_kind_of_row_is_published_as_it_is(file: Engine, shared: Engine) -> None:
    with publishing(file, shared):
        numbers = store_every_kind(file, model="o'neil \\ %s \N{SNOWMAN}")
    assert [len(stored(shared, table)) for table in PUBLISHED] == numbers
    same_in_both(file, shared)


def test_agents_and_their_sums_stand_side_by_side(
    file: Engine, shared: Engine, tmp_path: Path
) -> None:
    with file_in(tmp_path, "other.db") as other:
        store(file, some(range(5)))
        store(other, some(range(5, 9), agent="agent-1"))
        with (
            publishing(file, shared, rows_per_batch=3),
            publishing(other, shared, agent="agent-1"),
        ):
            pass
        assert summed(shared) == rollup_bytes(file) | rollup_bytes(other)
    with shared.connect() as connection:
        # Pages go on after the time and the id of a row.
        assert len({*connection.execute(select(requests.c.id)).scalars()}) == 9


def test_what_changes_after_it_was_published_is_published_again(
    file: Engine, shared: Engine
) -> None:
    agent, minutes = JoiningAgent(file), MinuteStore(file, "agent-0")
    with publishing(file, shared) as running:
        agent.take(proxy_view(1), proxy_view(2), proxy_view(3), engine_view(4))
        running.all_published()
        assert stored_keys(shared) == []
        agent.settle(DUE)
        running.all_published()
        assert states(shared) == [("engine", True, False)] + [("proxy", True, False)] * 3
        # The late views make joined rows of those that were settled alone. The last one began
        # in another month than its other view.
        agent.take(engine_view(1), engine_view(2), proxy_view(4, started_at=NOON - 40 * 86400))
        running.all_published()
        assert states(shared) == [("joined", True, False)] * 3 + [("proxy", True, False)]
        late = missed(9)
        store(file, [late])
        explain(file, explained(late, share(Cause.BURST, 0.5)))
        minutes.write([minute()], (), NOON)
        running.all_published()
        explain(file, explained(late, share(Cause.KV_PRESSURE, 0.25)))
        minutes.write([minute(requests=7)], (), NOON)
        superseded = proxy_view(3).record
        request_amend(file, JUDGE)({}, [(superseded.trace_id, superseded.span_id)])
    same_in_both(file, shared)
    assert len(states(shared)) == 4
    assert [row["requests"] for row in stored(shared, engine_minutes)] == [7]
    assert {place[-1] for place in summed_causes(shared)} == {"kv_pressure"}


def test_a_file_that_was_restored_from_a_backup_gets_back_what_was_published_since(
    file: Engine, shared: Engine
) -> None:
    agent, late = JoiningAgent(file), missed(20)
    store(file, some(range(5)))
    agent.take(proxy_view(7))
    with publishing(file, shared):
        pass
    backup = copied(file)
    with publishing(file, shared):
        agent.take(engine_view(7))
        store(file, [*some(range(5, 10)), late])
        explain(file, explained(late, share(Cause.BURST, 0.5)))
        MinuteStore(file, "agent-0").write([minute()], (), NOON)
    restored(file, backup)
    with publishing(file, shared) as running:
        assert running.publisher.is_complete(WITHIN_S)
        # Its senders send some of them again.
        store(file, some(range(3, 12)))
        agent.take(proxy_view(7), engine_view(7))
    same_in_both(file, shared)
    assert len(stored_keys(shared)) == 14
    assert len(stored(shared, engine_minutes)) == 1


def test_a_new_file_of_the_same_agent_adds_to_the_sums_of_the_lost_one(
    file: Engine, shared: Engine, tmp_path: Path
) -> None:
    with publishing(file, shared):
        for number in range(5):
            store(file, some([number]))
            MinuteStore(file, "agent-0").write([minute(requests=number)], (), NOON)
    with file_in(tmp_path, "next.db") as following, publishing(following, shared) as to:
        to.all_published()
        assert to.publisher.is_complete(WITHIN_S)
        store(following, some(range(5, 9)))
        MinuteStore(following, "agent-0").write([minute(requests=99)], (), NOON)
    assert len(stored_keys(shared)) == 9
    counted = {place: decoded(place[-1], figures) for place, figures in summed(shared).items()}
    assert counted == counted_rows(shared)
    # Its numbers go on after those of the lost file.
    assert [row["requests"] for row in stored(shared, engine_minutes)] == [99]
