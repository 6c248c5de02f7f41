"""200 loads of an engine whose every step is known: what each request is charged, and the sums."""

from collections.abc import Iterator

import pytest

from tests.analysis.cost.engine_days import UNKNOWN, SplitMinute, whole
from tests.analysis.cost.seeded_loads import MINUTES, Load, load

pytestmark = pytest.mark.slow

BILL_S = 60.0 * MINUTES


@pytest.fixture(scope="module")
def loads() -> list[Load]:
    return [load(seed) for seed in range(200)]


Booked = list[tuple[Load, list[SplitMinute]]]


@pytest.fixture(scope="module", params=[True, False], ids=["roofline", "tokens"])
def booked(loads: list[Load], request: pytest.FixtureRequest) -> Booked:
    """Each load with the cost of its minutes."""
    return [(load, load.minutes(load.serving if request.param else UNKNOWN)) for load in loads]


def charges(served: Load, minutes: list[SplitMinute]) -> Iterator[tuple[float, float]]:
    """True and charged seconds of each request."""
    for job in served.ended:
        yield job.gpu_s, sum(minute.requests.get(job.key, 0.0) for minute in minutes)


def share(good: list[bool]) -> float:
    return sum(good) / len(good) if good else 1.0


def test_each_request_is_charged_its_own_time(booked: Booked) -> None:
    near, nearly = [], []
    for served, minutes in booked:
        pairs = list(charges(served, minutes))
        near += [abs(paid - true) <= 0.25 * true for true, paid in pairs]
        nearly.append(
            share([abs(paid - true) <= max(0.25 * true, 0.01 * BILL_S) for true, paid in pairs])
        )
    # Of every load, 95 of 100 requests are within 25 % or 1 % of the bill; of all, within 25 %.
    assert min(nearly) >= 0.95
    assert share(near) >= 0.95


def test_the_parts_of_each_minute_add_up_to_its_bill(booked: Booked) -> None:
    for _, minutes in booked:
        for minute in minutes:
            assert whole(minute) == pytest.approx(60.0, rel=1e-9)


def test_unseen_work_is_that_of_requests_without_a_row(booked: Booked) -> None:
    """Its place in an interval is unknown, so that it is an estimate, and rather too much."""
    times = []
    for served, minutes in booked:
        gone = [job for job in served.engine.ended if not job.has_row and job.ended_at < BILL_S]
        if gone:
            true = sum(job.gpu_s for job in gone)
            times.append(sum(minute.cost.unseen for minute in minutes) / true)
    assert len(times) > 25
    assert share([0.9 <= each <= 1.5 for each in times]) >= 0.85
    assert max(times) < 2.5


def test_the_requests_of_the_engine_have_all_its_steps(loads: list[Load]) -> None:
    for served in loads[:20]:
        engine = served.engine
        everyone = [*engine.ended, *engine.running, *engine.waiting]
        assert sum(job.gpu_s for job in everyone) == pytest.approx(engine.busy_s, rel=1e-9)
