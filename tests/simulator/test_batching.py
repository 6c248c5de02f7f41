"""The batch: queueing, prefill, decode and preemption."""

import math
from dataclasses import astuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.simulator.batching import Batch, Step
from agent.simulator.scenario import KvCache, Scenario
from tests.simulator.kit import PLAIN, engine_request, finished, numbered_requests, steps

IDLE_DECODE_S = 0.011  # PLAIN's base_s and one per_running_s


def _changed(**changes: object) -> Scenario:
    return Scenario.model_validate({**PLAIN.model_dump(), **changes})


def test_a_lone_request_is_prefilled_at_once_and_then_decoded_token_by_token() -> None:
    request = engine_request(prompt_tokens=200, output_tokens=4, arrived_s=1.0)
    (done,) = finished(steps(Batch(PLAIN, [request])))
    assert done.queue_s == 0
    assert done.prefill_s == pytest.approx(0.2)
    assert done.ttft_s == pytest.approx(0.2)
    assert done.decode_s == pytest.approx(3 * IDLE_DECODE_S)
    assert done.inference_s == done.e2e_s == pytest.approx(0.2 + 3 * IDLE_DECODE_S)
    assert done.tpot_s == pytest.approx(IDLE_DECODE_S)


def test_a_short_prompt_takes_no_less_than_the_floor() -> None:
    (done,) = finished(steps(Batch(PLAIN, [engine_request(prompt_tokens=1, output_tokens=1)])))
    assert done.e2e_s == pytest.approx(0.05)
    assert done.tpot_s == 0


def test_a_prompt_over_the_token_budget_is_prefilled_in_chunks() -> None:
    run = list(steps(Batch(PLAIN, [engine_request(prompt_tokens=700, output_tokens=1)])))
    assert [len(step.tokens) for step in run] == [0, 1]
    (done,) = finished(run)
    assert done.prefill_s == pytest.approx(0.7)


def test_tokens_are_slower_in_a_larger_batch() -> None:
    run = list(
        steps(Batch(PLAIN, [engine_request(prompt_tokens=1, output_tokens=3) for _ in range(8)]))
    )
    assert [len(step.tokens) for step in run] == [8, 8, 8]
    for token in run[2].tokens:
        assert token.waited_s == pytest.approx(0.01 + 8 * 0.001)


def test_prompts_share_the_token_budget_of_a_step() -> None:
    first, second = engine_request(300, 1), engine_request(300, 1)
    run = list(steps(Batch(PLAIN, [first, second])))
    assert [[token.request for token in step.tokens] for step in run] == [[first], [second]]
    # 400 tokens in the first step, the other 200 in the second.
    assert [done.e2e_s for done in finished(run)] == pytest.approx([0.4, 0.6])


def test_a_new_prompt_delays_decoding_requests() -> None:
    early = engine_request(prompt_tokens=100, output_tokens=3)
    late = engine_request(prompt_tokens=300, output_tokens=1, arrived_s=0.01)
    gaps = [
        token.waited_s
        for step in steps(Batch(PLAIN, [early, late]))
        for token in step.tokens
        if token.request is early
    ]
    assert gaps == pytest.approx([0.1, 0.3 + IDLE_DECODE_S, IDLE_DECODE_S])


def test_a_request_waits_in_the_queue_while_the_batch_is_full() -> None:
    one_at_a_time = _changed(max_num_seqs=1)
    first, second, third = (
        engine_request(output_tokens=1, arrived_s=at_s) for at_s in (0.0, 0.01, 0.02)
    )
    run = list(steps(Batch(one_at_a_time, [first, second, third])))
    assert [done.request for done in finished(run)] == [first, second, third]
    assert [done.queue_s for done in finished(run)] == pytest.approx([0.0, 0.09, 0.18])
    assert [(step.load.running, step.load.waiting) for step in run] == [(0, 0), (0, 1), (0, 0)]


def test_a_request_that_arrives_during_a_step_waits_for_the_next() -> None:
    batch = Batch(PLAIN)
    batch.submit(engine_request(output_tokens=1))
    batch.submit(engine_request(output_tokens=1, arrived_s=0.05))
    first = batch.end(batch.begin(0.0))
    assert [done.request.arrived_s for done in first.finished] == [0.0]
    assert batch.next_start_s() == pytest.approx(0.1)
    (second,) = batch.end(batch.begin(batch.next_start_s())).finished
    assert second.queue_s == pytest.approx(0.05)


def test_an_idle_engine_starts_with_the_next_arrival() -> None:
    batch = Batch(PLAIN, [engine_request(arrived_s=3.0)])
    assert batch.next_start_s() == 3.0
    batch.submit(engine_request(arrived_s=2.0))
    assert batch.next_start_s() == 2.0


def test_an_engine_without_requests_has_no_next_step() -> None:
    assert Batch(PLAIN).next_start_s() == float("inf")


def test_kv_usage_is_the_share_of_blocks_in_use() -> None:
    batch = Batch(PLAIN, [engine_request(prompt_tokens=95, output_tokens=8)])
    usages = [step.load.kv_usage for step in steps(batch)]
    # Ten blocks hold the first 100 tokens; the sixth generated token is computed in an eleventh.
    assert usages == pytest.approx([0.10] * 6 + [0.11, 0.0])


