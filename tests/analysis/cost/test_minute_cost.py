"""The cost of a minute, split among its requests."""

from dataclasses import replace

import pytest

from agent.analysis.cost.weights import Method
from agent.analysis.efficiency.request_activity import TimeRange
from agent.analysis.efficiency.work import Role, Serving
from agent.catalog import engine_facts as fact
from agent.records.request import Status
from tests.analysis.cost.engine_days import (
    LLAMA_ON_H100,
    busy_samples,
    cost,
    engine_sample,
    key,
    request,
    samples_of,
    whole,
    work,
)

KEY_1 = (f"{1:032x}", f"{1:016x}")
KEY_2 = (f"{2:032x}", f"{2:016x}")
# 5 s at work.
ONE = [request(1, 10.0)]


def test_the_cost_of_a_busy_minute_goes_to_its_only_request() -> None:
    long = request(1, 0.0, decode_s=59.0)._replace(ended_at=60.0)
    found = cost(samples_of(long), [long], serving=LLAMA_ON_H100)
    assert found.requests == {KEY_1: pytest.approx(60)}
    assert (found.cost.idle, found.cost.unknown, found.cost.unseen) == pytest.approx(
        (0, 0, 0), abs=1e-9
    )


def test_the_cost_of_an_idle_minute_goes_to_no_request() -> None:
    still = [engine_sample(at, running=0.0, steps=5.0, output=9.0) for at in (0.0, 10.0, 20.0)]
    still += [
        engine_sample(at, running=0.0, steps=5.0, output=9.0) for at in (30.0, 40.0, 50.0, 60.0)
    ]
    found = cost(still)
    assert (found.cost.idle, found.requests) == (60, {})


def test_a_minute_without_samples_is_unknown_and_not_idle() -> None:
    found = cost([])
    assert (found.cost.unknown, found.cost.idle) == (60, 0)


def test_a_request_without_engine_samples_has_a_cost() -> None:
    found = cost([], ONE)
    assert found.requests == {KEY_1: pytest.approx(5)}
    assert found.cost.unknown == pytest.approx(55)


def test_counted_tokens_without_a_row_are_unseen() -> None:
    found = cost(samples_of(*ONE, request(2, 10.0)), ONE)
    assert found.cost.unseen == pytest.approx(2.5, rel=0.1)
    assert found.requests[KEY_1] == pytest.approx(2.5, rel=0.1)
    assert (found.cost.aborted, found.cost.idle) == (0, 55)


def test_a_late_row_gets_the_unseen_cost() -> None:
    second = request(2, 10.0)
    samples = samples_of(*ONE, second)
    early, late = cost(samples, ONE), cost(samples, [*ONE, second])
    assert late.cost.unseen == pytest.approx(0, abs=1e-9)
    assert late.requests == {KEY_1: pytest.approx(2.5), KEY_2: pytest.approx(2.5)}
    assert late.requests[KEY_2] == pytest.approx(early.cost.unseen, rel=0.1)


@pytest.mark.parametrize("ends", [{"output": 21, "input": 100}, {"output": 0, "steps": 0}])
def test_busy_time_without_any_row_is_unseen_and_without_token_counts_unknown(
    ends: dict[str, float],
) -> None:
    assert cost(busy_samples(**ends)).cost.unseen == pytest.approx(60)
    without_tokens = request(1, 10.0, input_tokens=None, output_tokens=None)
    assert cost(busy_samples(steps=10.0), [without_tokens]).cost.unknown == pytest.approx(60)


@pytest.mark.parametrize("status", [Status.CANCELLED, Status.TIMEOUT, Status.ERROR])
def test_a_failed_request_costs_like_any_other_and_is_aborted(status: Status) -> None:
    rows = [*ONE, request(2, 20.0, status=status)]
    found = cost(samples_of(*rows), rows)
    assert found.requests == {KEY_1: pytest.approx(5), KEY_2: pytest.approx(5)}
    assert found.cost.aborted == found.requests[KEY_2]
    assert found.cost.unseen + found.cost.aborted == pytest.approx(5)
    assert whole(found) == pytest.approx(60)


def test_a_request_aborted_by_the_engine_is_aborted_cost() -> None:
    found = cost(samples_of(*ONE), [request(1, 10.0, finish_reason="abort")])
    assert found.cost.aborted == pytest.approx(5)


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
    found = cost(samples_of(*ONE), ONE, serving=serving)
    of_phase = {"prefill": found.cost.prefill, "decode": found.cost.decode}
    assert of_phase[phase] == pytest.approx(5)
    assert found.cost.unseen == pytest.approx(0, abs=1e-9)


def test_without_known_peaks_tokens_are_the_weights() -> None:
    assert cost([], ONE, serving=Serving(model=LLAMA_ON_H100.model)).method is Method.TOKENS


def test_two_rows_with_one_key_are_one_request() -> None:
    once, twice = cost(busy_samples(), ONE), cost(busy_samples(), ONE * 2)
    assert twice.requests == {KEY_1: pytest.approx(once.requests[KEY_1])}


def test_two_parts_of_a_minute_add_up_when_cut_at_a_sample() -> None:
    rows = [request(number, 3.0 * number) for number in range(12)]
    samples = busy_samples(output=12 * 21, input=1200, cached=0, steps=240)
    both = cost(samples, rows)
    one = cost(samples, rows, TimeRange(0.0, 30.0))
    two = cost(samples, rows, TimeRange(30.0, 60.0))
    assert one.cost.idle + two.cost.idle == pytest.approx(both.cost.idle)
    spans = (TimeRange(0.0, 30.0), TimeRange(30.0, 60.0), TimeRange(0.0, 60.0))
    parts = [work(samples, rows, span).output_tokens for span in spans]
    assert parts[0] + parts[1] == pytest.approx(parts[2])
    assert sum(map(whole, (one, two))) == pytest.approx(whole(both))


def test_prompt_tokens_counted_by_a_decode_engine_are_not_its_work() -> None:
    serving = Serving(model=LLAMA_ON_H100.model, gpu=LLAMA_ON_H100.gpu, role=Role.DECODE)
    samples = samples_of(request(1, 10.0, input_tokens=5000))
    assert cost(samples, ONE, serving=serving).cost.unseen == pytest.approx(0, abs=1e-9)


def test_cached_tokens_have_no_weight_with_the_token_method() -> None:
    cold = request(1, 10.0, input_tokens=100, cached_tokens=0, output_tokens=1)
    warm = request(2, 10.0, input_tokens=1000, cached_tokens=900, output_tokens=1)
    found = cost(busy_samples(), [cold, warm])
    assert found.requests[KEY_1] == pytest.approx(found.requests[KEY_2])
    assert found.cost.cached == 0
    assert work(busy_samples(), [cold, warm]).cached_tokens == 900
