"""The cost of a minute, split among its requests."""

from collections.abc import Sequence
from dataclasses import replace
from math import fsum
from typing import Any

import pytest

from agent.analysis.cost.bill import CostRatios, spending
from agent.analysis.cost.weights import Method
from agent.analysis.efficiency.request_activity import TimeRange
from agent.analysis.efficiency.work import Role, Serving
from agent.catalog import engine_facts as fact
from agent.records.minute import MinuteRow
from agent.records.request import Status
from tests.analysis.cost.engine_days import (
    LLAMA_ON_H100,
    MINUTE,
    UNKNOWN,
    busy_samples,
    cost,
    engine_sample,
    key,
    minute_row,
    request,
    samples_of,
    whole,
    work,
)
from tests.analysis.cost.stepped_engine import H100, Job, SteppedEngine

KEY_1 = (f"{1:032x}", f"{1:016x}")
KEY_2 = (f"{2:032x}", f"{2:016x}")
# 5 s at work.
ONE = [request(1, 10.0)]


def test_the_cost_of_a_busy_minute_goes_to_its_request_and_of_an_idle_one_to_none() -> None:
    long = request(1, 0.0, decode_s=59.0)._replace(ended_at=60.0)
    found = cost(samples_of(long), [long], serving=LLAMA_ON_H100)
    assert found.requests == {KEY_1: pytest.approx(60)}
    outside = (found.cost.idle, found.cost.unknown, found.cost.unseen)
    assert outside == pytest.approx((0, 0, 0), abs=1e-9)
    still = cost([engine_sample(at, running=0.0, output=9.0) for at in range(0, 61, 10)])
    assert (still.cost.idle, still.requests) == (60, {})


def test_a_request_without_engine_samples_has_a_cost() -> None:
    found = cost([], ONE, serving=Serving(model=LLAMA_ON_H100.model))
    assert found.requests == {KEY_1: pytest.approx(5)}
    assert found.cost.unknown == pytest.approx(55)
    # Without known peaks tokens are the weights.
    assert found.method is Method.TOKENS


def test_counted_tokens_without_a_row_are_unseen_until_a_late_row_gets_them() -> None:
    second = request(2, 10.0)
    samples = samples_of(*ONE, second)
    early, late = cost(samples, ONE), cost(samples, [*ONE, second])
    assert early.cost.unseen == pytest.approx(2.5, rel=0.1)
    assert early.requests[KEY_1] == pytest.approx(2.5, rel=0.1)
    assert (early.cost.aborted, early.cost.idle) == (0, 55)
    assert late.cost.unseen == pytest.approx(0, abs=1e-9)
    assert late.requests == {KEY_1: pytest.approx(2.5), KEY_2: pytest.approx(2.5)}


@pytest.mark.parametrize("ends", [{"output": 21, "input": 100}, {"output": 0, "steps": 0}])
def test_busy_time_without_any_row_is_unseen_and_without_token_counts_unknown(
    ends: dict[str, float],
) -> None:
    assert cost(busy_samples(**ends)).cost.unseen == pytest.approx(60)
    without_tokens = request(1, 10.0, input_tokens=None, output_tokens=None)
    assert cost(busy_samples(steps=10.0), [without_tokens]).cost.unknown == pytest.approx(60)


@pytest.mark.parametrize(
    "given",
    [
        *({"status": each} for each in (Status.CANCELLED, Status.TIMEOUT, Status.ERROR)),
        {"finish_reason": "abort"},
    ],
)
def test_a_failed_request_costs_like_any_other_and_is_aborted(given: dict[str, Any]) -> None:
    rows = [*ONE, request(2, 20.0, **given)]
    found = cost(samples_of(*rows), rows)
    assert found.requests == {KEY_1: pytest.approx(5), KEY_2: pytest.approx(5)}
    assert found.cost.aborted == found.requests[KEY_2]
    assert whole(found) == pytest.approx(60)


def test_a_request_outside_the_minute_has_no_cost() -> None:
    found = cost(samples_of(*ONE), [*ONE, request(2, 61.0), request(3, -9.0)])
    assert set(found.requests) == {KEY_1}


