"""A simulated engine in virtual time, with faults, and what an agent would see of it.

The same seed gives the same requests with and without a fault, so that two runs show what a fault
cost each request.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from math import inf, prod
from random import Random
from typing import NamedTuple

from agent.catalog import engine_facts as fact
from agent.catalog import gpu_facts
from agent.records.engine import (
    EndedRequest,
    EngineProcess,
    EngineSample,
    EngineStep,
    HostSample,
    ProcessRole,
)
from agent.records.gpu import FactKey, GpuSample
from agent.records.request import EngineView, ProxyView, RequestRecord, Status, Vantage
from agent.simulator.batching import Batch, EngineRequest, Finished, Step, StepWork
from agent.simulator.scenario import Decode, KvCache, Prefill, Scenario, ScriptedFault, TokenLengths
from agent.simulator.traffic import planned_requests

ENGINE, MODEL = "simulated-0", "simulated-chat"
BEGAN_AT = 1_800_000_000.0
# The defaults of `scrape_interval` and of `gpus.poll_interval`.
SAMPLED_EVERY_S, GPUS_EVERY_S = 5.0, 1.0
# Before the fault, for what is usual; then the fault; then time for its last requests.
FAULT_FROM_S, FAULT_FOR_S, UNTIL_S = 90.0, 30.0, 130.0
# How long a dead engine refuses requests.
_DOWN_S = 10.0
_CLOCK_HZ = 1.98e9
# Tokens of a draft of speculative decoding that are accepted without a fault.
USUAL_ACCEPTED = 2.0
_REFUSED_AFTER_S = 0.005
STALLS_EVERY_S = 5.0
NEW_TENANT = "new"
_TENANT_FROM = 1_000_000

SCENARIO = Scenario(
    model=MODEL,
    arrival_rate=4.0,
    input_tokens=TokenLengths(median=600, sigma=0.6, min=64, max=3000),
    output_tokens=TokenLengths(median=60, sigma=0.5, min=8, max=300),
    prefill=Prefill(tokens_per_s=8_000.0, floor_s=0.012),
    decode=Decode(base_s=0.010, per_running_s=0.0003),
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    kv_cache=KvCache(blocks=4096, block_tokens=16),
    cached_ratio=0.8,
    abort_ratio=0.0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedFault:
    """A fault: what it does inside the engine, and what it does outside of it.

    With `accepted` the engine drafts tokens, of which so many a draft are accepted during the
    fault, and USUAL_ACCEPTED else. With `refuses` the requests that fail inside the engine are
    refused by its admission. A step stalls for `stall_s`, each STALLS_EVERY_S. A tenant that no
    cache has prompts of sends `tenant` requests for each planned one. Outputs are `outputs` times
    as long.
    """

    name: str
    engine: Mapping[str, float | bool] = field(default_factory=dict)
    cpu_slowdown: float = 1.0
    gpu_slowdown: float = 1.0
    hold_back_s: float = 0.0
    network_s: float = 0.0
    client_token_s: float = 0.0
    cold_slowdown: float = 1.0
    dies: bool = False
    accepted: float | None = None
    refuses: bool = False
    stall_s: float = 0.0
    tenant: float = 0.0
    outputs: float = 1.0

    @property
    def decode_slowdown(self) -> float:
        """How much longer a token takes since drafts are refused: each step makes fewer."""
        return 1.0 if self.accepted is None else (1 + USUAL_ACCEPTED) / (1 + self.accepted)


class View(NamedTuple):
    """What an agent reads of an engine beside its samples, host, GPUs and spans.

    vLLM tells the tokens of each step with `--enable-logging-iteration-details` alone.
    """

    name: str
    plugin: bool = False
    details: bool = False
    proxy: bool = False


SPANS = View("spans and samples alone")
PROXY = View("plugin, proxy and samples", plugin=True, proxy=True)


class Sight(NamedTuple):
    """All that an agent sees of a run, each in the order of time."""

    requests: list[RequestRecord]
    ended: Mapping[str, EndedRequest]
    steps: list[EngineStep]
    samples: list[EngineSample]
    hosts: list[HostSample]
    gpus: list[GpuSample]
    died_at: float | None


def fault_holds(at_s: float) -> bool:
    """Whether the fault is there at a time of the run."""
    return FAULT_FROM_S <= at_s < FAULT_FROM_S + FAULT_FOR_S


class Run(NamedTuple):
    """One run of the engine with faults."""

    faults: Sequence[InjectedFault]
    scenario: Scenario
    steps: Sequence[Step]
    refused: Sequence[EngineRequest]

    def sight(self, view: View) -> Sight:
        """What an agent sees of it; with the proxy each request has a user's view, too."""
        finished = [done for step in self.steps for done in step.finished]
        outside = _Outside(self.faults)
        records = [outside.record(done, view) for done in finished]
        records += [_refused(request) for request in self.refused]
        records.sort(key=lambda record: record.ended_at)
        died = any(each.dies for each in self.faults)
        return Sight(
            requests=records,
            ended={_span_id(done.request): _ended(done) for done in finished if view.plugin},
            steps=_reported(self, view) if view.plugin else [],
            samples=_samples(self),
            hosts=_hosts(self.steps, self.faults),
            gpus=_gpus(self.faults),
            died_at=BEGAN_AT + FAULT_FROM_S if died else None,
        )