def test_the_newest_request_is_preempted_when_the_kv_cache_is_full() -> None:
    # Together they start with 96 of 100 blocks and would need 108.
    old = engine_request(prompt_tokens=480, output_tokens=60)
    new = engine_request(prompt_tokens=480, output_tokens=60, arrived_s=0.01)
    run = list(steps(Batch(PLAIN, [old, new])))
    assert [done.request for done in finished(run)] == [old, new]
    assert [done.preemptions for done in finished(run)] == [0, 1]
    assert sum(step.preemptions for step in run) == 1
    assert sum(len(step.tokens) for step in run) == 120
    assert [request for step in run for request in step.admitted] == [old, new]
    # It prefills its prompt and its generated tokens again.
    waits_s = [token.waited_s for step in run for token in step.tokens if token.request is new]
    assert max(waits_s[1:]) > 0.48


def test_an_aborted_request_frees_its_blocks_and_never_finishes() -> None:
    batch = Batch(PLAIN)
    running, waiting = engine_request(), engine_request(arrived_s=0.01)
    batch.submit(running)
    batch.submit(waiting)
    work = batch.begin(0.0)
    assert batch.abort(running)
    assert batch.abort(waiting)
    assert not batch.abort(running)
    step = batch.end(work)
    assert (step.tokens, step.finished) == ((), ())
    assert (step.load.running, step.load.waiting, step.load.kv_usage) == (0, 0, 0.0)


def test_a_request_whose_client_leaves_never_finishes() -> None:
    run = list(steps(Batch(PLAIN, [engine_request(output_tokens=10, leaves_after_tokens=4)])))
    assert sum(len(step.tokens) for step in run) == 4
    assert finished(run) == []
    assert run[-1].load.kv_usage == 0


def _timeline(scenario: Scenario) -> list[tuple[object, ...]]:
    run = steps(Batch(scenario, numbered_requests(scenario)), until_s=30.0)
    return [astuple(done) for done in finished(run)]


def test_the_same_seed_gives_the_same_latencies() -> None:
    again = _timeline(PLAIN)
    assert len(again) > 50
    assert _timeline(PLAIN) == again
    assert _timeline(_changed(seed=8)) != again


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rate=st.floats(1, 60),
    max_num_seqs=st.integers(1, 30),
    blocks=st.integers(100, 400),
    abort_ratio=st.floats(0, 1),
)
def test_times_never_decrease_and_all_blocks_are_freed(
    seed: int, rate: float, max_num_seqs: int, blocks: int, abort_ratio: float
) -> None:
    scenario = PLAIN.model_copy(
        update={
            "seed": seed,
            "arrival_rate": rate,
            "max_num_seqs": max_num_seqs,
            "kv_cache": KvCache(blocks=blocks, block_tokens=10),
            "abort_ratio": abort_ratio,
        }
    )
    requests = [request for request, _ in zip(numbered_requests(scenario), range(60), strict=False)]
    run = list(steps(Batch(scenario, requests)))
    stayed = [request for request in requests if request.leaves_after_tokens is None]
    assert {done.request for done in finished(run)} == set(stayed)
    _check_times(run)
    assert all(0 <= step.load.kv_usage <= 1 for step in run)
    assert all(step.load.running <= max_num_seqs for step in run)
    assert (run[-1].load.running, run[-1].load.waiting, run[-1].load.kv_usage) == (0, 0, 0.0)
    tokens = sum(request.leaves_after_tokens or request.output_tokens for request in requests)
    assert sum(len(step.tokens) for step in run) == tokens


def _check_times(run: list[Step]) -> None:
    for done in finished(run):
        arrived_s = done.request.arrived_s
        assert arrived_s <= done.scheduled_s < done.first_token_s <= done.last_token_s
        waits_s = [
            token.waited_s for step in run for token in step.tokens if token.request is done.request
        ]
        assert min(waits_s) > 0
        assert sum(waits_s) == pytest.approx(done.e2e_s)


def test_equal_steps_at_once_give_what_single_steps_give() -> None:
    # Little KV cache, so that requests wait, are preempted and start over.
    scenario = _changed(kv_cache={"blocks": 110, "block_tokens": 10}, arrival_rate=4.0)
    single = list(steps(Batch(scenario, numbered_requests(scenario)), until_s=200.0))
    batch = Batch(scenario, numbered_requests(scenario))
    joined: list[Step] = []
    while (start_s := batch.next_start_s()) <= 200.0:
        joined.append(batch.run(start_s, math.inf))
    assert len(joined) < 0.6 * len(single)
    assert sum(step.preemptions for step in single) > 0
    expected, found = finished(single), finished(joined)
    assert [each.request.request_id for each in expected] == [
        each.request.request_id for each in found[: len(expected)]
    ]
    for one, other in zip(expected, found, strict=False):
        assert one.queue_s == pytest.approx(other.queue_s)
        assert one.ttft_s == pytest.approx(other.ttft_s)
        assert one.e2e_s == pytest.approx(other.e2e_s)
        assert one.preemptions == other.preemptions
        assert sum(count for _, count in other.waits) == other.request.output_tokens - 1
        waited_s = sum(wait_s * count for wait_s, count in other.waits)
        assert waited_s == pytest.approx(other.decode_s)
