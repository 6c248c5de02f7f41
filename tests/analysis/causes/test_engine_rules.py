"""A machine that is crowded, and a prefix cache that lost what it had, as an engine shows them."""

import pytest

from agent.analysis.causes import EngineTimeline, explain
from agent.catalog import engine_facts as fact
from agent.catalog.causes import Cause
from agent.records.engine_step import EngineStep
from agent.records.host import EngineProcess, HostSample, ProcessRole
from tests.analysis.causes.test_explaining import AT, OBJECTIVE, row, sample, usual


def step(ended_at: float, duration_s: float, tokens: int = 0) -> EngineStep:
    """A step of one request that also computed prompt tokens of others."""
    return EngineStep(
        engine="chat-0",
        ended_at=ended_at,
        duration_s=duration_s,
        prefill_tokens=tokens,
        decode_tokens=1,
        running=1,
        waiting_capacity=1,
        waiting_deferred=0,
        kv_usage=0.1,
        preempted=0,
        tokens_of_step=True,
    )


def waiting(timeline: EngineTimeline, since: int, until: int) -> None:
    """A core that asks for work all the time: it waits for processors whenever it does not run."""
    for second in range(since, until):
        core = EngineProcess(
            pid=7,
            started_after_boot_s=1.0,
            role=ProcessRole.CORE,
            name="VLLM::EngineCore",
            state="R",
            cpu_s=0.0,
            cpu_wait_s=0.9 * max(0, second),
            cpu_run_s=0.1 * second,
        )
        timeline.host(HostSample(at=AT + second, processes=(core,)))


def with_steps(slow: float) -> EngineTimeline:
    """An engine whose steps took 10 ms, and take some times as long once its core waits."""
    timeline = usual()
    for number in range(1000):
        timeline.step(step(AT - 30 + number / 100, 0.01))
    waiting(timeline, -60, 6)
    timeline.sample(sample(AT + 1))
    for number in range(200):
        timeline.step(step(AT + 1 + (number + 1) * 0.01 * slow, 0.01 * slow))
    return timeline


@pytest.mark.parametrize("slow", [1, 10])
def test_a_core_that_waits_lost_only_what_its_steps_are_longer(slow: int) -> None:
    request = row(AT + 1, tpot_s=0.19, decode_s=1.9, e2e_s=1.95)
    found = explain(request, [OBJECTIVE], with_steps(slow))
    causes = {share.cause for share in found.shares}
    assert (Cause.CPU_STARVED in causes) is (slow > 1)


def test_places_hold_a_queue_though_nobody_knows_what_is_usual() -> None:
    timeline = EngineTimeline()
    waiting(timeline, 0, 9)
    full = {fact.REQUESTS_WAITING.name: 20.0, fact.REQUESTS_RUNNING.name: 16.0}
    for second in range(9):
        timeline.sample(sample(AT + second, **full))
    found = explain(row(AT + 2, ttft_s=4.05, queue_s=4.0, e2e_s=4.15), [OBJECTIVE], timeline)
    assert found.top is Cause.SEQUENCE_CAP


@pytest.mark.parametrize("cached", [0, 360])
def test_prompts_that_the_cache_lost_hold_the_queue(cached: int) -> None:
    timeline = EngineTimeline()
    for second in range(-60, 1):
        timeline.sample(sample(AT + second))
        for quarter in range(4):
            timeline.request(row(AT + second + quarter / 4, cached_tokens=360))
    for number in range(50):
        timeline.step(step(AT - 20 + 0.01 * number, 0.01))
        timeline.step(step(AT - 10 + 0.05 * number, 0.05, 400))
    timeline.sample(sample(AT + 1))
    for number in range(40):
        timeline.step(step(AT + 1.05 + number * 0.05, 0.05, 400))
        timeline.request(row(AT + 1.0 + number * 0.05, cached_tokens=cached, ttft_s=0.06))
    waits = row(AT + 1, ttft_s=2.0, queue_s=1.95, e2e_s=2.1, cached_tokens=cached)
    timeline.request(waits)
    for second in range(2, 8):
        timeline.sample(sample(AT + second))
    found = explain(waits, [OBJECTIVE], timeline)
    assert (found.top is Cause.CACHE_MISS) is (cached == 0), found.shares
