"""Causes that several phases share, as an engine shows them: machine, prefix cache, cold start."""

from functools import partial

import pytest

from agent.analysis.causes import EngineTimeline, explain
from agent.analysis.causes.activity import StepCosts
from agent.catalog import engine_facts as fact
from agent.catalog.causes import Cause
from agent.catalog.metric import Metric
from tests.analysis.causes.making import AT, OBJECTIVE, row, sample, starve, usual
from tests.analysis.causes.making import step as made_step

# A step while a request waits.
step = partial(made_step, waiting=1)


def with_steps(slow: float) -> EngineTimeline:
    """An engine whose steps took 10 ms, and take some times as long once its core waits."""
    timeline = usual()
    for number in range(1000):
        timeline.step(step(AT - 30 + number / 100, 0.01))
    starve(timeline, -60, 6)
    timeline.sample(sample(AT + 1))
    for number in range(200):
        timeline.step(step(AT + 1 + (number + 1) * 0.01 * slow, 0.01 * slow))
    return timeline


@pytest.mark.parametrize("slow", [1, 10])
def test_a_waiting_core_loses_no_more_than_its_steps_are_longer(slow: int) -> None:
    request = row(AT + 1, tpot_s=0.19, decode_s=1.9, e2e_s=1.95)
    found = explain(request, [OBJECTIVE], with_steps(slow))
    causes = {share.cause for share in found.shares}
    assert (Cause.CPU_STARVED in causes) is (slow > 1)


def test_places_hold_a_queue_though_nobody_knows_what_is_usual() -> None:
    timeline = EngineTimeline()
    starve(timeline, 0, 9)
    full = {fact.REQUESTS_WAITING.name: 20.0, fact.REQUESTS_RUNNING.name: 16.0}
    for second in range(9):
        timeline.sample(sample(AT + second, **full))
    found = explain(row(AT + 2, ttft_s=4.05, queue_s=4.0, e2e_s=4.15), [OBJECTIVE], timeline)
    assert found.top is Cause.SEQUENCE_CAP


@pytest.mark.parametrize("cached", [0, 260, 360])
def test_prompts_that_the_cache_lost_hold_the_queue(cached: int) -> None:
    """It usually has 360 of 400 tokens; a quarter less of that is chance."""
    timeline = EngineTimeline()
    for second in range(-60, 1):
        timeline.sample(sample(AT + second))
        for quarter in range(4):
            timeline.request(row(AT + second + quarter / 4, cached_tokens=360))
    for number in range(50):
        timeline.step(step(AT - 20 + 0.01 * number, 0.01))
        timeline.step(step(AT - 10 + 0.05 * number, 0.05, 400))
    timeline.sample(sample(AT + 1))
    for number in range(40):
        timeline.step(step(AT + 1.05 + number * 0.05, 0.05, 400))
        timeline.request(row(AT + 1.0 + number * 0.05, cached_tokens=cached, ttft_s=0.06))
    waits = row(AT + 1, ttft_s=2.0, queue_s=1.95, e2e_s=2.1, cached_tokens=cached)
    timeline.request(waits)
    for second in range(2, 8):
        timeline.sample(sample(AT + second))
    found = explain(waits, [OBJECTIVE], timeline)
    assert (found.top is Cause.CACHE_MISS) is (cached == 0), found.shares


