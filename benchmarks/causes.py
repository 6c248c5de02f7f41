"""The time to explain one missed request, and to read and write it, in an engine's overload."""

import gc
import time
from random import Random

from agent.analysis.causes import EngineTimeline, explain
from agent.catalog import engine_facts as fact
from agent.catalog.definitions import GOODPUT, Verdict
from agent.records.engine import EngineProcess, EngineSample, EngineStep, HostSample, ProcessRole
from agent.records.objective import ExplainedRequest, JudgedRequest, Judgement, Objective
from agent.records.request import EngineView, ProxyView, RequestRecord, Status, Vantage
from agent.store.explanations import ExplanationStore
from agent.store.migrating import upgrade
from agent.store.transactions import request_write
from benchmarks.rollup_load import DATABASES

TARGET_US = 50.0
# Of one core, for a million missed requests an hour: read, explained and written.
CORE_TARGET = 0.25
_AT = 1_800_000_000.0
_MINUTES = 4
_STEPS_PER_S = 100
# A million an hour.
_REQUESTS_PER_S = 278
_ROUNDS = 5
_OBJECTIVE = Objective(
    name="chat", definition=GOODPUT, target=0.9, window_s=3600.0, ttft_s=0.2, tpot_s=0.02
)


def run() -> bool:
    """Print the time per missed request with steps and with samples alone; whether it is met."""
    return all([_measured(plugin=True), _measured(plugin=False), _stored()])


def _missed() -> list[RequestRecord]:
    random = Random(7)
    began_at = _AT + 60 * _MINUTES - 20
    return [_randomised(_request(began_at + number / 250), random) for number in range(2_500)]


