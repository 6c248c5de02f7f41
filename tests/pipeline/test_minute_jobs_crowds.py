"""Engines with more requests than a minute that is booked again may read."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine

from agent.pipeline import minute_jobs
from agent.records.columns import BookedRequests
from tests.pipeline.minutes import PRICE, Minutes, adds_up, emptied, every_5_s, timed_request
from tests.store.migrated import migrated_in

pytestmark = pytest.mark.slow

MOST_ROWS = 20


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A SQLite database."""
    folder: Path = tmp_path_factory.mktemp("crowds")
    with migrated_in(folder) as engine:
        yield engine


@pytest.fixture
def minutes(database: Engine, monkeypatch: pytest.MonkeyPatch) -> Minutes:
    """An engine that is busy for eleven minutes, with a low limit of rows to read again."""
    monkeypatch.setattr(minute_jobs, "MAX_ROWS_AGAIN", MOST_ROWS)
    emptied(database)
    at_work = Minutes(database, PRICE)
    for at in every_5_s(690)[::3]:
        at_work.read_one(at, running=1.0, steps=at, output=3 * at, input=9 * at)
    return at_work


def crowd(minutes: Minutes) -> None:
    """Stores and books five requests in each of eight minutes."""
    for minute in range(8):
        minutes.take(*[timed_request(10 * minute + n, 60 * minute + 5 * n, 4.0) for n in range(5)])
        minutes.book(60 * minute + 91.0)


def test_a_request_among_too_many_others_has_no_share_and_lowers_no_others(
    minutes: Minutes,
) -> None:
    crowd(minutes)
    before = minutes.costs()
    minutes.take(timed_request(900, 30.0, 480.0, output_tokens=900))
    windows = minutes.booked(571.0)
    assert minutes.costs() == [*before, None]
    assert adds_up(minutes, windows)


def test_a_long_request_among_few_others_has_a_share_of_all_its_minutes(minutes: Minutes) -> None:
    minutes.take(timed_request(900, 30.0, 480.0, output_tokens=900))
    for at in range(91, 600, 60):
        minutes.book(float(at))
    (cost,) = minutes.costs()
    # Its cost is more than two whole minutes of the GPU.
    assert cost is not None
    assert cost > 0.12


def test_rows_read_again_are_limited_for_a_request_of_any_length(
    minutes: Minutes, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowd(minutes)
    read: list[int] = []
    rows_of = minutes.store.requests

    def counted(engine: str, from_at: float, until: float) -> BookedRequests:
        found = rows_of(engine, from_at, until)
        read.append(found.rows.size)
        return found

    monkeypatch.setattr(minutes.store, "requests", counted)
    minutes.take(timed_request(900, 30.0, 480.0), timed_request(901, 400.0, 110.0))
    minutes.book(571.0)
    assert 5 < max(read) <= MOST_ROWS + 2


_REQUESTS = st.lists(
    st.tuples(st.floats(0.0, 500.0), st.floats(1.0, 300.0), st.integers(0, 3)),
    min_size=10,
    max_size=60,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(_REQUESTS)
# The last but one request ends in the last booked minute, and shares an earlier minute.
@example([(0.0, 1.0, 0)] * 8 + [(350.0, 190.0, 2), (260.0, 41.0, 0)])
@example([(0.0, 1.0, 0)] * 8 + [(350.0, 195.0, 2), (260.0, 41.0, 0)])
# A request that ends with its first minute, and a later one: as many rows as may be read again.
@example([(0.0, 1.0, 0)] * 20 + [(0.0, 60.0, 0), (60.0, 1.0, 1)])
def test_costs_add_up_to_the_bill_also_with_late_rows(
    database: Engine, timings: list[tuple[float, float, int]]
) -> None:
    emptied(database)
    minutes = Minutes(database, PRICE)
    for at in every_5_s(690)[::3]:
        minutes.read_one(at, running=1.0, steps=at, output=3 * at, input=9 * at)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minute_jobs, "MAX_ROWS_AGAIN", MOST_ROWS)
        for batch, until in enumerate((200.0, 400.0, 600.0, 691.0)):
            minutes.take(
                *[
                    timed_request(number, start, min(lasted, 600.0 - start))
                    for number, (start, lasted, when) in enumerate(timings)
                    if when == batch
                ]
            )
            assert adds_up(minutes, minutes.booked(until))