def simulated(faults: Sequence[InjectedFault], seed: int, base: Scenario = SCENARIO) -> Run:
    """A run with these faults at once."""
    scenario = _scenario(faults, seed, base)
    numbers = count()
    planned = planned_requests(scenario, lambda: f"{next(numbers)}")
    arriving = [*takewhile(lambda request: request.arrived_s < UNTIL_S, planned)]
    for each in faults:
        arriving = _longer_outputs(arriving, each.outputs)
        arriving += _new_tenant(arriving, each.tenant, seed)
    arriving.sort(key=lambda request: request.arrived_s)
    refused = tuple(request for request in arriving if request.fails)
    stall_s = max((each.stall_s for each in faults), default=0.0)
    batch = _StallingBatch(scenario, arriving, stall_s)
    return Run(tuple(faults), scenario, tuple(_steps(batch)), refused)


class _StallingBatch(Batch):
    """A batch whose steps stall now and then while the fault is there."""

    def __init__(
        self, scenario: Scenario, planned: Iterable[EngineRequest], stall_s: float
    ) -> None:
        super().__init__(scenario, planned)
        self._stall_s = stall_s
        self._stalls_from_s = FAULT_FROM_S if stall_s else inf

    def begin(self, at_s: float) -> StepWork:
        work = super().begin(at_s)
        if at_s < self._stalls_from_s or not fault_holds(at_s):
            return work
        self._stalls_from_s = at_s + STALLS_EVERY_S
        return replace(work, ends_s=work.ends_s + self._stall_s)


def _longer_outputs(requests: Sequence[EngineRequest], times: float) -> list[EngineRequest]:
    return [
        replace(each, output_tokens=tokens, max_tokens=tokens)
        if times > 1 and fault_holds(each.arrived_s)
        else each
        for each in requests
        for tokens in [round(times * each.output_tokens)]
    ]


def _new_tenant(
    requests: Sequence[EngineRequest], ratio: float, seed: int
) -> Iterator[EngineRequest]:
    """Requests like the others at other times, of whose prompts no cache has anything."""
    random, owed = Random(f"{seed}: new tenant"), 0.0
    for number, each in enumerate(requests):
        owed += ratio * fault_holds(each.arrived_s)
        while owed >= 1:
            owed -= 1
            yield replace(
                each,
                request_id=f"{_TENANT_FROM + number}",
                arrived_s=FAULT_FROM_S + FAULT_FOR_S * random.random(),
                cached_tokens=0,
                tenant=NEW_TENANT,
            )


def _scenario(faults: Sequence[InjectedFault], seed: int, base: Scenario) -> Scenario:
    """The scenario with all faults as one: their slowdowns multiply."""
    given: dict[str, float | bool] = {}
    slowdown = decode_slowdown = 1.0
    for each in faults:
        given.update(each.engine)
        decode_slowdown *= each.decode_slowdown
        slowdown *= each.cpu_slowdown * each.gpu_slowdown * each.cold_slowdown
    script = ScriptedFault.model_validate(
        {
            "after_s": FAULT_FROM_S,
            "for_s": FAULT_FOR_S,
            "step_slowdown": slowdown,
            "decode_slowdown": decode_slowdown,
            **given,
        }
    )
    return base.model_copy(update={"seed": seed, "faults": (script,)})