def _randomised(request: RequestRecord, random: Random) -> RequestRecord:
    """The request with random times and tokens, which miss both limits."""
    tokens, prompt = random.randint(2, 200), random.randint(50, 6_000)
    queue_s, prefill_s = random.uniform(0.15, 1.5), random.uniform(0.03, 0.6)
    decode_s, outside_s = tokens * random.uniform(0.022, 0.05), random.uniform(0.002, 0.05)
    engine_ttft_s = queue_s + prefill_s + random.uniform(0.01, 0.15)
    engine_s = engine_ttft_s + decode_s
    e2e_s = engine_s + outside_s + random.choice((0.0, 0.3))
    proxied, engine_view = request.proxied, request.engine_view
    assert proxied is not None
    assert engine_view is not None
    return request._replace(
        ended_at=request.started_at + e2e_s,
        received_at=request.started_at + e2e_s,
        ttft_s=engine_ttft_s + outside_s,
        tpot_s=(e2e_s - engine_ttft_s - outside_s) / (tokens - 1),
        e2e_s=e2e_s,
        queue_s=queue_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
        input_tokens=prompt,
        cached_tokens=random.choice((0, prompt // 2, prompt // 10)),
        output_tokens=tokens,
        proxied=proxied._replace(first_byte_s=engine_ttft_s + outside_s),
        engine_view=engine_view._replace(ttft_s=engine_ttft_s, e2e_s=engine_s),
    )


def _stored() -> bool:
    """Missed requests that wait in SQLite are read, explained and written."""
    timeline = _timeline(plugin=True)
    verdicts = (("chat", Verdict.MISSED),)
    missed = [
        JudgedRequest(record._replace(agent="agent-0"), Judgement(Verdict.MISSED, verdicts))
        for record in _missed()
    ]
    with DATABASES["SQLite"]() as database:
        upgrade(database)
        request_write(database)(missed)
        keeper = ExplanationStore(database, "agent-0")
        gc.collect()
        gc.freeze()
        began = time.process_time()
        found = keeper.unexplained(_AT, _AT + 1e6, len(missed))
        read = time.process_time()
        explained = [
            ExplainedRequest(each, explain(each.record, [_OBJECTIVE], timeline)) for each in found
        ]
        written = time.process_time()
        assert len(keeper.explain(explained, _AT)) == len(missed)
        ended = time.process_time()
    each_us = 1e6 / len(missed)
    core = (ended - began) * each_us / 3.6e3
    print(
        f"causes, read, explained and written in SQLite: {each_us * (ended - began):.0f} us of "
        f"processor time a request, {each_us * (read - began):.0f} of them reading and "
        f"{each_us * (ended - written):.0f} writing; a million an hour are {100 * core:.1f} % of a "
        f"core (target under {100 * CORE_TARGET:.0f} %)"
    )
    return core < CORE_TARGET


def _measured(*, plugin: bool) -> bool:
    timeline = _timeline(plugin=plugin)
    missed = _missed()
    for record in missed:
        timeline.request(record)
    gc.collect()
    gc.freeze()
    times = []
    for _ in range(_ROUNDS):
        began = time.process_time()
        for record in missed:
            explain(record, [_OBJECTIVE], timeline)
        times.append(1e6 * (time.process_time() - began) / len(missed))
    view = "plugin, proxy and samples" if plugin else "proxy, spans and samples"
    print(
        f"causes, a request that missed both limits, by {view}: {min(times):.0f} us of processor "
        f"time (target under {TARGET_US:.0f} us)"
    )
    return min(times) < TARGET_US


def _timeline(*, plugin: bool) -> EngineTimeline:
    """Minutes of an engine that is overloaded all the time."""
    timeline = EngineTimeline()
    for second in range(60 * _MINUTES):
        at = _AT + second
        timeline.sample(_sample(at, second))
        timeline.host(_host(at, second))
        for step in range(_STEPS_PER_S if plugin else 0):
            timeline.step(_step(at + (step + 1) / _STEPS_PER_S, step))
        for number in range(_REQUESTS_PER_S):
            timeline.request(_request(at - 4.0 + number / _REQUESTS_PER_S))
    return timeline


def _step(at: float, number: int) -> EngineStep:
    return EngineStep(
        engine="chat-0",
        ended_at=at,
        duration_s=1 / _STEPS_PER_S,
        prefill_tokens=0 if number % 3 else 2_000,
        decode_tokens=60,
        running=64,
        waiting_capacity=40,
        waiting_deferred=0,
        kv_usage=0.99,
        preempted=0,
        tokens_of_step=True,
    )


def _sample(at: float, second: int) -> EngineSample:
    values = {
        fact.STEPS.name: 100.0 * second,
        fact.STEP_TOKENS.name: 70_000.0 * second,
        fact.OUTPUT_TOKENS.name: 6_000.0 * second,
        fact.PREEMPTIONS.name: second // 5,
        fact.REQUESTS_FINISHED.name: float(_REQUESTS_PER_S * second),
        fact.PREFIX_CACHE_HIT_TOKENS.name: 1_000.0 * second,
        fact.PREFIX_CACHE_QUERY_TOKENS.name: 9_000.0 * second,
        fact.REQUESTS_RUNNING.name: 64.0,
        fact.REQUESTS_WAITING.name: 40.0,
        fact.KV_CACHE_USAGE.name: 0.99,
        fact.MAX_RUNNING_REQUESTS.name: 64.0,
    }
    facts: dict[tuple[str, tuple[str, ...]], float] = {
        (name, ()): value for name, value in values.items()
    }
    return EngineSample(engine="chat-0", at=at, dialect="vllm", model="m", facts=facts)


def _host(at: float, second: int) -> HostSample:
    core = EngineProcess(
        pid=7,
        started_after_boot_s=1.0,
        role=ProcessRole.CORE,
        name="VLLM::EngineCore",
        state="R",
        cpu_s=0.0,
        cpu_wait_s=0.01 * second,
        cpu_run_s=0.9 * second,
    )
    return HostSample(at=at, processes=(core,))


def _request(at: float) -> RequestRecord:
    return RequestRecord(
        trace_id=f"{int(1000 * at):032x}",
        span_id=f"{int(1e6 * at) % 10**15:016x}",
        vantage=Vantage.JOINED,
        status=Status.OK,
        started_at=at,
        ended_at=at + 3.0,
        received_at=at + 3.0,
        engine="chat-0",
        model="m",
        ttft_s=0.81,
        tpot_s=0.03,
        e2e_s=3.0,
        queue_s=0.5,
        prefill_s=0.25,
        decode_s=2.0,
        input_tokens=800,
        cached_tokens=80,
        output_tokens=74,
        proxied=ProxyView(first_byte_s=0.8, streamed=True, choices=1),
        engine_view=EngineView(status=Status.OK, ttft_s=0.8, tpot_s=0.028, e2e_s=2.8),
    )