def test_a_prompt_that_takes_minutes_is_not_unseen_when_it_is_counted() -> None:
    prompt = request(1, -50.0, prefill_s=101.0, input_tokens=100_000, output_tokens=1)
    prompt = prompt._replace(ended_at=51.0)
    found = cost(samples_of(prompt), [prompt])
    assert (found.cost.unseen, found.requests[KEY_1]) == pytest.approx((0, 51))


def test_prompt_tokens_that_were_not_computed_are_cached() -> None:
    def by_source(at: float) -> dict[tuple[str, tuple[str, ...]], float]:
        parts = {"local_compute": 1.0, "local_cache_hit": 2.0, "external_kv_transfer": 1.0}
        sources = {
            key(fact.INPUT_TOKENS_BY_SOURCE, name): part * at for name, part in parts.items()
        }
        return sources | {key(fact.INPUT_TOKENS): 4 * at}

    samples = [
        replace(sample, facts={**sample.facts, **by_source(sample.at)})
        for sample in busy_samples(output=21)
    ]
    row = request(1, 10.0, input_tokens=1000, cached_tokens=None)
    assert work(samples, [row]).cached_tokens == 750


@pytest.mark.parametrize(("role", "phase"), [(Role.PREFILL, "prefill"), (Role.DECODE, "decode")])
def test_an_engine_of_one_phase_has_only_the_cost_of_that_phase(role: Role, phase: str) -> None:
    serving = Serving(model=LLAMA_ON_H100.model, gpu=LLAMA_ON_H100.gpu, role=role)
    # Prompt tokens counted by a decode engine are not its work.
    counted = request(1, 10.0, input_tokens=5000) if role is Role.DECODE else ONE[0]
    found = cost(samples_of(counted), ONE, serving=serving)
    of_phase = {"prefill": found.cost.prefill, "decode": found.cost.decode}
    assert of_phase[phase] == pytest.approx(5)
    assert found.cost.unseen == pytest.approx(0, abs=1e-9)


def test_two_rows_with_one_key_are_one_request() -> None:
    once, twice = cost(busy_samples(), ONE), cost(busy_samples(), ONE * 2)
    assert twice.requests == {KEY_1: pytest.approx(once.requests[KEY_1])}


def test_cached_tokens_have_no_weight_with_the_token_method() -> None:
    cold = request(1, 10.0, input_tokens=100, cached_tokens=0, output_tokens=1)
    warm = request(2, 10.0, input_tokens=1000, cached_tokens=900, output_tokens=1)
    found = cost(busy_samples(), [cold, warm])
    assert found.requests[KEY_1] == pytest.approx(found.requests[KEY_2])
    assert found.cost.cached == 0
    assert work(busy_samples(), [cold, warm]).cached_tokens == 900


# Who pays for a second of the GPUs: worked examples, and ratios over a window


def test_cached_tokens_cost_only_their_attention() -> None:
    rows = [request(1, 5.0, input_tokens=8000, cached_tokens=7000, output_tokens=1)]
    found = cost(busy_samples(output=1, input=8000, cached=7000), rows, serving=LLAMA_ON_H100)
    assert 0 < found.cost.cached / 7000 < found.cost.computed / 1000 / 20


def test_the_invoice_of_the_cost_page() -> None:
    """docs/cost.md: a GPU at $3.60 an hour, a tenth of a cent a second."""
    lasted = ((0.0, 30.0), (10.0, 30.0), (30.0, 45.0))
    tokens = ((1000, 0, 251), (1000, 600, 101), (400, 0, 51))
    rows = [
        request(
            number,
            begun,
            decode_s=ended - begun - 1.0,
            input_tokens=prompt,
            cached_tokens=cached,
            output_tokens=output,
        )._replace(ended_at=ended)
        for number, ((begun, ended), (prompt, cached, output)) in enumerate(
            zip(lasted, tokens, strict=True)
        )
    ]
    rows[2] = rows[2]._replace(status=Status.CANCELLED)
    # In the last 5 s the engine counts twice the tokens of the third request.
    gone = request(9, 40.01, prefill_s=0.0, input_tokens=0, output_tokens=19)
    gone = gone._replace(ended_at=45.0)
    samples = samples_of(*rows, gone)
    found = cost(samples, rows)
    assert found.method is Method.TOKENS
    cents = [
        0.1 * dollars for dollars in (*found.requests.values(), found.cost.unseen, found.cost.idle)
    ]
    assert cents == pytest.approx([1.999, 1.001, 1.243, 0.257, 1.5], abs=0.0006)
    assert found.cost.aborted == list(found.requests.values())[2]


