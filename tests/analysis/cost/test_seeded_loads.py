"""200 loads of an engine whose every step is known: what each request is charged, and the sums."""

from collections.abc import Iterator

import pytest

from agent.analysis.efficiency.serving import Serving
from tests.analysis.cost.engine_days import UNKNOWN, whole
from tests.analysis.cost.seeded_loads import MINUTES, Load, load

pytestmark = pytest.mark.slow

BILL_S = 60.0 * MINUTES


@pytest.fixture(scope="module")
def loads() -> list[Load]:
    return [load(seed) for seed in range(200)]


def charges(served: Load, serving: Serving) -> Iterator[tuple[float, float]]:
    """True and charged seconds of each request."""
    minutes = served.minutes(serving)
    for job in served.ended:
        yield job.gpu_s, sum(minute.requests.get(job.key, 0.0) for minute in minutes)


def share(good: list[bool]) -> float:
    return sum(good) / len(good) if good else 1.0


@pytest.mark.parametrize("known", [True, False], ids=["roofline", "tokens"])
def test_each_request_is_charged_its_own_time(loads: list[Load], known: bool) -> None:
    near, nearly = [], []
    for served in loads:
        pairs = list(charges(served, served.serving if known else UNKNOWN))
        near += [abs(paid - true) <= 0.25 * true for true, paid in pairs]
        nearly.append(
            share([abs(paid - true) <= max(0.25 * true, 0.01 * BILL_S) for true, paid in pairs])
        )
    # Of every load, 95 of 100 requests are within 25 % or 1 % of the bill; of all, within 25 %.
    assert min(nearly) >= 0.95
    assert share(near) >= 0.95


@pytest.mark.parametrize("known", [True, False], ids=["roofline", "tokens"])
def test_the_parts_of_each_minute_add_up_to_its_bill(loads: list[Load], known: bool) -> None:
    for served in loads:
        for minute in served.minutes(served.serving if known else UNKNOWN):
            assert whole(minute) == pytest.approx(60.0, rel=1e-9)


def test_the_requests_of_the_engine_have_all_its_steps(loads: list[Load]) -> None:
    for served in loads[:20]:
        engine = served.engine
        everyone = [*engine.ended, *engine.running, *engine.waiting]
        assert sum(job.gpu_s for job in everyone) == pytest.approx(engine.busy_s, rel=1e-9)
