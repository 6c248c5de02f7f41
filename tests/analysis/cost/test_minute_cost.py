"""Whose a minute was."""

from dataclasses import replace

import pytest

from agent.analysis.cost.weights import Method
from agent.analysis.efficiency.serving import Role, Serving
from agent.analysis.efficiency.time_range import TimeRange
from agent.catalog import engine_facts as fact
from agent.records.request import Status
from tests.analysis.cost.engine_days import (
    LLAMA_ON_H100,
    busy_readings,
    cost,
    key,
    prefill,
    reading,
    request,
    whole,
)

KEY_1 = (f"{1:032x}", f"{1:016x}")
KEY_2 = (f"{2:032x}", f"{2:016x}")
ONE = [request(1, 10.0)]
# What the engine counts for one request of 100 tokens in and 21 out.
OF_ONE = {"output": 21.0, "input": 100.0, "cached": 0.0, "steps": 21.0}


def test_a_busy_minute_with_one_request_is_that_request_s() -> None:
    found = cost(busy_readings(**OF_ONE), ONE, serving=LLAMA_ON_H100)
    assert found.requests == {KEY_1: pytest.approx(60)}
    assert (found.idle, found.unknown, found.unseen) == pytest.approx((0, 0, 0), abs=1e-9)


def test_an_idle_minute_is_nobody_s() -> None:
    still = [reading(at, running=0.0, steps=5.0, output=9.0) for at in (0.0, 10.0, 20.0)]
    still += [reading(at, running=0.0, steps=5.0, output=9.0) for at in (30.0, 40.0, 50.0, 60.0)]
    found = cost(still)
    assert (found.idle, found.requests) == (60, {})


def test_a_minute_without_samples_is_unknown_and_not_idle() -> None:
    found = cost([])
    assert (found.unknown, found.idle) == (60, 0)


def test_a_request_seen_while_the_engine_was_not_read_has_a_cost() -> None:
    found = cost([], ONE)
    assert found.requests == {KEY_1: pytest.approx(5)}
    assert found.unknown == pytest.approx(55)


def test_work_that_the_engine_counted_and_no_row_tells_of_is_wasted() -> None:
    found = cost(busy_readings(output=42, input=200, cached=0), ONE)
    assert found.unseen == pytest.approx(30)
    assert found.requests[KEY_1] == pytest.approx(30)
    assert found.aborted == 0


def test_a_row_that_comes_late_takes_over_what_was_unseen() -> None:
    readings = busy_readings(output=42, input=200, cached=0)
    early, late = cost(readings, ONE), cost(readings, [*ONE, request(2, 30.0)])
    assert late.unseen == pytest.approx(0, abs=1e-9)
    assert late.requests[KEY_2] == pytest.approx(early.unseen)
    assert late.requests[KEY_1] == pytest.approx(early.requests[KEY_1])


def test_busy_time_without_any_row_is_unseen() -> None:
    assert cost(busy_readings(**OF_ONE)).unseen == pytest.approx(60)


def test_a_step_that_lasts_longer_than_the_minute_is_unseen_until_its_request_ends() -> None:
    assert cost(busy_readings(output=0, steps=0)).unseen == pytest.approx(60)


def test_busy_time_of_an_engine_that_counts_no_tokens_is_unknown_where_rows_tell_none_either() -> (
    None
):
    silent = request(1, 10.0, input_tokens=None, output_tokens=None)
    assert cost(busy_readings(steps=10.0), [silent]).unknown == pytest.approx(60)


@pytest.mark.parametrize("status", [Status.CANCELLED, Status.TIMEOUT, Status.ERROR])
def test_a_request_that_ended_badly_costs_like_any_other_and_is_wasted(status: Status) -> None:
    rows = [*ONE, request(2, 20.0, status=status)]
    found = cost(busy_readings(output=42, input=200, cached=0), rows)
    assert found.requests[KEY_2] == pytest.approx(found.requests[KEY_1])
    assert found.aborted == found.requests[KEY_2]
    assert found.unseen + found.aborted == pytest.approx(30)
    assert whole(found) == pytest.approx(60)


@pytest.mark.parametrize("status", [Status.CANCELLED, Status.TIMEOUT, Status.THROTTLED])
def test_a_request_that_nobody_saw_begin_costs_nothing(status: Status) -> None:
    waited = request(
        2,
        20.0,
        status=status,
        **dict.fromkeys(("queue_s", "prefill_s", "decode_s", "ttft_s", "output_tokens")),
    )
    found = cost(busy_readings(**OF_ONE), [*ONE, waited])
    assert KEY_2 not in found.requests
    assert found.requests[KEY_1] == pytest.approx(60)


def test_an_aborting_engine_names_its_request_wasted_too() -> None:
    found = cost(busy_readings(**OF_ONE), [request(1, 10.0, finish_reason="abort")])
    assert found.aborted == pytest.approx(60)


