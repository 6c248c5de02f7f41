"""Who pays for the GPU's time, held against an engine whose every step is known."""

from collections.abc import Sequence
from math import fsum

import pytest

from agent.analysis.efficiency.serving import Serving
from agent.analysis.efficiency.time_range import TimeRange
from tests.analysis.cost.engine_days import LLAMA_ON_H100, MINUTE, UNKNOWN, cost
from tests.analysis.cost.stepped_engine import H100, Job, SteppedEngine

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


@both_methods
def test_half_a_minute_alone_costs_thirty_times_half_a_minute_among_many(serving: Serving) -> None:
    lone, others = jobs(1, 1, 0.5, 100, 9_300), jobs(2, 31, 30.0, 100, 3500)
    engine = served(lone, others)
    assert true_s(lone) == pytest.approx(30.0, abs=2)
    assert charged_s(engine, lone, serving) == pytest.approx(true_s(lone), rel=0.1)
    assert charged_s(engine, others, serving) == pytest.approx(true_s(others), rel=0.1)


@both_methods
def test_tiny_prompts_pay_their_steps_also_in_the_minute_of_a_long_one(serving: Serving) -> None:
    tiny, long = jobs(1, 400, 1.0, 20, 1, every_s=0.1), jobs(500, 1, 45.0, 32_000, 1)
    engine = served(tiny, long)
    assert true_s(tiny) == pytest.approx(1.79, abs=0.01)
    assert charged_s(engine, tiny, serving) == pytest.approx(true_s(tiny), rel=0.02)
    assert charged_s(engine, long, serving) == pytest.approx(true_s(long), rel=0.02)


@both_methods
def test_prompts_share_their_steps_with_a_stream(serving: Serving) -> None:
    """A prompt that is cached but for a token computes as many in its step as the stream."""
    stream = jobs(1, 1, 0.2, 100, 12_000)
    cached = [
        Job(number=100 + n, at=10.0 + n, prompt=8192, cached=8191, output=1) for n in range(40)
    ]
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
def test_a_request_that_begins_while_the_last_sample_is_read_leaves_the_minute_idle(
    serving: Serving,
) -> None:
    short = jobs(1, 1, 60.002, 100, 4)
    engine = SteppedEngine(H100, short, late_s=0.02).run(75.0)
    found = cost(engine.samples, [short[0].row()], MINUTE, serving)
    assert found.cost.idle == 60.0
    after = cost(engine.samples, [short[0].row()], TimeRange(60.0, 70.0), serving)
    assert after.requests[short[0].key] == pytest.approx(short[0].gpu_s)


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
    stream = jobs(1, 1, 0.2, 100, 12_500)
    cached = [
        Job(number=100 + n, at=10.0 + n, prompt=8192, cached=8191, output=1) for n in range(40)
    ]
    gone = [
        Job(number=200 + n, at=10.5 + n, prompt=500, output=1, has_row=False) for n in range(40)
    ]
    return served(stream, cached, gone), gone


@both_methods
def test_unseen_prompts_beside_cached_ones_cost_what_they_take(serving: Serving) -> None:
    # A cached prompt reads 8,191 tokens to compute one. No other prompt does so.
    engine, gone = unseen_beside_cached()
    rows = [job.row() for job in engine.ended if job.has_row]
    found = cost(engine.samples, rows, MINUTE, serving)
    # Scaled by the rows' bytes for each computed token it is 2 s; with first tokens as decode 0.57;
    # scaled by the seconds of each of the rows' computed tokens 1.2 s.
    assert true_s(gone) == pytest.approx(0.285, abs=0.001)
    assert 0.4 * true_s(gone) < found.cost.unseen < 1.8 * true_s(gone)
