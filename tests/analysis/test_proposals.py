"""Limits at a percentile of what was seen, and the attainment that they would have had."""

from math import inf
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.analysis.proposals import (
    MIN_REQUESTS,
    SeenRequest,
    propose,
    propose_from_bounds,
    rounded_up,
)


def one(model: str = "llama", tokens: int | None = 100, **given: Any) -> SeenRequest:
    return SeenRequest(model, tokens, **{"failed": False, "ttft_s": 0.2, "tpot_s": 0.02, **given})


def requests(count: int) -> list[SeenRequest]:
    """So many requests, whose latencies are different."""
    random = Random("proposals")
    return [
        one(ttft_s=random.lognormvariate(-2, 0.5), tpot_s=random.lognormvariate(-4, 0.3))
        for _ in range(count)
    ]


@pytest.mark.parametrize("target", [0.9, 0.95, 0.99])
def test_limits_together_would_have_had_the_target(target: float) -> None:
    seen = requests(1000)
    (found,) = propose(seen, target, most=20, by_length=False).items
    ttft, tpot = (limit.limit_ms for limit in found.limits)
    took_ms = [(1000 * (r.ttft_s or inf), 1000 * (r.tpot_s or inf)) for r in seen]
    met = sum(first <= ttft and each <= tpot for first, each in took_ms)
    assert found.attainment == met / 1000 >= target
    assert found.limits[0].attainment == sum(first <= ttft for first, _ in took_ms) / 1000


def test_a_limit_is_the_percentile_rounded_up() -> None:
    seen = [one(ttft_s=number / 1000) for number in range(1, 1001)]
    (found,) = propose(seen, 0.95, most=20, by_length=False).items
    limit = found.limits[0]
    assert limit.limit_ms == 980.0
    assert limit.seen_ms == {"p50": 500.0, "p95": 950.0, "p99": 990.0}
    assert limit.attainment == 0.98


def test_failures_meet_no_limit_and_have_no_latency() -> None:
    failed = [one(failed=True, ttft_s=0.001)] * 100
    (found,) = propose([*requests(900), *failed], 0.95, most=20, by_length=False).items
    assert (found.requests, found.failed) == (1000, 100)
    assert found.attainment <= 0.9
    assert found.limits[0].attainment > 0.95


def test_a_latency_that_too_few_have_gets_no_limit() -> None:
    short = [one(tpot_s=None)] * MIN_REQUESTS
    (found,) = propose(short, 0.95, most=20, by_length=False).items
    assert [limit.name for limit in found.limits] == ["ttft"]
    none = propose(short[1:], 0.95, most=20, by_length=False)
    assert (none.items, none.too_few) == ([], {"llama": MIN_REQUESTS - 1})


def test_input_lengths_have_objectives_that_cover_every_length_once() -> None:
    short, middle, long = ([one(tokens=n)] * 100 for n in (500, 5000, 100_000))
    few = [one(tokens=2000)] * 10
    found = propose([*long, *short, *few, *middle], 0.95, most=20, by_length=True).items
    assert [(each.min_input_tokens, each.max_input_tokens) for each in found] == [
        (None, 1023),
        (1024, 16383),
        (16384, None),
    ]
    assert [each.requests for each in found] == [100, 110, 100]


def test_lengths_are_not_told_apart_if_one_is_unknown_or_there_is_no_room() -> None:
    seen = [*([one(tokens=500)] * 100), *([one(tokens=5000)] * 100)]
    for found in (
        propose([*seen, one(tokens=None)], 0.95, most=20, by_length=True),
        propose(seen, 0.95, most=1, by_length=True),
    ):
        (only,) = found.items
        assert only.min_input_tokens is only.max_input_tokens is None


def test_models_have_objectives_of_their_own_the_busiest_first() -> None:
    seen = [*([one("a")] * 100), *([one("b")] * 200), *([one("c")] * 3)]
    found = propose(seen, 0.95, most=20, by_length=True)
    assert [each.model for each in found.items] == ["b", "a"]
    assert found.too_few == {"c": 3}


@given(st.floats(min_value=0.001, max_value=1e8))
def test_a_rounded_limit_is_not_below_the_value_and_at_most_a_tenth_above(value: float) -> None:
    assert value * (1 - 1e-6) <= rounded_up(value) <= max(value * 1.1 + 0.01, 1.0)


# From histograms

TTFT = {"p50": 250.0, "p95": 500.0, "p99": 750.0}
TPOT = {"p50": 25.0, "p95": 50.0, "p99": 75.0}


@pytest.mark.parametrize(
    ("target", "limits", "together"), [(0.95, (750.0, 75.0), 0.98), (0.9, (500.0, 50.0), 0.9)]
)
def test_a_limit_of_a_histogram_is_the_upper_bound_of_a_percentile_that_is_enough(
    target: float, limits: tuple[float, float], together: float
) -> None:
    found = propose_from_bounds("llama", {"ttft": TTFT, "tpot": TPOT, "e2e": TTFT}, 100, 0, target)
    assert found is not None
    assert tuple(limit.limit_ms for limit in found.limits) == limits
    assert found.at_least
    assert found.attainment == pytest.approx(together)


def test_a_percentile_above_the_highest_bucket_or_of_few_requests_gives_no_limit() -> None:
    above = {"p50": 250.0, "p95": 500.0, "p99": None}
    found = propose_from_bounds("llama", {"ttft": above}, 100, 0, 0.95)
    assert found is not None
    assert found.limits[0].limit_ms == 500.0
    assert found.attainment == 0.95
    assert propose_from_bounds("llama", {"ttft": dict.fromkeys(TTFT)}, 100, 0, 0.95) is None
    assert propose_from_bounds("llama", {"ttft": TTFT}, 99, 900, 0.95) is None
    # Failed requests are in no histogram.
    half = propose_from_bounds("llama", {"ttft": TTFT}, 1000, 1000, 0.95)
    assert half is not None
    assert (half.requests, half.failed, half.limits[0].attainment) == (2000, 1000, 0.99)
    assert half.attainment == pytest.approx(0.495)
