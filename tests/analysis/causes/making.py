"""Makes requests, steps and samples of an engine, and the timeline of a usual one."""

from agent.analysis.causes import EngineTimeline
from agent.catalog import engine_facts as fact
from agent.catalog.definitions import GOODPUT
from agent.records.engine import EngineProcess, EngineSample, EngineStep, HostSample, ProcessRole
from agent.records.objective import Objective
from agent.records.request import RequestRecord, Status, Vantage

AT = 1_800_000_000.0

OBJECTIVE = Objective(
    name="chat", definition=GOODPUT, target=0.9, window_s=3600, ttft_s=0.2, tpot_s=0.05
)

STRICT = Objective(
    name="strict", definition=GOODPUT, target=0.9, window_s=3600, ttft_s=0.1, e2e_s=1.0
)


def row(at: float = AT, **values: object) -> RequestRecord:
    """A quick request: 50 ms to the first token, then 10 ms each for ten."""
    fields: dict[str, object] = {
        "trace_id": "a" * 32,
        "span_id": f"{round(1000 * at) % 10**9:016x}",
        "vantage": Vantage.ENGINE,
        "status": Status.OK,
        "started_at": at,
        "engine": "chat-0",
        "model": "m",
        "ttft_s": 0.05,
        "tpot_s": 0.01,
        "queue_s": 0.01,
        "prefill_s": 0.035,
        "decode_s": 0.1,
        "e2e_s": 0.15,
        "input_tokens": 400,
        "output_tokens": 11,
        **values,
    }
    fields |= {"ended_at": at + fields["e2e_s"], "received_at": at + fields["e2e_s"]}  # type: ignore[operator]
    return RequestRecord(**fields)  # type: ignore[arg-type]


def sample(at: float, **facts: float) -> EngineSample:
    """A sample of an engine that serves four requests a second, one at a time."""
    seconds = at - AT + 1000
    values = {
        fact.STEPS.name: 40 * seconds,
        fact.STEP_TOKENS.name: 1640 * seconds,
        fact.OUTPUT_TOKENS.name: 40 * seconds,
        fact.REQUESTS_FINISHED.name: 4 * seconds,
        fact.REQUESTS_RUNNING.name: 1.0,
        fact.REQUESTS_WAITING.name: 0.0,
        fact.KV_CACHE_USAGE.name: 0.2,
        fact.MAX_RUNNING_REQUESTS.name: 16.0,
        **facts,
    }
    keys: dict[tuple[str, tuple[str, ...]], float] = {
        (name, ()): value for name, value in values.items()
    }
    return EngineSample(engine="chat-0", at=at, dialect="vllm", model="m", facts=keys)


def usual() -> EngineTimeline:
    """An engine that served 240 quick requests in the last minute."""
    timeline = EngineTimeline()
    for second in range(-60, 1):
        timeline.sample(sample(AT + second))
        for quarter in range(4):
            timeline.request(row(AT + second + quarter / 4))
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


def starve(timeline: EngineTimeline, since: int, until: int) -> None:
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
