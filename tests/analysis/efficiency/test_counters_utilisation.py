"""MFU and MBU by an engine's token counters alone."""

from dataclasses import replace

import pytest

from agent.analysis.efficiency.window_efficiency import window_efficiency
from agent.analysis.efficiency.work import Serving
from agent.catalog.engine_facts import FIRST_TOKENS, INPUT_TOKENS, REQUESTS_RUNNING
from agent.records.engine import EngineSample
from agent.records.gpu import Facts
from tests.analysis.cost.engine_days import (
    LLAMA_ON_H100,
    busy_samples,
    engine_sample,
    minute_row,
    request,
)
from tests.analysis.efficiency.test_minute_efficiency import efficiency_of, minute


def counters_of(
    samples: list[EngineSample], serving: Serving = LLAMA_ON_H100
) -> tuple[float | None, float | None]:
    return efficiency_of(samples, [], serving).counters


def test_counters_alone_say_what_requests_of_one_length_say() -> None:
    """120 requests with 1,000 new tokens, 500 cached ones and 50 output tokens, in 600 steps."""
    rows = [
        request(
            *(number, number * 0.4),
            input_tokens=1500,
            cached_tokens=500,
            output_tokens=50,
        )
        for number in range(120)
    ]
    counts = {"input": 180_000, "cached": 60_000, "output": 6000, "first": 120, "steps": 600}
    samples = busy_samples(**counts)
    by_rows = efficiency_of(samples, rows).requests
    mfu, mbu = counters_of(samples)
    assert mfu == pytest.approx(by_rows.mfu, rel=0.01)
    assert mbu == pytest.approx(by_rows.mbu, rel=0.1)


def test_by_counters_an_idle_engine_has_a_utilisation_of_zero() -> None:
    still = engine_sample(0.0, running=0.0, input=7.0, output=7.0, first=1.0)
    assert counters_of([replace(still, at=float(at)) for at in range(0, 61, 5)]) == (0.0, 0.0)


@pytest.mark.parametrize(
    "counts",
    [
        {"output": 600.0, "input": 0.0, "first": 0.0},
        {"output": 600.0},
        {"output": 600.0, "input": 1000.0},
        {"output": 600.0, "input": 0.0, "cached": 0.0, "first": 0.0, "finished": 5.0},
    ],
    ids=["all began before", "no prompts counted", "no requests counted", "requests only end"],
)
def test_without_lengths_counters_say_nothing(counts: dict[str, float]) -> None:
    assert counters_of(busy_samples(**counts)) == (None, None)


def test_without_a_row_a_busy_window_has_no_utilisation_by_requests() -> None:
    busy = minute_row(busy_samples(input=60_000, cached=0, output=600, first=60, steps=60), ())
    idle = minute_row(minute(0.0), (), LLAMA_ON_H100)
    found = window_efficiency([idle, replace(busy, peak_flops_per_s=1e15, counters_mfu=0.3)])
    assert found is not None
    assert (found.mfu, found.counters[0]) == (None, 0.3)


def test_in_a_burst_that_drains_output_is_shared_by_all_that_run() -> None:
    """One request begins while 60 others, which began before, give 90,000 tokens."""
    counts = {"input": 1000.0, "cached": 0.0, "output": 90_000.0, "first": 1.0, "steps": 1500.0}
    alone = busy_samples(**counts)
    together = [
        replace(each, facts={**each.facts, (REQUESTS_RUNNING.name, ()): 60.0}) for each in alone
    ]
    _, mbu = counters_of(together)
    _, steady = counters_of([replace_first(each, 60.0, 60_000.0) for each in together])
    assert mbu == pytest.approx(steady, rel=0.3)


def replace_first(sample: EngineSample, first: float, prompt_tokens: float) -> EngineSample:
    """The same with as many requests begun by the minute's end, and their prompts."""
    share = sample.at / 60
    counts: Facts = {
        (FIRST_TOKENS, ()): first * share,
        (INPUT_TOKENS.name, ()): prompt_tokens * share,
    }
    return replace(sample, facts={**sample.facts, **counts})


def test_minutes_without_a_row_do_not_lower_the_use_by_requests() -> None:
    rows = [
        request(number, number * 0.4, input_tokens=1500, output_tokens=50) for number in range(120)
    ]
    counts = {"input": 180_000, "cached": 0, "output": 6000, "first": 120, "steps": 600}
    traced = minute_row(busy_samples(**counts), rows, LLAMA_ON_H100)
    plain = minute_row(
        busy_samples(input=60_000, cached=0, output=2000, first=60, steps=60), (), LLAMA_ON_H100
    )
    alone, both = window_efficiency([traced]), window_efficiency([traced, *5 * [plain]])
    assert alone is not None
    assert both is not None
    assert both.mfu == alone.mfu