@pytest.mark.parametrize(
    ("length", "cause"), [(400, Cause.CACHE_MISS), (4000, Cause.PREFILL_BACKLOG)]
)
def test_by_samples_alone_new_long_prompts_are_no_lost_hits(length: int, cause: Cause) -> None:
    """The cache had 90 % of all prompts. Then 8,000 tokens a second come that it does not have."""
    timeline = EngineTimeline()
    for second in range(-60, 8):
        new = 8000 * max(0, second)
        asked = 1600 * min(60, second + 60) + new
        facts = {
            fact.PREFIX_CACHE_QUERY_TOKENS.name: float(asked),
            fact.PREFIX_CACHE_HIT_TOKENS.name: 0.9 * (asked - new),
            fact.STEP_TOKENS.name: 40.0 * (second + 60) + 160 * min(60, second + 60) + new,
            fact.REQUESTS_WAITING.name: 5.0 if second > 0 else 0.0,
        }
        timeline.sample(sample(AT + second, **facts))
        for number in range(4 if second <= 0 else 8000 // length):
            tokens = 400 if second <= 0 else length
            times = {"prefill_s": tokens / 10_000, "ttft_s": 0.02 + tokens / 10_000, "e2e_s": 0.6}
            timeline.request(row(AT + second + number / 20, input_tokens=tokens, **times))
    waits = row(AT + 1.3, ttft_s=4.05, queue_s=4.0, e2e_s=4.15)
    found = explain(waits, [OBJECTIVE], timeline)
    assert found.top is cause, found.shares


@pytest.mark.parametrize(("each", "cause"), [(1, Cause.SEQUENCE_CAP), (4, Cause.PREFILL_BACKLOG)])
def test_more_requests_of_the_usual_length_are_no_long_prompts(each: int, cause: Cause) -> None:
    """Prompts take twice as many tokens: twice as many requests, or few that are longer."""
    timeline = EngineTimeline()
    for second in range(-60, 8):
        more = max(0, second)
        facts = {
            fact.STEP_TOKENS.name: 1640.0 * (second + 1000) + 2000 * more,
            fact.REQUESTS_FINISHED.name: 4.0 * (second + 1000) + (4 / each) * more,
            fact.REQUESTS_WAITING.name: 2.0 if second > 0 else 0.0,
            fact.REQUESTS_RUNNING.name: 2.0,
            fact.MAX_RUNNING_REQUESTS.name: 2.0,
        }
        timeline.sample(sample(AT + second, **facts))
        for number in range(4):
            timeline.request(row(AT + second + number / 4, prefill_s=0.09, ttft_s=0.11))
    found = explain(row(AT + 0.5, ttft_s=2.05, queue_s=2.0, e2e_s=2.15), [OBJECTIVE], timeline)
    assert found.top is cause, found.shares


def test_a_batch_after_its_release_does_not_hide_that_places_were_short() -> None:
    """One place for three seconds, then places for all that waited, on a throttled GPU."""
    timeline = usual()
    timeline.gpu_slowness.add(AT - 60, AT, (0.0,))
    for second in range(1, 9):
        timeline.gpu_slowness.add(AT + second - 1, AT + second, (0.6,))
        short = second < 4
        facts = {
            fact.REQUESTS_WAITING.name: 7.0 if short else 0.0,
            fact.REQUESTS_RUNNING.name: 1.0 if short else 8.0,
            fact.MAX_RUNNING_REQUESTS.name: 1.0 if short else 16.0,
        }
        timeline.sample(sample(AT + second, **facts))
    waits = row(AT + 0.5, ttft_s=3.45, queue_s=3.4, e2e_s=3.55)
    found = explain(waits, [OBJECTIVE], timeline)
    assert found.top is Cause.SEQUENCE_CAP, found.shares


@pytest.mark.parametrize("full", [fact.MAX_RUNNING_REQUESTS, fact.KV_CACHE_USAGE])
def test_a_slow_engine_that_fills_its_batch_lacks_no_room(full: Metric) -> None:
    """Two run where one usually does: places or memory are short by the throttled GPU alone."""
    timeline = usual()
    timeline.gpu_slowness.add(AT - 60, AT, (0.0,))
    for second in range(1, 9):
        timeline.gpu_slowness.add(AT + second - 1, AT + second, (0.6,))
        facts = {
            fact.REQUESTS_WAITING.name: 2.0,
            fact.REQUESTS_RUNNING.name: 2.0,
            full.name: 2.0,
        }
        timeline.sample(sample(AT + second, **facts))
    waits = row(AT + 0.5, ttft_s=3.45, queue_s=3.4, e2e_s=3.55)
    found = explain(waits, [OBJECTIVE], timeline)
    assert found.top is Cause.GPU_THROTTLED, found.shares


@pytest.mark.parametrize(
    ("ready_at", "places", "cause"),
    [
        (AT - 25, 16.0, Cause.COLD_START),
        (AT - 35, 16.0, Cause.UNEXPLAINED),
        (AT - 25, 1.0, Cause.SEQUENCE_CAP),
    ],
)
def test_a_cold_start_counts_from_the_begin_of_the_queue(
    ready_at: float, places: float, cause: Cause
) -> None:
    """The queue began at AT, on steps ten times as long as usual, and the request came later."""
    timeline = usual()
    for number in range(1000):
        timeline.step(step(AT - 30 + number / 100, 0.01))
    waits = {fact.REQUESTS_WAITING.name: 5.0, fact.MAX_RUNNING_REQUESTS.name: places}
    for second in range(1, 20):
        timeline.sample(sample(AT + second, **waits))
    timeline.ready_at = ready_at
    for number in range(150):
        timeline.step(step(AT + (number + 1) / 10, 0.1))
    found = explain(row(AT + 10, ttft_s=3.05, queue_s=3.0, e2e_s=3.15), [OBJECTIVE], timeline)
    assert found.top is cause, found.shares


def crowded(slow: int) -> EngineTimeline:
    """Two run where one usually does, in steps that are some times as long as usual."""
    timeline = usual()
    for number in range(300):
        timeline.step(step(AT - 10 + number / 30, 1 / 30))
    for second in range(1, 9):
        facts = {
            fact.REQUESTS_WAITING.name: 2.0,
            fact.REQUESTS_RUNNING.name: 2.0,
            fact.MAX_RUNNING_REQUESTS.name: 2.0,
        }
        timeline.sample(sample(AT + second, **facts))
    for number in range(240 // slow):
        full = step(AT + slow * number / 30, slow / 30)
        timeline.step(full._replace(running=2, waiting_capacity=2))
    return timeline


WAITS = row(AT + 0.5, ttft_s=3.45, queue_s=3.4, e2e_s=3.55)


@pytest.mark.parametrize(("slow", "cause"), [(1, Cause.SEQUENCE_CAP), (4, Cause.UNEXPLAINED)])
def test_places_that_slow_steps_alone_fill_are_no_lack_of_places(slow: int, cause: Cause) -> None:
    """No sample of the processor or the GPU explains the slow steps."""
    found = explain(WAITS, [OBJECTIVE], crowded(slow))
    assert found.top is cause, found.shares
    said = "longer than their tokens explain" in str(found.shares)
    assert said is (slow > 1)


def test_steps_of_long_prompts_are_not_slow_for_no_reason() -> None:
    """The engine counts the tokens of a prompt in its last step alone."""
    timeline = crowded(4)
    for number in range(8):
        long = {"input_tokens": 16_000, "queue_s": 0.0, "prefill_s": 2.0, "ttft_s": 2.0}
        timeline.request(row(AT + 1 + number / 8, **long, e2e_s=2.1))
    found = explain(WAITS, [OBJECTIVE], timeline)
    assert found.top is not Cause.UNEXPLAINED, found.shares
    assert "longer than their tokens explain" not in str(found.shares)


@pytest.mark.parametrize(
    ("slow_for_s", "slow", "learned"), [(300, 1, True), (300, 4, False), (700, 4, True)]
)
def test_steps_of_a_slow_engine_show_no_costs_of_a_larger_batch_until_they_last(
    slow_for_s: int, slow: int, learned: bool
) -> None:
    """A step of one takes 10 ms. Then they are slow, and the batch grows as requests pile up."""
    costs = StepCosts()
    for second in range(60):
        costs.learn_decode(AT + second, 1, 0.01)
    for second in range(10):
        costs.learn_decode(AT + 60 + second, 1, 0.01 * slow)
    for second in range(10, slow_for_s):
        costs.learn_decode(AT + 60 + second, 16, 0.02 * slow)
    expected = 0.02 * slow if learned else 0.01
    assert costs.decode_step_s(16) == pytest.approx(expected, rel=0.05)
    for second in range(20):
        costs.learn_decode(AT + 800 + second, 1, 0.01)
        costs.learn_decode(AT + 800 + second, 16, 0.02)
    assert costs.decode_step_s(16) == pytest.approx(0.02 * (slow if learned else 1), rel=0.05)
