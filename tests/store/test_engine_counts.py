"""What engines counted is stored by minute, hour and day, and queried over windows."""

from dataclasses import replace
from math import inf

import pytest
from sqlalchemy import Engine, select, update

from agent.analysis.engine_counts import total_counts
from agent.catalog import engine_facts as fact
from agent.catalog.time_units import DAY_S, HOUR_S
from agent.records.engine import HistogramSnapshot
from agent.records.engine_counts import EngineCounts, GaugeSum
from agent.records.queries import Selection, Window
from agent.store.connection import for_writing
from agent.store.engine_counts import EngineCountQueries
from agent.store.observations import ObservationStore
from agent.store.retention import Retention
from agent.store.tables import engine_counts
from tests.store.making import NOON, engine_sample, publish_file

TTFT = fact.TIME_TO_FIRST_TOKEN.name
OUTPUT = (fact.OUTPUT_TOKENS.name, ())
FINISHED = (fact.REQUESTS_FINISHED.name, ("stop",))
RUNNING = (fact.REQUESTS_RUNNING.name, ())
DAY = NOON // DAY_S * DAY_S
COUNTS = EngineCounts(
    covered_s=5.0,
    counters={OUTPUT: 100.0, FINISHED: 2.0},
    gauges={RUNNING: GaugeSum(15.0, 5.0, 4.0)},
    histograms={TTFT: HistogramSnapshot((0.1, 1.0, inf), (1.0, 2.0, 2.0), 0.75)},
)


def count(database: Engine, *times: float, agent: str = "agent-0", **given: str) -> None:
    """Store samples at these times, each with COUNTS."""
    store = ObservationStore(database, agent)
    for at in times:
        store.write_engine_sample(engine_sample(at, **given), COUNTS)


def total(database: Engine, from_s: int, until: float, **chosen: str) -> EngineCounts | None:
    over = Window(from_s=from_s, until=until)
    rows = EngineCountQueries(database).engine_counts(over, Selection(**chosen))
    return total_counts(row.counts for row in rows)


@pytest.fixture
def counted(sqlite: Engine) -> Engine:
    """A file with a count at each minute of two hours around noon."""
    count(sqlite, *(NOON + 60.0 * minute + 3.0 for minute in range(-60, 60)))
    return sqlite


def test_everything_that_was_counted_is_read_as_it_was(sqlite: Engine) -> None:
    count(sqlite, NOON + 7.5)
    assert total(sqlite, NOON, NOON + 60) == COUNTS


def test_samples_of_a_minute_are_one_row(sqlite: Engine) -> None:
    count(sqlite, NOON + 5.0, NOON + 10.0, NOON + 59.9, NOON + 60.0)
    found = total(sqlite, NOON, NOON + 60)
    assert found is not None
    assert (found.covered_s, found.counters[OUTPUT]) == (15.0, 300.0)
    assert found.histograms[TTFT] == HistogramSnapshot((0.1, 1.0, inf), (3.0, 6.0, 6.0), 2.25)
    assert (found.gauges[RUNNING].mean, found.gauges[RUNNING].maximum) == (3.0, 4.0)


@pytest.mark.parametrize(("minutes", "rows"), [(5, 5), (60, 1), (90, 15)])
def test_a_window_is_read_as_few_rows_and_each_minute_once(
    counted: Engine, minutes: int, rows: int
) -> None:
    hour = NOON // HOUR_S * HOUR_S
    over = Window(from_s=hour, until=hour + 60 * minutes)
    found = EngineCountQueries(counted).engine_counts(over, Selection())
    begun = (NOON - hour) // 60
    assert len(found) == rows
    within = sum(0 <= minute + begun < minutes for minute in range(-60, 60))
    summed = total_counts(row.counts for row in found)
    assert summed is not None
    assert summed.counters[OUTPUT] == 100.0 * within


def test_no_row_reaches_into_two_steps(counted: Engine) -> None:
    hour = NOON // HOUR_S * HOUR_S
    over = Window(from_s=hour, until=hour + HOUR_S)
    found = EngineCountQueries(counted).engine_counts(over, Selection(), 300)
    assert {row.width_s for row in found} == {60}


def test_engines_models_and_agents_are_told_apart(sqlite: Engine) -> None:
    count(sqlite, NOON + 1.0)
    count(sqlite, NOON + 1.0, engine="chat-1", model="qwen")
    count(sqlite, NOON + 1.0, agent="agent-1")
    for chosen, engines in (({}, 3), ({"model": "qwen"}, 1), ({"agent": "agent-0"}, 2)):
        found = total(sqlite, NOON, NOON + 60, **chosen)
        assert found is not None
        assert found.counters[OUTPUT] == 100.0 * engines


def test_a_damaged_row_is_left_out_and_begins_anew(sqlite: Engine) -> None:
    count(sqlite, NOON + 1.0, NOON + 61.0)
    damaged = update(engine_counts).where(engine_counts.c.starts_at == NOON)
    with for_writing(sqlite).begin() as connection:
        connection.execute(damaged.values(histograms='{"llm": {"bounds": [1]}}'))
    found = total(sqlite, NOON, NOON + 120)
    assert found is not None
    assert found.counters[OUTPUT] == 100.0
    count(sqlite, NOON + 2.0)
    found = total(sqlite, NOON, NOON + 120)
    assert found is not None
    assert found.counters[OUTPUT] == 200.0


def test_minutes_go_after_two_days_and_days_stay(sqlite: Engine) -> None:
    count(sqlite, DAY + 1.0)
    Retention(sqlite).expire(0.0, 0.0, DAY + 3.0 * DAY_S)
    with sqlite.connect() as connection:
        kept = connection.execute(select(engine_counts.c.width_s)).scalars().all()
    assert sorted(kept) == [HOUR_S, DAY_S]
    Retention(sqlite).expire(0.0, DAY + 2.0 * DAY_S, DAY + 3.0 * DAY_S)
    assert total(sqlite, DAY, DAY + DAY_S) is None


def test_a_shared_database_has_the_same_counts(postgres: Engine, sqlite: Engine) -> None:
    count(sqlite, NOON + 1.0, NOON + 2.0)
    publish_file(sqlite, postgres)
    count(sqlite, NOON + 3.0)
    publish_file(sqlite, postgres)
    assert total(postgres, NOON, NOON + 60) == total(sqlite, NOON, NOON + 60)
    assert total(postgres, DAY, DAY + DAY_S) == replace(
        COUNTS,
        covered_s=15.0,
        counters={OUTPUT: 300.0, FINISHED: 6.0},
        gauges={RUNNING: GaugeSum(45.0, 15.0, 4.0)},
        histograms={TTFT: HistogramSnapshot((0.1, 1.0, inf), (3.0, 6.0, 6.0), 2.25)},
    )
