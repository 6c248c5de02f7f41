"""Causes that several phases share, as an engine shows them: machine, prefix cache, cold start."""

from collections.abc import Mapping
from functools import partial
from random import Random

import pytest

from agent.analysis.causes import EngineTimeline, explain
from agent.analysis.causes.baselines import RequestBaselines
from agent.analysis.causes.engine_rules import prompts_texts
from agent.analysis.causes.missed_case import MissedCase
from agent.analysis.causes.periods import Prompt, PromptLog, Prompts
from agent.catalog.causes import Cause
from agent.records.engine import EngineSample
from agent.records.request import RequestRecord
from tests.analysis.causes.making import (
    AT,
    OBJECTIVE,
    queued,
    row,
    sample,
    sample_each_second,
    starve,
    top_cause,
    usual,
)
from tests.analysis.causes.making import step as made_step

# A step while a request waits.
step = partial(made_step, waiting=1)


def with_steps(slow: float) -> EngineTimeline:
    """An engine whose steps took 10 ms, and take some times as long once its core waits."""
    timeline = usual(steps=0.01)
    starve(timeline, -60, 6)
    timeline.sample(sample(AT + 1))
    for number in range(200):
        timeline.step(step(AT + 1 + (number + 1) * 0.01 * slow, 0.01 * slow))
    return timeline


@pytest.mark.parametrize("starved", [False, True])
def test_a_step_that_waited_for_a_processor_is_no_stall(starved: bool) -> None:
    timeline = usual(steps=0.01)
    timeline.step(step(AT + 0.8, 0.8))
    starve(timeline, -60, 2 if starved else 1)
    assert bool([*timeline.stalled(AT, AT + 1)]) is not starved


@pytest.mark.parametrize("slow", [1, 10])
def test_a_waiting_core_loses_no_more_than_its_steps_are_longer(slow: int) -> None:
    request = row(AT + 1, tpot_s=0.19, decode_s=1.9, e2e_s=1.95)
    found = explain(request, [OBJECTIVE], with_steps(slow))
    causes = {share.cause for share in found.shares}
    assert (Cause.CPU_STARVED in causes) is (slow > 1)


def test_places_hold_a_queue_though_nobody_knows_what_is_usual() -> None:
    timeline = EngineTimeline()
    starve(timeline, 0, 9)
    sample_each_second(timeline, range(9), waiting=20.0, running=16.0)
    assert top_cause(queued(AT + 2, 4.0), timeline) is Cause.SEQUENCE_CAP


@pytest.mark.parametrize("cached", [0, 260])
def test_prompts_that_the_cache_lost_hold_the_queue(cached: int) -> None:
    """It usually has 360 of 400 tokens; a quarter less of that is chance."""
    timeline = usual(cached_tokens=360)
    for number in range(50):
        timeline.step(step(AT - 20 + 0.01 * number, 0.01))
        timeline.step(step(AT - 10 + 0.05 * number, 0.05, 400))
    timeline.sample(sample(AT + 1))
    for number in range(40):
        timeline.step(step(AT + 1.05 + number * 0.05, 0.05, 400))
        timeline.request(row(AT + 1.0 + number * 0.05, cached_tokens=cached, ttft_s=0.06))
    waits = queued(AT + 1, 1.95, cached_tokens=cached)
    timeline.request(waits)
    sample_each_second(timeline, range(2, 8))
    found = explain(waits, [OBJECTIVE], timeline)
    assert (found.top is Cause.CACHE_MISS) is (cached == 0), found.shares


