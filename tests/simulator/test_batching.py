"""The batch: queueing, prefill, decode and preemption."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.simulator.batching import Batch, Step
from agent.simulator.scenario import KvCache, Scenario
from tests.simulator.kit import PLAIN, engine_request, finished, numbered_requests, steps

IDLE_DECODE_S = 0.011  # PLAIN's base_s and one per_running_s


def _changed(**changes: object) -> Scenario:
    return Scenario.model_validate({**PLAIN.model_dump(), **changes})


@pytest.mark.parametrize(
    ("lengths", "times", "max_num_seqs"),
    [
        # Each request's tokens of prompt and response and its arrival; then its times in the queue,
        # in prefill and in decode.
        ([(200, 4, 1.0)], [(0, 0.2, 3 * IDLE_DECODE_S)], 8),
        ([(1, 1, 0.0)], [(0, 0.05, 0)], 8),
        ([(700, 1, 0.0)], [(0, 0.7, 0)], 8),
        ([(1, 3, 0.0)] * 8, [(0, 0.05, 2 * (0.01 + 8 * 0.001))] * 8, 8),
        # 400 tokens in the first step, the other 200 in the second.
        ([(300, 1, 0.0)] * 2, [(0, 0.4, 0), (0, 0.6, 0)], 8),
        (
            [(100, 3, 0.0), (300, 1, 0.01)],
            [(0, 0.1, 0.3 + 2 * IDLE_DECODE_S), (0.09, 0.3 + IDLE_DECODE_S, 0)],
            8,
        ),
        (
            [(100, 1, 0.0), (100, 1, 0.01), (100, 1, 0.02)],
            [(0, 0.1, 0), (0.09, 0.1, 0), (0.18, 0.1, 0)],
            1,
        ),
    ],
    ids=["alone", "floor", "chunks", "batch", "budget", "delayed by a prompt", "full batch"],
)
def test_times_follow_from_the_lengths_the_batch_and_the_budget_of_a_step(
    lengths: list[tuple[int, int, float]],
    times: list[tuple[float, float, float]],
    max_num_seqs: int,
) -> None:
    requests = [engine_request(*counts, arrived_s=arrived_s) for *counts, arrived_s in lengths]
    run = finished(steps(Batch(_changed(max_num_seqs=max_num_seqs), requests)))
    done = {each.request: each for each in run}
    found = [(done[each].queue_s, done[each].prefill_s, done[each].decode_s) for each in requests]
    assert found == [pytest.approx(expected) for expected in times]
    for each in run:
        assert each.e2e_s == pytest.approx(each.queue_s + each.inference_s)
        assert each.tpot_s == pytest.approx(each.decode_s / max(1, each.request.output_tokens - 1))


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
    running, first, second = (engine_request(arrived_s=at_s) for at_s in (0.0, 0.01, 0.02))
    for request in (running, first, second):
        batch.submit(request)
    work = batch.begin(0.0)
    assert batch.abort(running)
    assert batch.abort(second)
    assert batch.abort(first)
    assert not batch.abort(running)
    step = batch.end(work)
    assert (step.tokens, step.finished) == ((), ())
    assert (step.load.running, step.load.waiting, step.load.kv_usage) == (0, 0, 0.0)


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
