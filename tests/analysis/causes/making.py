"""Makes requests, steps and samples of an engine, and the timeline of a usual one."""

from typing import Any

from agent.analysis.causes import EngineTimeline, explain
from agent.catalog.causes import Cause
from agent.records.engine import EngineProcess, EngineSample, EngineStep, HostSample, ProcessRole
from agent.records.request import RequestRecord
from tests.analysis.cost.engine_days import engine_sample
from tests.records.making import objective, record

AT = 1_800_000_000.0

OBJECTIVE = objective(ttft_s=0.2, tpot_s=0.05)
STRICT = objective("strict", ttft_s=0.1, e2e_s=1.0)


def row(at: float = AT, **values: Any) -> RequestRecord:
    """A quick request: 50 ms to the first token, then 10 ms each for ten."""
    times = {"ttft_s": 0.05, "tpot_s": 0.01, "prefill_s": 0.035, "decode_s": 0.1, "e2e_s": 0.15}
    tokens = {"input_tokens": 400, "output_tokens": 11}
    ids = {"span_id": f"{round(1000 * at) % 10**9:016x}", "request_id": None, "agent": None}
    facts = {**times, **tokens, **ids, "model": "m", **values}
    ended_at = at + facts["e2e_s"]
    return record(1, started_at=at, ended_at=ended_at, received_at=ended_at, **facts)


def sample(at: float, **counts: float) -> EngineSample:
    """A sample of an engine that serves four requests a second, one at a time."""
    per_s = {"steps": 40, "step_tokens": 1640, "output": 40, "finished": 4}
    known = {name: each * (at - AT + 1000) for name, each in per_s.items()}
    gauges = {"running": 1.0, "waiting": 0.0, "kv": 0.2, "places": 16.0}
    return engine_sample(at, **(known | gauges | counts))


def sample_each_second(timeline: EngineTimeline, seconds: range, **counts: float) -> None:
    """Samples of these seconds after AT, with these counts."""
    for second in seconds:
        timeline.sample(sample(AT + second, **counts))


def queued(at: float, queue_s: float, **values: Any) -> RequestRecord:
    """A request that is quick after its time in the queue."""
    times = {"queue_s": queue_s, "ttft_s": queue_s + 0.05, "e2e_s": queue_s + 0.15}
    return row(at, **times, **values)


def usual(*, steps: float = 0.0, **values: Any) -> EngineTimeline:
    """An engine that served 240 quick requests in the last minute.

    With `steps` the plugin reported steps that took so long, one in ten of which computed a prompt
    of 500 tokens and took five times as long.
    """
    timeline = EngineTimeline()
    for second in range(-60, 1):
        timeline.sample(sample(AT + second))
        for quarter in range(4):
            timeline.request(row(AT + second + quarter / 4, **values))
        until, number = AT + second, 0
        while steps and second < 0 and until < AT + second + 0.99:
            prompt = number % 10 == 0
            took_s = steps * (5 if prompt else 1)
            until, number = until + took_s, number + 1
            timeline.step(step(until, took_s, 500 * prompt))
    return timeline


def step(
    ended_at: float, duration_s: float, prefill: int = 0, decode: int = 1, waiting: int = 0
) -> EngineStep:
    """A step of one request that also computed prompt tokens of others."""
    return EngineStep(
        engine="chat-0",
        ended_at=ended_at,
        duration_s=duration_s,
        prefill_tokens=prefill,
        decode_tokens=decode,
        running=1,
        waiting_capacity=waiting,
        waiting_deferred=0,
        kv_usage=0.1,
        preempted=0,
        tokens_of_step=True,
    )


def starve(
    timeline: EngineTimeline, since: int, until: int, role: ProcessRole = ProcessRole.CORE
) -> None:
    """A process that asks for work all the time: it waits for processors whenever it does not
    run."""
    for second in range(since, until):
        core = EngineProcess(
            pid=7,
            started_after_boot_s=1.0,
            role=role,
            name="VLLM",
            state="R",
            cpu_s=0.0,
            cpu_wait_s=0.9 * max(0, second),
            cpu_run_s=0.1 * second,
        )
        timeline.host(HostSample(at=AT + second, processes=(core,)))


def top_cause(request: RequestRecord, timeline: EngineTimeline) -> Cause:
    """The cause that is named for a request that missed OBJECTIVE."""
    return explain(request, [OBJECTIVE], timeline).top
