"""The parts add up to the bill for any rows and samples."""

import random
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.analysis.efficiency.busy_time import TimeParts, time_parts
from agent.analysis.efficiency.engine_observation import observe
from agent.analysis.efficiency.request_activity import TimeRange
from agent.analysis.efficiency.work import Role, Serving
from agent.records.engine import EngineSample
from agent.records.minute import EngineWork
from agent.records.model import Parallelism
from agent.records.request import RequestRecord, Status
from tests.analysis.cost.engine_days import (
    LLAMA_ON_H100,
    SplitMinute,
    efficiency_in,
    engine_sample,
    split_minute,
    whole,
)
from tests.records.columns import active
from tests.records.making import record

SECONDS = st.none() | st.floats(-10, 1e6) | st.floats(0, 30) | st.just(0.0)
TOKENS = st.none() | st.integers(-5, 10**7) | st.integers(0, 300)
TIMES = st.floats(-200, 200) | st.integers(-20, 20).map(float)
COUNTER = st.floats(0, 1e15) | st.integers(0, 1000).map(float)
NAMES = ("running", "steps", "input", "cached", "output", "preemptions", "drafts", "prefix_hits")
SAMPLES = st.builds(
    lambda at, started, counts: engine_sample(at, started, **counts),
    TIMES,
    st.none() | st.sampled_from((-1000.0, 50.0)),
    st.dictionaries(st.sampled_from(NAMES), COUNTER),
)


@st.composite
def rows(draw: st.DrawFn) -> RequestRecord:
    """A row whose values may contradict each other."""
    given: dict[str, Any] = {
        **{name: draw(SECONDS) for name in ("queue_s", "prefill_s", "decode_s", "ttft_s")},
        **{name: draw(TOKENS) for name in ("input_tokens", "cached_tokens", "output_tokens")},
        "status": draw(st.sampled_from(Status)),
        "finish_reason": draw(st.sampled_from((None, "stop", "abort"))),
        "started_at": draw(TIMES),
        "ended_at": draw(TIMES),
    }
    return record(draw(st.integers(1, 20)), **given)


SERVINGS = st.sampled_from(
    (
        Serving(),
        LLAMA_ON_H100,
        Serving(model=LLAMA_ON_H100.model),
        Serving(model=LLAMA_ON_H100.model, gpu=LLAMA_ON_H100.gpu, role=Role.PREFILL),
        Serving(
            model=LLAMA_ON_H100.model,
            gpu=LLAMA_ON_H100.gpu,
            parallelism=Parallelism(tensor=16, data=2),
            role=Role.DECODE,
        ),
    )
)
DAYS = st.tuples(
    st.lists(SAMPLES, max_size=15, unique_by=lambda sample: sample.at),
    st.lists(rows(), max_size=12),
    SERVINGS,
)
WINDOWS = st.tuples(TIMES, st.floats(0.01, 300)).map(lambda w: TimeRange(w[0], w[0] + w[1]))
BILLS = st.just(0.0) | st.floats(1e-6, 1e9)
Day = tuple[list[EngineSample], list[RequestRecord], Serving]


def work_of(day: Day, window: TimeRange) -> EngineWork:
    samples, requests, serving = day
    return efficiency_in(observe(samples, window, max_gap_s=15), requests, serving).work


def bill_of(window: TimeRange) -> float:
    return window.length_s * 7


def split(day: Day, window: TimeRange, bill: float | None = None) -> SplitMinute:
    samples, requests, serving = day
    found = split_minute(observe(samples, window, max_gap_s=15), requests, serving)
    return found.times(bill_of(window) if bill is None else bill)


def close(amount: float, scale: float) -> Any:
    return pytest.approx(amount, rel=1e-9, abs=1e-9 * scale)


@given(DAYS, WINDOWS, BILLS)
def test_requests_idle_unknown_and_unseen_add_up_to_the_bill(
    day: Day, window: TimeRange, bill: float
) -> None:
    """No part is negative; the prices of tokens add up to the cost of the requests."""
    found, work = split(day, window, bill), work_of(day, window)
    assert whole(found) == close(bill, bill)
    outside = (found.cost.idle, found.cost.unknown, found.cost.unseen)
    phases = (found.cost.prefill, found.cost.decode)
    assert sum((*outside, *phases)) == close(bill, bill)
    priced = list(zip(_prices(found, work), _tokens(work), strict=True))
    parts = [*outside, found.cost.aborted, *found.requests.values()]
    parts += [found.cost.computed, found.cost.cached, found.cost.decode]
    parts += [price for price, _ in priced if price is not None]
    assert min(parts) >= 0
    assert found.cost.unseen + found.cost.aborted <= bill * (1 + 1e-9)
    paid = sum(price * count for price, count in priced if price)
    assert paid == close(sum(found.requests.values()), bill)