def test_work_counts_in_the_minute_in_which_it_was_done() -> None:
    long = request(1, 0.0, prefill_s=0.0, decode_s=120.0, output_tokens=2401)
    short = request(2, 10.0, prefill_s=0.0, decode_s=20.0, output_tokens=1201)
    found = cost(busy_readings(output=2402), [long, short])
    # Of the long one's 2,400 decoded tokens half came in this minute.
    assert found.requests[KEY_1] == pytest.approx(found.requests[KEY_2], rel=0.2)
    assert found.output_tokens == pytest.approx(1201 + 1201)


def test_a_request_outside_the_minute_has_no_part_of_it() -> None:
    found = cost(busy_readings(**OF_ONE), [*ONE, request(2, 61.0), request(3, -9.0)])
    assert set(found.requests) == {KEY_1}


def test_a_prompt_that_takes_minutes_is_not_taken_for_an_unseen_one_when_it_is_counted() -> None:
    prompt = request(1, -50.0, prefill_s=100.0, input_tokens=100_000, output_tokens=1)
    readings = [
        reading(at, running=1.0, input=100_000.0 if at > 50 else 0.0, cached=0.0, output=at // 55)
        for at in (5.0 * step for step in range(13))
    ]
    assert cost(readings, [prompt]).unseen == pytest.approx(0, abs=1e-9)


def test_rows_that_do_not_tell_what_was_cached_have_the_engine_s_share() -> None:
    row = request(1, 10.0, input_tokens=1000, cached_tokens=None)
    found = cost(busy_readings(output=21, input=1000, cached=750), [row])
    assert (found.computed_tokens, found.cached_tokens) == (250, 750)
    assert found.unseen == pytest.approx(0, abs=1e-9)


def test_prompt_tokens_from_any_other_source_than_computation_are_cached() -> None:
    def by_source(at: float) -> dict[tuple[str, tuple[str, ...]], float]:
        told = {"local_compute": 1.0, "local_cache_hit": 2.0, "external_kv_transfer": 1.0}
        sources = {key(fact.INPUT_TOKENS_BY_SOURCE, name): part * at for name, part in told.items()}
        return sources | {key(fact.INPUT_TOKENS): 4 * at}

    readings = [
        replace(sample, facts={**sample.facts, **by_source(sample.at)})
        for sample in busy_readings(output=21)
    ]
    row = request(1, 10.0, input_tokens=1000, cached_tokens=None)
    assert cost(readings, [row]).cached_tokens == 750


@pytest.mark.parametrize(("role", "phase"), [(Role.PREFILL, "prefill"), (Role.DECODE, "decode")])
def test_an_engine_of_one_phase_bears_the_cost_of_that_phase(role: Role, phase: str) -> None:
    serving = Serving(model=LLAMA_ON_H100.model, gpu=LLAMA_ON_H100.gpu, role=role)
    found = cost(busy_readings(**OF_ONE), ONE, serving=serving)
    of_phase = {"prefill": prefill(found), "decode": found.decode}
    assert of_phase[phase] == pytest.approx(60)
    assert found.unseen == pytest.approx(0, abs=1e-9)


def test_a_gpu_without_a_known_peak_leaves_tokens_to_weigh() -> None:
    assert cost([], ONE, serving=Serving(model=LLAMA_ON_H100.model)).method is Method.TOKENS


def test_two_parts_with_one_key_are_one_request() -> None:
    once, twice = cost(busy_readings(), ONE), cost(busy_readings(), ONE * 2)
    assert twice.requests == {KEY_1: pytest.approx(once.requests[KEY_1])}


def test_a_minute_cut_where_it_was_read_has_the_same_parts() -> None:
    rows = [request(number, 3.0 * number) for number in range(12)]
    readings = busy_readings(output=12 * 21, input=1200, cached=0, steps=240)
    both = cost(readings, rows)
    one = cost(readings, rows, TimeRange(0.0, 30.0))
    two = cost(readings, rows, TimeRange(30.0, 60.0))
    assert one.idle + two.idle == pytest.approx(both.idle)
    assert one.output_tokens + two.output_tokens == pytest.approx(both.output_tokens)
    assert sum(map(whole, (one, two))) == pytest.approx(whole(both))


def test_prompts_that_an_engine_of_decode_counts_are_not_its_work() -> None:
    serving = Serving(model=LLAMA_ON_H100.model, gpu=LLAMA_ON_H100.gpu, role=Role.DECODE)
    assert cost(busy_readings(output=21, input=5000), ONE, serving=serving).unseen == 0


def test_cached_tokens_weigh_nothing_where_only_tokens_are_known() -> None:
    cold = request(1, 10.0, input_tokens=100, cached_tokens=0, output_tokens=1)
    warm = request(2, 20.0, input_tokens=1000, cached_tokens=900, output_tokens=1)
    found = cost(busy_readings(), [cold, warm])
    assert found.requests[KEY_1] == found.requests[KEY_2]
    assert (found.cached, found.cached_tokens) == (0, 900)
