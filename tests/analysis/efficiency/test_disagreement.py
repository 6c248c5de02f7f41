"""When the three views tell different figures, and why."""

from itertools import permutations

import pytest

from agent.analysis.efficiency.disagreement import Conditions, disagreements
from agent.analysis.efficiency.minute_efficiency import minute_efficiency
from agent.analysis.efficiency.source_utilisation import Source, SourceUtilisation
from tests.analysis.cost.engine_days import LLAMA_ON_H100, busy_readings, reading, seen
from tests.analysis.efficiency.test_minute_efficiency import PROMPT_READINGS, PROMPTS, gpu

PAIRS = list(permutations(Source, 2))


def views(figure: str, **told: float) -> list[SourceUtilisation]:
    return [
        SourceUtilisation(source=Source(name), **{figure: value}) for name, value in told.items()
    ]


@pytest.mark.parametrize("figure", ["mfu", "mbu"])
@pytest.mark.parametrize(("higher", "lower"), PAIRS)
def test_every_disagreement_has_a_cause(figure: str, higher: Source, lower: Source) -> None:
    (found,) = disagreements(views(figure, **{higher: 0.6, lower: 0.3}), Conditions())
    assert (found.figure, found.higher, found.lower, found.times) == (figure, higher, lower, 2)
    assert found.causes


@pytest.mark.parametrize(
    ("told", "differ"),
    [
        ({"requests": 0.40, "engine": 0.49}, False),
        ({"requests": 0.40, "engine": 0.51}, True),
        ({"engine": 0.40, "hardware": 0.49}, False),
        # What was needed at least cannot be more than what was done.
        ({"requests": 0.42, "hardware": 0.40}, False),
        ({"requests": 0.43, "hardware": 0.40}, True),
        ({"requests": 0.004, "hardware": 0.001}, False),
        ({"requests": 0.4, "hardware": 0.0}, True),
    ],
)
def test_figures_may_differ_by_a_margin(told: dict[str, float], differ: bool) -> None:
    assert bool(disagreements(views("mfu", **told), Conditions())) is differ


def test_what_a_source_does_not_tell_is_no_disagreement() -> None:
    assert (
        disagreements(
            [*views("mfu", requests=0.5), SourceUtilisation(source=Source.ENGINE)], Conditions()
        )
        == ()
    )


@pytest.mark.parametrize(
    ("sign", "figure", "higher", "lower", "words"),
    [
        ("drafts", "mfu", "engine", "requests", "drafted"),
        ("preempted", "mfu", "hardware", "requests", "preempted"),
        ("unseen", "mbu", "engine", "requests", "without a row"),
        ("long_prompts", "mfu", "engine", "requests", "later tokens"),
        ("experts", "mbu", "engine", "requests", "experts"),
        ("replicas", "mfu", "requests", "engine", "data-parallel"),
        ("quantised", "mbu", "requests", "engine", "quantised"),
        ("slow_clock", "mfu", "requests", "hardware", "clock"),
        ("still_counters", "mfu", "requests", "hardware", "stand still"),
    ],
)
def test_what_was_seen_in_the_minute_is_the_likely_cause(
    sign: str, figure: str, higher: str, lower: str, words: str
) -> None:
    told = views(figure, **{higher: 0.6, lower: 0.3})
    (without,) = disagreements(told, Conditions())
    (found,) = disagreements(told, Conditions(**{sign: True}))
    assert words in found.causes[0]
    assert found.cause != without.cause
    assert not any(words in cause for cause in without.causes)


def test_an_engine_that_counts_the_whole_square_of_long_prompts_is_told_from_our_count() -> None:
    rows = [row._replace(input_tokens=32_000) for row in PROMPTS[:30]]
    # Per prompt: 13.96 GFLOP a token, and scores of the whole square.
    square = 32_000 * 13.96e9 + 4 * 32 * 128 * 32 * 32_000.0**2
    readings = busy_readings(
        output=30, steps=30, input=960_000, cached=0, flops=30 * square, read=1.0, written=0
    )
    told = minute_efficiency(seen(readings), rows, LLAMA_ON_H100)
    causes = [found.causes[0] for found in told.disagreements if found.figure == "mfu"]
    assert len(causes) == 1
    assert "later tokens" in causes[0]


def test_requests_that_nobody_saw_are_the_cause_when_the_engine_counted_more_tokens() -> None:
    readings = busy_readings(output=240, input=960_000, cached=0, flops=2 * 7.2e15, steps=240)
    told = minute_efficiency(seen(readings), PROMPTS, LLAMA_ON_H100)
    (found,) = [found for found in told.disagreements if found.figure == "mfu"]
    assert "without a row" in found.causes[0]


def test_counters_of_a_gpu_that_stand_still_are_named() -> None:
    told = minute_efficiency(seen(PROMPT_READINGS), PROMPTS, LLAMA_ON_H100, [gpu(30.0, tensor=0.0)])
    (found,) = told.disagreements
    assert found.times is None
    assert "stand still" in found.causes[0]


def test_preemptions_that_the_engine_counted_are_the_likely_cause() -> None:
    readings = busy_readings(output=120, input=480_000, cached=0, steps=120, preemptions=12)
    told = minute_efficiency(seen(readings), PROMPTS, LLAMA_ON_H100, [gpu(30.0, tensor=0.5)])
    (found,) = told.disagreements
    assert "preempted" in found.causes[0]


def test_a_clock_that_was_held_down_is_the_likely_cause() -> None:
    slow = gpu(30.0, clock=500e6, tensor=0.2)
    told = minute_efficiency(seen(PROMPT_READINGS), PROMPTS, LLAMA_ON_H100, [slow])
    (found,) = told.disagreements
    assert "clock" in found.causes[0]


@pytest.mark.parametrize(("times", "differ"), [(1.2, False), (1.3, True), (0.7, True)])
def test_figures_that_agree_are_left_in_peace(times: float, differ: bool) -> None:
    """Our own count of these prompts is 60 TFLOP each."""
    counted = {"output": 120, "steps": 120, "input": 480_000, "cached": 0}
    readings = busy_readings(**counted, flops=times * 120 * 60.0e12)
    told = minute_efficiency(seen(readings), PROMPTS, LLAMA_ON_H100)
    assert told.engine.mfu == pytest.approx((told.requests.mfu or 0) * times, rel=0.02)
    assert bool(told.disagreements) is differ


def test_requests_of_a_gap_are_not_compared_with_what_is_told_of_all_of_it() -> None:
    """They are at work for a third of the minute, and of the rest nobody knows."""
    prompts = [row for row in PROMPTS if row.started_at < 20]
    gap = [
        reading(at, running=1.0, output=at, steps=at, input=80_000 * at, flops=at * 40 * 1e12)
        for at in (-60.0, 120.0)
    ]
    told = minute_efficiency(seen(gap), prompts, LLAMA_ON_H100, [gpu(30.0, tensor=0.9)])
    assert (told.requests.mfu or 0) > 2 * (told.engine.mfu or 0) > 0
    (only,) = told.disagreements
    assert (only.higher, only.lower) == (Source.HARDWARE, Source.ENGINE)
