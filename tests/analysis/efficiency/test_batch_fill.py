"""How full a batch was, against a simulated engine of which every step is known."""

from random import Random

import pytest

from agent.analysis.efficiency.engine_observation import BatchUse
from agent.analysis.efficiency.time_range import TimeRange
from agent.analysis.efficiency.window_efficiency import BatchFill, batch_fill
from agent.records.engine import EngineSample
from tests.analysis.cost.engine_days import MINUTE, engine_sample, observation
from tests.records.minutes import minute

_STEP_S = 0.01
_PLACES, _BUDGET = 16, 64
_LIMITS = {"places": float(_PLACES), "step_budget": float(_BUDGET)}
_NOTHING = BatchUse(None, None, None, None)


def simulated_minute() -> tuple[list[EngineSample], float, float]:
    """A sample each second, and the mean of running requests and of tokens over all steps."""
    chance = Random(7)
    left: list[int] = []
    samples, ran, computed, steps = [], 0.0, 0, 0
    for tick in range(6001):
        if tick % 100 == 0:
            counts = {"running": float(len(left)), "steps": steps, "step_tokens": computed}
            samples.append(engine_sample(tick * _STEP_S, **counts, **_LIMITS))
        if chance.random() < 0.03 and len(left) < _PLACES:
            left.append(chance.randint(50, 800))
        ran += len(left) * _STEP_S
        steps += bool(left)
        computed += len(left)
        left = [tokens - 1 for tokens in left if tokens > 1]
    return samples, ran / 60, computed / steps


def test_the_batch_is_as_full_as_that_of_a_simulated_engine() -> None:
    samples, running, tokens = simulated_minute()
    use = observation(samples).batch
    found = batch_fill([minute(0, **use._asdict())])
    assert found is not None
    assert found.requests == pytest.approx(running / _PLACES, rel=0.02)
    assert found.tokens == pytest.approx(tokens / _BUDGET, rel=0.001)
    assert 0.05 < running / _PLACES < 0.95


def test_only_the_part_of_an_interval_that_is_in_the_minute_counts() -> None:
    counts = {"running": 4.0, "steps": 0.0, "step_tokens": 0.0}
    later = {"running": 4.0, "steps": 100.0, "step_tokens": 400.0}
    samples = [engine_sample(-5, **counts, **_LIMITS), engine_sample(5, **later, **_LIMITS)]
    use = observation(samples, TimeRange(0.0, 5.0)).batch
    assert use == BatchUse(20.0, 80.0, 200.0, 3200.0)


@pytest.mark.parametrize(
    "samples",
    [
        [engine_sample(at, running=1.0, steps=at, step_tokens=at) for at in (0, 5)],
        [engine_sample(at, **_LIMITS) for at in (0, 5)],
        [engine_sample(at, running=1.0, steps=at, step_tokens=at, **_LIMITS) for at in (0, 50)],
    ],
    ids=["no limit is known", "nothing is counted", "not read for long"],
)
def test_the_batch_is_unknown_where(samples: list[EngineSample]) -> None:
    assert observation(samples, MINUTE).batch == _NOTHING


def test_steps_fuller_than_their_budget_are_unknown() -> None:
    """vLLM counts the tokens of a prompt in its last step alone."""
    steps = minute(0, limited_step_tokens=300.0, step_room_tokens=100.0)
    places = minute(1, running_request_s=30.0, place_s=120.0)
    assert batch_fill([steps, places]) == BatchFill(requests=0.25, tokens=None)
    assert batch_fill([minute(0)]) is None