def _prices(found: SplitMinute, work: EngineWork) -> tuple[float | None, ...]:
    parts = (found.cost.computed, found.cost.cached, found.cost.decode)
    return tuple(cost / n if n > 0 else None for cost, n in zip(parts, _tokens(work), strict=True))


def _tokens(work: EngineWork) -> tuple[float, float, float]:
    return work.computed_tokens, work.cached_tokens, work.output_tokens


@given(DAYS, WINDOWS, st.randoms(use_true_random=False))
def test_the_order_of_rows_and_samples_changes_nothing(
    day: Day, window: TimeRange, chance: random.Random
) -> None:
    samples, requests, serving = day
    mixed = (chance.sample(samples, len(samples)), chance.sample(requests, len(requests)), serving)
    one, other, bill = split(day, window), split(mixed, window), bill_of(window)
    assert other.requests.keys() == one.requests.keys()
    for key, cost in one.requests.items():
        assert other.requests[key] == close(cost, bill)
    assert (other.cost.idle, other.cost.unknown) == close_each(
        (one.cost.idle, one.cost.unknown), bill
    )
    assert (other.cost.unseen, other.cost.aborted) == close_each(
        (one.cost.unseen, one.cost.aborted), bill
    )


def test_streams_that_end_at_once_leave_nothing_to_one_that_lasts_for_days() -> None:
    unknown = dict.fromkeys(("queue_s", "prefill_s", "decode_s", "input_tokens", "cached_tokens"))

    def stream(number: int, tokens: int, ended_at: float) -> RequestRecord:
        given = {"ended_at": ended_at, "ttft_s": ended_at, "output_tokens": tokens}
        return record(number, **{**unknown, **given, "started_at": 0.0})

    streams = [stream(1, 264, 0.0), stream(2, 263, 0.0), stream(3, 256, 770597.0)]
    prompt = {**unknown, "input_tokens": 1, "output_tokens": None}
    other = record(4, **{**prompt, "started_at": 0.0, "ended_at": 9.0, "ttft_s": 9.0})
    ways = [
        split(([], [*mixed, other], Serving()), TimeRange(0.0, 1.0)).requests
        for mixed in permutations(streams)
    ]
    for requests in ways:
        assert requests == pytest.approx(ways[0], rel=1e-9)


def close_each(amounts: tuple[float, float], scale: float) -> Any:
    return pytest.approx(amounts, rel=1e-9, abs=1e-9 * scale)


@given(DAYS, WINDOWS, st.floats(0.05, 0.95))
def test_two_parts_of_a_minute_have_the_same_idle_unknown_and_busy_time(
    day: Day, window: TimeRange, at: float
) -> None:
    cut = window.from_at + at * window.length_s
    one = times_of(day, TimeRange(window.from_at, cut))
    two = times_of(day, TimeRange(cut, window.until))
    for first, second, both in zip(one, two, times_of(day, window), strict=True):
        assert first + second == close(both, window.length_s)


def times_of(day: Day, window: TimeRange) -> TimeParts:
    samples, requests, _ = day
    observed = observe(samples, window, max_gap_s=15)
    return time_parts(observed, active(requests))


def test_a_rest_of_a_sum_of_loads_is_charged_to_nobody_and_is_not_lost() -> None:
    """The prompts that ended before leave a rest beside one that is wholly cached."""
    unknown = dict.fromkeys(("queue_s", "prefill_s", "decode_s", "output_tokens", "finish_reason"))
    prompts: list[dict[str, Any]] = [
        {"ttft_s": None, "cached_tokens": None},
        {"ttft_s": 3.0, "cached_tokens": None},
        {"ttft_s": 4.0, "cached_tokens": 1},
    ]
    rows = [
        record(1, started_at=0.0, ended_at=0.0, input_tokens=1, **unknown, **prompt)
        for prompt in prompts
    ]
    day: Day = ([], rows, Serving(model=LLAMA_ON_H100.model))
    assert whole(split(day, TimeRange(3.0, 4.0), 1.0)) == close(1.0, 1.0)
