"""The time of others' prompts goes to the cache that lost them, to preemptions, or to them."""

from collections.abc import Mapping
from random import Random

import pytest

from agent.analysis.causes import EngineTimeline, explain
from agent.analysis.causes.baselines import RequestBaselines
from agent.analysis.causes.engine_rules import prompts_text
from agent.analysis.causes.periods import Prompt, PromptLog
from agent.catalog import engine_facts as fact
from agent.catalog.causes import Cause
from agent.records.engine import EngineSample
from agent.records.request import RequestRecord
from tests.analysis.causes.making import AT, OBJECTIVE, row, sample, usual
from tests.analysis.causes.test_engine_rules import step

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
    for number in range(300):
        prompts = number % 60 == 0
        timeline.step(step(AT - 30 + number / 10, 0.1 if prompts else 0.02, 500 * prompts))
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
    facts = {fact.STEP_TOKENS.name: (40 + usual_per_s) * (second + 1000)}
    if hits:
        facts[fact.PREFIX_CACHE_QUERY_TOKENS.name] = 2000.0 * (second + 1000)
        facts[fact.PREFIX_CACHE_HIT_TOKENS.name] = 1600.0 * (min(second, -3) + 1000)
    return sample(AT + second, **facts)


def _seconds(slow: RequestRecord, timeline: EngineTimeline) -> dict[Cause, float]:
    shares = explain(slow, [OBJECTIVE], timeline).shares
    return {share.cause: share.excess_s or 0.0 for share in shares}


@pytest.mark.parametrize(
    ("slow", "others_cause"),
    [(DECODE, Cause.PREFILL_INTERFERENCE), (PREFILL, Cause.PREFILL_CONTENTION)],
)
@pytest.mark.parametrize("hits", [False, True])
@pytest.mark.parametrize(("usual_per_s", "times"), [(40.0, 4.0), (400.0, None)])
def test_it_is_divided_between_the_cache_and_the_owners_of_the_prompts(
    slow: RequestRecord,
    others_cause: Cause,
    hits: bool,
    usual_per_s: float,
    times: float | None,
) -> None:
    """The cache usually has 400 of each prompt's 500 tokens.

    The other 100 of each count, unless requests meet as many in their steps at any time.
    """
    others = {"input_tokens": 500, "cached_tokens": None if hits else 0}
    seconds = _seconds(slow, _engine(usual_per_s, others, hits=hits))
    of_others = seconds.get(others_cause)
    assert Cause.CACHE_MISS in seconds
    if times is None:
        assert of_others is None
    else:
        assert seconds[Cause.CACHE_MISS] == pytest.approx(times * (of_others or 0.0), rel=0.1)


def test_prompts_that_are_computed_again_are_no_prompts_of_others() -> None:
    """Steps computed 1,500 tokens, of which the rows of others have 500."""
    others = {"input_tokens": 500, "cached_tokens": 333}
    seconds = _seconds(DECODE, _engine(40.0, others, preempted=1))
    again_s, others_s = seconds[Cause.PREEMPTION], seconds[Cause.PREFILL_INTERFERENCE]
    assert again_s == pytest.approx(2 * others_s, rel=0.01)


def test_steps_take_no_longer_than_the_decoding_that_they_delay() -> None:
    """Ten prompts of 4,000 tokens would take 3.5 s by what a token of a prompt usually takes."""
    timeline = usual()
    for second in range(1, 5):
        timeline.sample(sample(AT + second))
    for number in range(10):
        others = row(AT + 1.1 + number / 10, input_tokens=4000, span_id=f"{number}")
        timeline.request(others)
    found = explain(DECODE, [OBJECTIVE], timeline)
    text = " ".join(sentence for share in found.shares for sentence in share.evidence)
    assert "took 1.3 s of the 1.3 s of decoding" in text


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
    assert f"the largest of 9,000, {last}, {last - 1} tokens" in prompts_text(found)


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
            assert (found.many, found.tokens) == (
                len(inside),
                sum(each.tokens for each in inside),
            )
            missed = [each.missing for each in inside]
            expected = None if None in missed else sum(each or 0 for each in missed) / found.tokens
            assert found.missing_share == expected


def test_of_a_prompt_that_a_period_holds_in_part_the_same_part_is_missing() -> None:
    prompts = PromptLog()
    prompts.add(Prompt("a", AT + 0.5, 1.0, 500, 400))
    prompts.add(Prompt("b", AT + 2.0, 1.0, 500, 0))
    found = prompts.within(AT, AT + 3, ("c", AT))
    assert (found.many, found.tokens) == (2, 750)
    assert found.missing_share == pytest.approx(200 / 750)


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
