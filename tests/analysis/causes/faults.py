"""The faults that are injected into a simulated engine, and the causes that are true of each.

Also the engines, traffic and strengths of faults that the confusion matrices are made with.
"""

from dataclasses import dataclass
from typing import NamedTuple

from agent.catalog.causes import Cause
from agent.records.objective import Objective
from agent.simulator.scenario import Scenario
from tests.analysis.causes.fault_runs import SCENARIO, InjectedFault
from tests.records.making import objective


class FaultKind(NamedTuple):
    """A fault, and the causes that are true of it: what it does to a request is any of them.

    `outside` the engine, only a proxy sees it.
    """

    fault: InjectedFault
    causes: frozenset[Cause]
    outside: bool = False

    def __hash__(self) -> int:
        return hash(self.fault.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strengths:
    """How strong each fault is. Shares are of requests or of memory, slowdowns factors."""

    surge: int = 12
    long_ratio: float = 0.1
    long_tokens: int = 7500
    kv_taken: float = 0.97
    places: int = 2
    defer_ratio: float = 1.0
    defer_s: float = 0.6
    cpu_slowdown: float = 4.0
    gpu_slowdown: float = 3.0
    accepted: float = 0.2
    refused_ratio: float = 0.3
    front_s: float = 0.5
    cold_slowdown: float = 4.0
    hold_back_s: float = 0.6
    network_s: float = 0.5
    client_token_s: float = 0.06


# Its cause is nothing that an agent sees: another program's work on the GPU, a slow link.
SLOW_UNSEEN = tuple(
    FaultKind(
        InjectedFault(name=f"all steps {times:g} times slower", engine={"step_slowdown": times}),
        frozenset(),
    )
    for times in (1.1, 1.2, 1.35, 1.6, 2.0, 4.0)
)


def fault_kinds(strengths: Strengths) -> tuple[FaultKind, ...]:
    """Every fault, in these strengths."""
    return (
        *_faults_of_load(strengths),
        *_MORE_LOAD,
        _kind(InjectedFault(name="a stall of 1.2 s now and then", stall_s=1.2), Cause.STALL),
        _kind(InjectedFault(name="a stall of 0.5 s now and then", stall_s=0.5), Cause.STALL),
        *_faults_of_machine(strengths),
        *_faults_outside(strengths),
    )


def _kind(fault: InjectedFault, *causes: Cause, outside: bool = False) -> FaultKind:
    return FaultKind(fault, frozenset(causes), outside)


_FULL = (Cause.KV_PRESSURE, Cause.PREEMPTION, Cause.SEQUENCE_CAP, Cause.PREFILL_BACKLOG)
_SHARED = (Cause.BATCH_LOAD, Cause.PREFILL_CONTENTION, Cause.PREFILL_INTERFERENCE)
_MORE_LOAD = (
    _kind(
        InjectedFault(name="load doubled", engine={"surge": 2}),
        *(Cause.BURST, *_FULL, *_SHARED),
    ),
    _kind(
        InjectedFault(name="a new tenant", tenant=0.8),
        *(Cause.BURST, *_FULL, *_SHARED, Cause.LONG_PROMPT),
    ),
    _kind(
        InjectedFault(name="outputs five times as long", outputs=5.0),
        *(Cause.BATCH_LOAD, Cause.LONG_OUTPUT, *_FULL),
    ),
)


def _faults_of_load(of: Strengths) -> tuple[FaultKind, ...]:
    long_prompts = {"long_ratio": of.long_ratio, "long_tokens": of.long_tokens}
    deferring = {"defer_ratio": of.defer_ratio, "defer_s": of.defer_s}
    return (
        # More requests wait for each other, fill the batch, and interrupt it with their prompts.
        _kind(
            InjectedFault(name="queue surge", engine={"surge": of.surge}),
            *(Cause.BURST, Cause.BATCH_LOAD),
            *(Cause.PREFILL_CONTENTION, Cause.PREFILL_INTERFERENCE),
        ),
        # Their own prefill, and the queue, prefill and decode of the requests between them.
        _kind(
            InjectedFault(name="long prompts", engine=long_prompts),
            *(Cause.LONG_PROMPT, Cause.PREFILL_BACKLOG),
            *(Cause.PREFILL_CONTENTION, Cause.PREFILL_INTERFERENCE),
        ),
        _kind(
            InjectedFault(name="tiny KV cache", engine={"kv_taken": of.kv_taken}),
            *(Cause.KV_PRESSURE, Cause.PREEMPTION),
        ),
        _kind(
            InjectedFault(name="few places", engine={"max_num_seqs": of.places}), Cause.SEQUENCE_CAP
        ),
        _kind(
            InjectedFault(name="slow grammar", engine=deferring), *(Cause.DEFERRED, Cause.GRAMMAR)
        ),
        _kind(InjectedFault(name="cache lost", engine={"cache_lost": True}), Cause.CACHE_MISS),
        _kind(InjectedFault(name="drafts refused", accepted=of.accepted), Cause.SPECULATION),
    )


def _faults_of_machine(of: Strengths) -> tuple[FaultKind, ...]:
    return (
        _kind(InjectedFault(name="CPU short", cpu_slowdown=of.cpu_slowdown), Cause.CPU_STARVED),
        _kind(
            InjectedFault(name="GPU throttled", gpu_slowdown=of.gpu_slowdown), Cause.GPU_THROTTLED
        ),
        _kind(
            InjectedFault(name="slow tokeniser", engine={"front_s": of.front_s}), Cause.TOKENISING
        ),
        _kind(InjectedFault(name="cold start", cold_slowdown=of.cold_slowdown), Cause.COLD_START),
        _kind(InjectedFault(name="engine death", dies=True), Cause.ENGINE_FAILURE),
        _kind(
            InjectedFault(name="admission", engine={"error_ratio": of.refused_ratio}, refuses=True),
            Cause.ADMISSION,
        ),
    )


def _faults_outside(of: Strengths) -> tuple[FaultKind, ...]:
    return (
        _kind(
            InjectedFault(name="hold-back", hold_back_s=of.hold_back_s),
            Cause.PARSER_HOLDBACK,
            outside=True,
        ),
        _kind(InjectedFault(name="network", network_s=of.network_s), Cause.NETWORK, outside=True),
        _kind(
            InjectedFault(name="slow client", client_token_s=of.client_token_s),
            Cause.SLOW_CLIENT,
            outside=True,
        ),
    )


class Setting(NamedTuple):
    """An engine with its traffic, the objective of its requests, its faults, and the seeds."""

    name: str
    scenario: Scenario
    objective: Objective
    kinds: tuple[FaultKind, ...]
    seeds: tuple[int, ...]

    def __hash__(self) -> int:
        return hash(self.name)


# The rules were written with this one.
TUNED = Setting(
    "tuned", SCENARIO, objective(ttft_s=0.25, tpot_s=0.022), fault_kinds(Strengths()), (1, 2)
)