both_methods = pytest.mark.parametrize("serving", [LLAMA_ON_H100, UNKNOWN], ids=["roof", "tokens"])


def jobs(
    first: int, count: int, at: float, prompt: int, output: int, every_s: float = 0.0
) -> list[Job]:
    return [
        Job(number=first + n, at=at + every_s * n, prompt=prompt, output=output)
        for n in range(count)
    ]


def served(*groups: Sequence[Job], late_s: float = 0.0) -> SteppedEngine:
    """The engine after a minute in which all these requests ended."""
    everyone = [job for group in groups for job in group]
    engine = SteppedEngine(H100, everyone, late_s=late_s).run(75.0)
    assert len(engine.ended) == len(everyone)
    assert max(job.ended_at for job in everyone) < MINUTE.until
    return engine


def charged_s(engine: SteppedEngine, group: Sequence[Job], serving: Serving) -> float:
    """Seconds that these requests are charged in the minute."""
    rows = [job.row() for job in engine.ended if job.has_row]
    found = cost(engine.samples, rows, MINUTE, serving)
    return fsum(found.requests[job.key] for job in group)


def true_s(group: Sequence[Job]) -> float:
    return fsum(job.gpu_s for job in group)


@both_methods
def test_a_lone_stream_pays_its_time_and_a_burst_after_it_its_own(serving: Serving) -> None:
    # The figures of a minute whose work is pooled are 25 s and 29 s.
    lone, burst = jobs(1, 1, 0.5, 100, 11_500), jobs(2, 100, 57.0, 400, 100)
    engine = served(lone, burst)
    assert true_s(lone) == pytest.approx(54.2, abs=1.5)
    assert true_s(burst) == pytest.approx(1.15, abs=0.1)
    assert charged_s(engine, lone, serving) == pytest.approx(true_s(lone), rel=0.02)
    assert charged_s(engine, burst, serving) == pytest.approx(true_s(burst), rel=0.02)


def cached_but_for_a_token() -> list[Job]:
    return [Job(number=100 + n, at=10.0 + n, prompt=8192, cached=8191, output=1) for n in range(40)]


@both_methods
def test_prompts_share_their_steps_with_a_stream(serving: Serving) -> None:
    """A prompt that is cached but for a token computes as many in its step as the stream."""
    stream = jobs(1, 1, 0.2, 100, 12_000)
    cached = cached_but_for_a_token()
    engine = served(stream, cached)
    # They are a fifth of a second at work.
    assert true_s(cached) == pytest.approx(0.102, abs=0.001)
    assert charged_s(engine, cached, serving) == pytest.approx(true_s(cached), rel=0.1)
    assert charged_s(engine, stream, serving) == pytest.approx(true_s(stream), rel=0.01)


@both_methods
@pytest.mark.parametrize(("at", "late_s"), [(5.002, 0.02), (6.51, 2.0)], ids=["quick", "slow"])
def test_a_request_that_begins_while_a_sample_is_read_leaves_the_time_before_idle(
    serving: Serving, at: float, late_s: float
) -> None:
    short = jobs(1, 1, at, 100, 4)
    engine = served(short, late_s=late_s)
    assert engine.samples[1].fact("llm_engine_requests_running") == 1
    rows = [job.row() for job in short]
    found = cost(engine.samples, rows, MINUTE, serving)
    assert found.requests[short[0].key] == pytest.approx(short[0].gpu_s)
    assert found.cost.idle == pytest.approx(60.0 - short[0].gpu_s)