def _steps(batch: Batch) -> Iterator[Step]:
    while (start_s := batch.next_start_s()) < 4 * UNTIL_S:
        yield batch.end(batch.begin(start_s))


def _span_id(request: EngineRequest) -> str:
    return f"{int(request.request_id):016x}"


def _ended(done: Finished) -> EndedRequest:
    request = done.request
    return EndedRequest(
        engine=ENGINE,
        request_id=request.request_id,
        ended_at=BEGAN_AT + done.last_token_s,
        finish_reason=request.finish_reason,
        input_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        cached_tokens=request.cached_tokens,
        preemptions=done.preemptions,
        queue_s=done.queue_s,
        prefill_s=done.prefill_s,
        decode_s=done.decode_s,
        e2e_s=done.e2e_s,
    )


def _refused(request: EngineRequest) -> RequestRecord:
    """The row of a request that the engine refused, as its front or a proxy saw it."""
    started_at = BEGAN_AT + request.arrived_s
    return RequestRecord(
        trace_id=f"{int(request.request_id):032x}",
        span_id=_span_id(request),
        vantage=Vantage.PROXY,
        status=Status.ERROR,
        started_at=started_at,
        ended_at=started_at + _REFUSED_AFTER_S,
        received_at=started_at + _REFUSED_AFTER_S,
        engine=ENGINE,
        model=MODEL,
        e2e_s=_REFUSED_AFTER_S,
        http_status=503,
        proxied=ProxyView(streamed=True, choices=1),
    )


class _Outside:
    """Adds what happens outside the engine to a request."""

    def __init__(self, faults: Sequence[InjectedFault]) -> None:
        self._hold_back_s = max((each.hold_back_s for each in faults), default=0.0)
        self._network_s = max((each.network_s for each in faults), default=0.0)
        self._client_token_s = max((each.client_token_s for each in faults), default=0.0)
        self._died = any(each.dies for each in faults)

    def record(self, done: Finished, view: View) -> RequestRecord:
        """The row of a request, as the engine or as both saw it."""
        request = done.request
        started_at = BEGAN_AT + request.arrived_s
        record = RequestRecord(
            trace_id=f"{int(request.request_id):032x}",
            span_id=_span_id(request),
            vantage=Vantage.ENGINE,
            status=Status.OK,
            started_at=started_at,
            ended_at=BEGAN_AT + done.last_token_s,
            received_at=BEGAN_AT + done.last_token_s,
            request_id=request.request_id,
            engine=ENGINE,
            model=MODEL,
            ttft_s=done.ttft_s,
            tpot_s=done.tpot_s if request.output_tokens > 1 else None,
            e2e_s=done.e2e_s,
            queue_s=done.queue_s,
            prefill_s=done.prefill_s,
            decode_s=done.decode_s,
            input_tokens=request.prompt_tokens,
            cached_tokens=request.cached_tokens if view.plugin else None,
            output_tokens=request.output_tokens,
        )
        down_until_s = FAULT_FROM_S + _DOWN_S
        if self._died and request.arrived_s < down_until_s and done.last_token_s > FAULT_FROM_S:
            died_at = max(started_at, BEGAN_AT + FAULT_FROM_S) + 0.01
            return record._replace(status=Status.ERROR, ended_at=died_at, http_status=500)
        return self._joined(record, request) if view.proxy else record

    def _joined(self, record: RequestRecord, request: EngineRequest) -> RequestRecord:
        spoiled = fault_holds(request.arrived_s)
        network_s = 0.002 + (self._network_s if spoiled else 0.0)
        held_s = self._hold_back_s if spoiled else 0.0
        assert record.ttft_s is not None
        assert record.e2e_s is not None
        assert record.decode_s is not None
        stream_s = record.decode_s
        if spoiled:
            read_s = self._client_token_s * (request.output_tokens - 1)
            stream_s = max(0.0, max(stream_s, read_s) - held_s)
        ttft_s = record.ttft_s + network_s + held_s
        e2e_s = ttft_s + stream_s
        return record._replace(
            vantage=Vantage.JOINED,
            ttft_s=ttft_s,
            tpot_s=stream_s / (request.output_tokens - 1) if request.output_tokens > 1 else None,
            e2e_s=e2e_s,
            ended_at=record.started_at + e2e_s,
            proxied=ProxyView(
                first_byte_s=record.ttft_s + network_s, streamed=True, choices=1, gap_tokens=1
            ),
            engine_view=EngineView(
                status=Status.OK,
                ttft_s=record.ttft_s,
                tpot_s=record.tpot_s,
                e2e_s=record.e2e_s,
                holdback_s=network_s + held_s,
            ),
        )