@pytest.mark.parametrize(
    ("length", "cause"), [(400, Cause.CACHE_MISS), (4000, Cause.PREFILL_BACKLOG)]
)
def test_by_samples_alone_new_long_prompts_are_no_lost_hits(length: int, cause: Cause) -> None:
    """The cache had 90 % of all prompts. Then 8,000 tokens a second come that it does not have."""
    timeline = EngineTimeline()
    for second in range(-60, 14):
        new = 8000 * max(0, second)
        asked = 1600 * min(60, second + 60) + new
        facts = {
            "prefix_queries": float(asked),
            "prefix_hits": 0.9 * (asked - new),
            "step_tokens": 40.0 * (second + 60) + 160 * min(60, second + 60) + new,
            "waiting": 5.0 if second > 0 else 0.0,
        }
        timeline.sample(sample(AT + second, **facts))
        for number in range(4 if second <= 0 else 8000 // length):
            tokens = 400 if second <= 0 else length
            times = {"prefill_s": tokens / 10_000, "ttft_s": 0.02 + tokens / 10_000, "e2e_s": 0.6}
            timeline.request(row(AT + second + number / 20, input_tokens=tokens, **times))
    assert top_cause(queued(AT + 5.3, 4.0), timeline) is cause


@pytest.mark.parametrize(("each", "cause"), [(1, Cause.SEQUENCE_CAP), (4, Cause.PREFILL_BACKLOG)])
def test_more_requests_of_the_usual_length_are_no_long_prompts(each: int, cause: Cause) -> None:
    """Prompts take twice as many tokens: twice as many requests, or few that are longer."""
    timeline = EngineTimeline()
    for second in range(-60, 8):
        more = max(0, second)
        facts = {
            "step_tokens": 1640.0 * (second + 1000) + 2000 * more,
            "finished": 4.0 * (second + 1000) + (4 / each) * more,
            "waiting": 2.0 if second > 0 else 0.0,
            "running": 2.0,
            "places": 2.0,
        }
        timeline.sample(sample(AT + second, **facts))
        for number in range(4):
            timeline.request(row(AT + second + number / 4, prefill_s=0.09, ttft_s=0.11))
    assert top_cause(queued(AT + 0.5, 2.0), timeline) is cause


def test_a_batch_after_its_release_does_not_hide_that_places_were_short() -> None:
    """One place for three seconds, then places for all that waited, on a throttled GPU."""
    timeline = usual()
    timeline.gpu_slowness.add(AT - 60, AT, (0.0,))
    for second in range(1, 9):
        timeline.gpu_slowness.add(AT + second - 1, AT + second, (0.6,))
        short = second < 4
        facts = {
            "waiting": 7.0 if short else 0.0,
            "running": 1.0 if short else 8.0,
            "places": 1.0 if short else 16.0,
        }
        timeline.sample(sample(AT + second, **facts))
    assert top_cause(queued(AT + 0.5, 3.4), timeline) is Cause.SEQUENCE_CAP


@pytest.mark.parametrize("full", ["places", "kv"])
def test_a_slow_engine_that_fills_its_batch_lacks_no_room(full: str) -> None:
    """Two run where one usually does: places or memory are short by the throttled GPU alone."""
    timeline = usual()
    timeline.gpu_slowness.add(AT - 60, AT, (0.0,))
    for second in range(1, 9):
        timeline.gpu_slowness.add(AT + second - 1, AT + second, (0.6,))
        facts = {"waiting": 2.0, "running": 2.0, full: 2.0}
        timeline.sample(sample(AT + second, **facts))
    assert top_cause(queued(AT + 0.5, 3.4), timeline) is Cause.GPU_THROTTLED


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
    timeline = usual(steps=0.01)
    sample_each_second(timeline, range(1, 20), waiting=5.0, places=places)
    timeline.ready_at = ready_at
    for number in range(150):
        timeline.step(step(AT + (number + 1) / 10, 0.1))
    assert top_cause(queued(AT + 10, 3.0), timeline) is cause


def test_a_burst_shares_its_queue_with_the_places_that_it_filled() -> None:
    """Thirty requests come at once where four a second usually do, and two may run at once."""
    timeline = usual()
    sample_each_second(timeline, range(1, 9), waiting=30.0, running=2.0, places=2.0)
    found = explain(queued(AT + 0.5, 3.4), [OBJECTIVE], timeline)
    seconds = {share.cause: share.excess_s for share in found.shares}
    assert seconds[Cause.BURST] == pytest.approx(seconds[Cause.SEQUENCE_CAP], rel=0.2)


@pytest.mark.parametrize(("steps", "late"), [(1, False), (8, True)])
def test_a_front_is_not_late_for_a_step_that_the_core_is_in(steps: int, late: bool) -> None:
    """The front took 400 ms more: during one step of that time, or several."""
    timeline, began_at = usual(steps=0.01, queue_s=0.0), AT + 20
    for number in range(2 * steps):
        # As long as its prompts need.
        timeline.step(step(began_at + (number + 1) * 0.5 / steps, 0.5 / steps, 5000 // steps))
    times = {"queue_s": 0.0, "ttft_s": 0.45, "e2e_s": 0.55}
    for number in range(8):
        timeline.request(row(began_at + number / 100, **times))
    found = explain(row(began_at + 0.04, **times), [OBJECTIVE], timeline)
    assert (Cause.TOKENISING in {share.cause for share in found.shares}) is late, found.shares


def test_who_waits_for_a_place_longer_than_for_prompts_lacks_a_place() -> None:
    """Places are full for 79 % of the time, and prompts take 60 % of it."""
    timeline = usual(steps=0.01)
    sample_each_second(timeline, range(1, 4), waiting=4.0, running=2.0, places=2.0)
    at = AT
    for number in range(120):
        prompt = number % 3 == 0
        took_s = 0.075 if prompt else 0.01
        at += took_s
        timeline.step(step(at, took_s, 900 * prompt)._replace(running=1 + prompt))
    assert top_cause(queued(AT + 0.5, 1.5), timeline) is Cause.SEQUENCE_CAP


def crowded(slow: int) -> EngineTimeline:
    """Two run where one usually does, in steps that are some times as long as usual."""
    timeline = usual(steps=1 / 30)
    sample_each_second(timeline, range(1, 9), waiting=2.0, running=2.0, places=2.0)
    for number in range(240 // slow):
        full = step(AT + slow * number / 30, slow / 30)
        timeline.step(full._replace(running=2, waiting_capacity=2))
    return timeline


WAITS = queued(AT + 0.5, 3.4)


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


@pytest.mark.parametrize(("ended_ago_s", "cause"), [(0.0, Cause.DEFERRED), (12.0, None)])
def test_requests_were_held_if_that_lasted_until_they_ran(
    ended_ago_s: float, cause: Cause | None
) -> None:
    timeline = EngineTimeline()
    for number in range(300):
        ended_at = AT - 30 + (number + 1) / 10
        deferred = 0 < AT - ended_ago_s - ended_at + 0.05 < 3
        timeline.step(
            step(ended_at, 0.1)._replace(waiting_capacity=0, waiting_deferred=3 * deferred)
        )
    timeline.step(step(AT + 1, 0.1))
    case = MissedCase(row(AT), timeline)
    held = case.hold(timeline.period(AT, AT + 1))
    assert (held and held.cause) == cause


# The time of others' prompts goes to the cache that lost them, to preemptions, or to them

# Others' prompts were computed in the 1.3 s of this decode, or of this prefill.
DECODE = row(AT + 1, tpot_s=0.13, decode_s=1.3, e2e_s=1.35)
PREFILL = row(AT + 1, cached_tokens=320, ttft_s=1.315, prefill_s=1.3, e2e_s=1.415)


def _engine(
    usual_per_s: float, others: Mapping[str, object], *, hits: bool = False, preempted: int = 0
) -> EngineTimeline:
    """Prompts of 500 tokens at 0.16 ms each, of which the cache usually had 400; then three more.

    `others` is what the rows tell of those three. With `hits`, only samples tell of the prefix
    cache, which had nothing of them.
    """
    timeline = EngineTimeline()
    for number in range(600):
        prompts = number % 60 == 0
        timeline.step(step(AT - 60 + number / 10, 0.1 if prompts else 0.02, 500 * prompts))
    for second in range(-60, 4):
        timeline.sample(_sample(second, usual_per_s, hits=hits))
        for quarter in range(4 if second < 0 else 0):
            cached = None if hits else 320
            timeline.request(row(AT + second + quarter / 4, cached_tokens=cached))
    for number in range(3):
        at = AT + 1.1 + number * 0.4
        timeline.step(step(at, 0.4 - 0.1))
        timeline.step(step(at + 0.1, 0.1, 500)._replace(preempted=preempted))
        timeline.request(row(at, prefill_s=0.1, ttft_s=0.1, e2e_s=0.2, **others))
    timeline.step(step(AT + 2.4, 0.05))
    return timeline


def _sample(second: int, usual_per_s: float, *, hits: bool) -> EngineSample:
    facts = {"step_tokens": (40 + usual_per_s) * (second + 1000)}
    if hits:
        facts["prefix_queries"] = 2000.0 * (second + 1000)
        facts["prefix_hits"] = 1600.0 * (min(second, -3) + 1000)
    return sample(AT + second, **facts)


def _seconds(slow: RequestRecord, timeline: EngineTimeline) -> dict[Cause, float]:
    shares = explain(slow, [OBJECTIVE], timeline).shares
    return {share.cause: share.excess_s or 0.0 for share in shares}


@pytest.mark.parametrize(
    ("slow", "others_cause"),
    [(DECODE, Cause.PREFILL_INTERFERENCE), (PREFILL, Cause.PREFILL_CONTENTION)],
)
@pytest.mark.parametrize("hits", [False, True])
def test_it_is_divided_between_the_cache_and_the_owners_of_the_prompts(
    slow: RequestRecord, others_cause: Cause, hits: bool
) -> None:
    """The cache usually has 400 of each prompt's 500 tokens: the other 100 of each are its own."""
    others = {"input_tokens": 500, "cached_tokens": None if hits else 0}
    seconds = _seconds(slow, _engine(40.0, others, hits=hits))
    assert seconds[Cause.CACHE_MISS] > 2 * seconds[others_cause] > 0


def test_prompts_that_are_computed_again_are_no_prompts_of_others() -> None:
    """Steps computed 1,500 tokens, of which the rows of others have 501."""
    others = {"input_tokens": 500, "cached_tokens": 333}
    seconds = _seconds(DECODE, _engine(40.0, others, preempted=2))
    again_s, others_s = seconds[Cause.PREEMPTION], seconds[Cause.PREFILL_INTERFERENCE]
    assert again_s > 1.5 * others_s > 0


def test_steps_take_no_longer_than_the_decoding_that_they_delay() -> None:
    """Ten prompts of 4,000 tokens would take 3.5 s by what a token of a prompt usually takes."""
    timeline = usual()
    sample_each_second(timeline, range(1, 5))
    for number in range(10):
        others = row(AT + 1.1 + number / 10, input_tokens=4000, span_id=f"{number}")
        timeline.request(others)
    found = explain(DECODE, [OBJECTIVE], timeline)
    text = " ".join(sentence for share in found.shares for sentence in share.evidence)
    assert "took 1.3 s of 1.3 s" in text


@pytest.mark.parametrize("others", [3, 300])
def test_the_own_prompt_of_a_request_is_none_of_the_others(others: int) -> None:
    """Its row came before the samples that tell of the prefix cache, so its tokens changed since.

    All prompts are named, whenever they were prefilled.
    """
    prompts = PromptLog()
    prompts.add(Prompt("own", AT, 0.1, 9000, 800))
    prompts.add(Prompt("of the same step", AT, 0.1, 9000, 0))
    for number in range(others - 1):
        prompts.add(Prompt(f"{number}", AT + 1 + number / 1000, 0.0, 100 + number, 10))
    found = prompts.within(AT - 1, AT + 2, ("own", AT + 1e-7))
    last = 100 + others - 2
    assert found.many == others
    assert found.tokens == 9000 + sum(range(100, last + 1))
    assert found.missing_share == pytest.approx(10 * (others - 1) / found.tokens)
    (text,) = prompts_texts(found)
    assert f"the largest of 9,000, {last}, {last - 1} tokens" in text


@pytest.mark.parametrize("none", [Prompts(), Prompts(many=1, sizes=(700,), own=700)])
def test_without_another_prompt_there_is_no_evidence_of_one(none: Prompts) -> None:
    assert prompts_texts(none) == ()


@pytest.mark.parametrize("seed", range(5))
def test_prompts_that_come_late_count_in_their_place(seed: int) -> None:
    random = Random(seed)
    prompts, known = PromptLog(), list[Prompt]()
    for number in range(400):
        at = AT + number / 10 - random.choice([0, 0, 5])
        missing = random.choice([None, 1, 2, 3]) if number < 20 else random.randrange(50)
        known.append(Prompt(f"{number}", at, 0.0, random.randrange(50, 500), missing))
        prompts.add(known[-1])
        if number % 7:
            continue
        start = AT + random.random() * 40
        inside = [each for each in known if start <= each.first_at <= start + 10]
        found = prompts.within(start, start + 10, ("none", AT))
        if len(inside) > 16:
            assert (found.many, found.tokens) == (len(inside), sum(each.tokens for each in inside))
            missed = [each.missing for each in inside]
            expected = None if None in missed else sum(each or 0 for each in missed) / found.tokens
            assert found.missing_share == expected


@pytest.mark.parametrize(
    ("usually", "cached", "missing"),
    [(320, 0, 320), (320, 230, 0), (320, 200, 120), (60, 0, 0), (320, None, None)],
)
def test_a_prompt_misses_what_the_cache_usually_has_unless_that_is_little(
    usually: int, cached: int | None, missing: int | None
) -> None:
    known = RequestBaselines()
    for second in range(20):
        known.learn(row(AT + second, cached_tokens=usually))
    found = known.missing_tokens(row(AT + 20, cached_tokens=cached))
    assert found == (missing and pytest.approx(missing, rel=0.02))


def test_what_is_usual_follows_what_is_learned() -> None:
    known = RequestBaselines()
    for tokens, requests in ((11, 20), (51, 100)):
        for second in range(requests):
            known.learn(row(AT + second, output_tokens=tokens))
        assert known.usual(row(AT + 20)).output_tokens == pytest.approx(tokens, rel=0.02)