@both_methods
def test_short_requests_without_a_row_between_two_samples_leave_the_rest_idle(
    serving: Serving,
) -> None:
    stream = jobs(1, 1, 0.2, 500, 3000)
    gone = [
        Job(number=200 + n, at=22.5 + 5 * n, prompt=500, output=5, has_row=False) for n in range(6)
    ]
    engine = served(stream, gone)
    found = cost(engine.samples, [stream[0].row()], MINUTE, serving)
    # As busy intervals they are 30 s.
    assert true_s(gone) == pytest.approx(0.151, abs=0.001)
    assert true_s(gone) < found.cost.unseen < 1.5 * true_s(gone)
    assert found.requests[stream[0].key] == pytest.approx(true_s(stream), rel=0.02)


@both_methods
@pytest.mark.parametrize("at", [5.002, 60.002], ids=["in the minute", "at its end"])
def test_a_request_that_begins_and_ends_while_a_sample_is_read_pays_its_time(
    serving: Serving, at: float
) -> None:
    """The sample has counted it, and the next one shows nothing new."""
    short = jobs(1, 1, at, 100, 4)
    engine = SteppedEngine(H100, short, late_s=0.3).run(75.0)
    after = next(sample for sample in engine.samples if sample.at > at)
    before = engine.samples[engine.samples.index(after) - 1]
    assert before.fact("llm_engine_output_tokens") == after.fact("llm_engine_output_tokens") == 4
    time = TimeRange(before.at - 5.0, before.at + 10.0)
    found = cost(engine.samples, [short[0].row()], time, serving)
    assert found.requests[short[0].key] == pytest.approx(short[0].gpu_s)
    assert found.cost.idle == pytest.approx(15.0 - short[0].gpu_s)


def unseen_beside_cached() -> tuple[SteppedEngine, list[Job]]:
    """An engine with 40 prompts that are cached but for a token, and 40 that have no row."""
    gone = [
        Job(number=200 + n, at=10.5 + n, prompt=500, output=1, has_row=False) for n in range(40)
    ]
    return served(jobs(1, 1, 0.2, 100, 12_500), cached_but_for_a_token(), gone), gone


# One request of 100 input and 21 output tokens, busy for 5 of 60 s; a sample each 5 s.
SAMPLES = [
    engine_sample(
        5.0 * step,
        running=0.0,
        output=21.0 if step > 2 else 0.0,
        input=100.0 if step > 2 else 0.0,
        cached=0.0,
    )
    for step in range(25)
]
FIRST, SECOND = TimeRange(0.0, 60.0), TimeRange(60.0, 120.0)


def minutes(**of_first: Any) -> tuple[MinuteRow, MinuteRow]:
    """Two minutes; the request ended in the first."""
    first = minute_row(SAMPLES, ONE, time=FIRST, **of_first)
    return first, minute_row(SAMPLES, ONE, time=SECOND, requests=0)


def ratios(*rows: MinuteRow) -> CostRatios:
    found = spending(rows).ratios
    assert found is not None
    return found


def test_active_prices_use_busy_time_and_overhead_scales_them_to_the_bill() -> None:
    found = ratios(*minutes(good_tokens=10))
    assert (found.per_request, found.overhead) == pytest.approx((5, 24))
    assert found.allocated_per_request == pytest.approx(120)
    in_and_out = (found.per_million_input or 0) * 100 + (found.per_million_output or 0) * 21
    assert in_and_out == pytest.approx(5e6)
    assert found.allocated_per_million_good_tokens == pytest.approx(120 / 10 * 1e6)


def test_a_price_per_zero_tokens_is_unknown() -> None:
    found = ratios(minute_row(SAMPLES, time=SECOND))
    assert (found.per_million_output, found.per_million_input, found.per_request) == (None,) * 3
    assert (found.overhead, found.allocated_per_million_good_tokens) == (None, None)


def test_a_window_has_the_methods_of_all_its_minutes() -> None:
    known = minute_row(SAMPLES, ONE, LLAMA_ON_H100, FIRST)
    assert spending([known, minutes()[1]]).methods == {Method.ROOFLINE, Method.TOKENS}