def _accepted(faults: Sequence[InjectedFault], at_s: float) -> float | None:
    """Accepted tokens of a draft; None for an engine without drafts."""
    given = [each.accepted for each in faults if each.accepted is not None]
    if not given:
        return None
    return min(given) if fault_holds(at_s) else USUAL_ACCEPTED


def _engine_steps(
    steps: Sequence[Step], faults: Sequence[InjectedFault]
) -> Iterator[Sequence[Step]]:
    """The steps of the model that are one step of an engine: with drafts it makes more tokens."""
    together: list[Step] = []
    drafted = 0.0
    for step in steps:
        together.append(step)
        drafted += 1 / (1 + (_accepted(faults, step.began_s) or 0.0))
        if drafted >= 1 or not step.tokens:
            drafted = max(0.0, drafted - 1)
            yield tuple(together)
            together.clear()


def _reported(run: Run, view: View) -> list[EngineStep]:
    """The steps as the plugin reports them."""
    busy_since = inf
    reported = []
    for steps in _engine_steps(run.steps, run.faults):
        step = _engine_step(steps, details=view.details)
        # Without details, the time since the last step, if the engine was busy since.
        if not view.details:
            duration_s = step.ended_at - busy_since
            step = step._replace(duration_s=duration_s if duration_s > 0 else None)
        reported.append(step)
        busy = step.running or step.waiting_capacity or step.waiting_deferred
        busy_since = step.ended_at if busy else inf
    return reported


def _engine_step(steps: Sequence[Step], *, details: bool) -> EngineStep:
    step = steps[-1]
    tokens = [token for each in steps for token in each.tokens]
    firsts = [token.request for token in tokens if token.is_first]
    return EngineStep(
        engine=ENGINE,
        ended_at=BEGAN_AT + step.ended_s,
        duration_s=sum(each.ended_s - each.began_s for each in steps),
        prefill_tokens=sum(each.prefill_tokens for each in steps) if details else _computed(firsts),
        decode_tokens=len(tokens) if details else len(tokens) - len(firsts),
        running=step.load.running,
        waiting_capacity=step.load.waiting - step.load.deferred,
        waiting_deferred=step.load.deferred,
        kv_usage=step.load.kv_usage,
        preempted=sum(each.preemptions for each in steps),
        tokens_of_step=details,
    )


def _computed(requests: Iterable[EngineRequest]) -> int:
    return sum(request.prompt_tokens - request.cached_tokens for request in requests)


def _samples(run: Run) -> list[EngineSample]:
    """The exposition each SAMPLED_EVERY_S: counters of the steps so far, gauges of the last one."""
    counts: defaultdict[str, float] = defaultdict(float)
    samples, upcoming = [], iter(run.steps)
    step = next(upcoming, None)
    load = None
    cold = any(each.cold_slowdown > 1 for each in run.faults)
    for at_s in _times(SAMPLED_EVERY_S):
        while step is not None and step.ended_s <= at_s:
            _count(counts, step, _accepted(run.faults, step.began_s))
            load, step = step.load, next(upcoming, None)
        if load is None:
            continue
        facts: dict[FactKey, float] = {(name, ()): n for name, n in counts.items()}
        facts |= {
            (fact.REQUESTS_RUNNING.name, ()): float(load.running),
            (fact.REQUESTS_WAITING.name, ()): float(load.waiting),
            (fact.REQUESTS_WAITING_BY_REASON.name, ("deferred",)): float(load.deferred),
            (fact.KV_CACHE_USAGE.name, ()): load.kv_usage,
            (fact.MAX_RUNNING_REQUESTS.name, ()): _places(run.scenario, at_s),
            (fact.MAX_STEP_TOKENS.name, ()): float(run.scenario.max_num_batched_tokens),
            (fact.ADMISSION_REJECTIONS.name, ()): float(
                sum(request.arrived_s <= at_s for request in run.refused)
            ),
        }
        started_at = FAULT_FROM_S - 5.0 if cold and at_s >= FAULT_FROM_S - 1.0 else -900.0
        samples.append(
            EngineSample(
                engine=ENGINE,
                at=BEGAN_AT + at_s,
                dialect="vllm",
                model=MODEL,
                facts=facts,
                process_started_at=BEGAN_AT + started_at,
            )
        )
    return samples


def _times(every_s: float) -> Iterator[float]:
    """The times of samples until the last requests are done."""
    return (number * every_s for number in range(int((UNTIL_S + 60) / every_s)))


def _places(scenario: Scenario, at_s: float) -> float:
    (script,) = scenario.faults
    fewer = script.max_num_seqs if fault_holds(at_s) else None
    return float(fewer or scenario.max_num_seqs)


def _count(counts: defaultdict[str, float], step: Step, accepted: float | None) -> None:
    firsts = [token.request for token in step.tokens if token.is_first]
    computed = _computed(firsts)
    counts[fact.STEPS.name] += bool(step.tokens) / (1 + (accepted or 0.0))
    if accepted is not None:
        drafts = len(step.tokens) / (1 + accepted)
        counts[fact.SPEC_DECODE_DRAFTS.name] += drafts
        counts[fact.SPEC_DECODE_ACCEPTED_TOKENS.name] += drafts * accepted
    counts[fact.STEP_TOKENS.name] += computed + len(step.tokens) if step.tokens else 0
    counts[fact.OUTPUT_TOKENS.name] += len(step.tokens)
    counts[fact.PREEMPTIONS.name] += step.preemptions
    counts[fact.REQUESTS_FINISHED.name] += len(step.finished)
    counts[fact.PREFIX_CACHE_QUERY_TOKENS.name] += sum(r.prompt_tokens for r in step.admitted)
    counts[fact.PREFIX_CACHE_HIT_TOKENS.name] += sum(r.cached_tokens for r in step.admitted)


def _hosts(steps: Sequence[Step], faults: Sequence[InjectedFault]) -> list[HostSample]:
    """The core's run delay: one part in a hundred, and what a starved core waits in its steps."""
    slowdown = prod(each.cpu_slowdown for each in faults)
    ends = [step.ended_s for step in steps]
    samples, wait_s, run_s, before_s = [], 0.0, 0.0, 0.0
    for at_s in _times(SAMPLED_EVERY_S):
        low, high = bisect_left(ends, before_s), bisect_left(ends, at_s)
        busy_s = sum(step.ended_s - step.began_s for step in steps[low:high])
        starved = 1 - 1 / slowdown if fault_holds(before_s) else 0.01
        most_s = 2 * SAMPLED_EVERY_S
        wait_s += min(busy_s, most_s) * starved
        run_s += min(busy_s, most_s) * (1 - starved)
        before_s = at_s
        process = EngineProcess(
            pid=1,
            started_after_boot_s=1.0,
            role=ProcessRole.CORE,
            name="VLLM::EngineCore",
            state="R",
            cpu_s=0.0,
            cpu_wait_s=wait_s,
            cpu_run_s=run_s,
        )
        samples.append(HostSample(at=BEGAN_AT + at_s, processes=(process,)))
    return samples


def _gpus(faults: Sequence[InjectedFault]) -> list[GpuSample]:
    """One GPU, whose clock falls while it throttles."""
    slowdown = prod(each.gpu_slowdown for each in faults)
    samples, throttled_s = [], 0.0
    for at_s in _times(GPUS_EVERY_S):
        throttles = slowdown > 1 and fault_holds(at_s)
        throttled_s += GPUS_EVERY_S if throttles else 0.0
        clock = _CLOCK_HZ / slowdown if throttles else _CLOCK_HZ
        facts: dict[FactKey, float] = {
            (gpu_facts.CLOCK.name, ("sm",)): clock,
            (gpu_facts.THROTTLED_TIME.name, ("hw_thermal",)): throttled_s,
        }
        samples.append(
            GpuSample(gpu="GPU-0", index=0, name="H100", at=BEGAN_AT + at_s, facts=facts)
        )
    return samples
