"""The faults that are injected into a simulated engine, and the causes that are true of each.

Also the engines, traffic and strengths of faults that the confusion matrices are made with.
"""

from dataclasses import dataclass
from typing import NamedTuple

from agent.catalog.causes import Cause
from agent.records.objective import Objective
from agent.simulator.scenario import Decode, KvCache, Prefill, Scenario, TokenLengths
from tests.analysis.causes.fault_runs import MODEL, SCENARIO, InjectedFault
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
SLOW_UNSEEN = FaultKind(
    InjectedFault(name="slow steps", engine={"step_slowdown": 4.0}), frozenset()
)


def fault_kinds(strengths: Strengths) -> tuple[FaultKind, ...]:
    """Every fault, in these strengths."""
    return (
        *_faults_of_load(strengths),
        *_faults_of_machine(strengths),
        *_faults_outside(strengths),
    )


def _kind(fault: InjectedFault, *causes: Cause, outside: bool = False) -> FaultKind:
    return FaultKind(fault, frozenset(causes), outside)


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

# No rule was written or changed for these.
HELD_OUT = (
    Setting(
        "a small model under load",
        Scenario(
            model=MODEL,
            arrival_rate=14.0,
            input_tokens=TokenLengths(median=400, sigma=0.8, min=16, max=4000),
            output_tokens=TokenLengths(median=110, sigma=0.6, min=4, max=500),
            prefill=Prefill(tokens_per_s=25_000.0, floor_s=0.006),
            decode=Decode(base_s=0.006, per_running_s=0.0001),
            max_num_seqs=128,
            max_num_batched_tokens=4096,
            kv_cache=KvCache(blocks=8192, block_tokens=16),
            cached_ratio=0.5,
            abort_ratio=0.0,
        ),
        objective(ttft_s=0.15, tpot_s=0.014),
        fault_kinds(
            Strengths(
                surge=5,
                long_ratio=0.05,
                long_tokens=8000,
                kv_taken=0.95,
                places=6,
                defer_ratio=0.4,
                defer_s=1.2,
                cpu_slowdown=2.5,
                gpu_slowdown=2.0,
                accepted=0.8,
                refused_ratio=0.1,
                front_s=0.3,
                cold_slowdown=2.5,
                hold_back_s=0.3,
                network_s=0.25,
                client_token_s=0.03,
            )
        ),
        (11,),
    ),
    Setting(
        "a large model with few requests",
        Scenario(
            model=MODEL,
            arrival_rate=1.0,
            input_tokens=TokenLengths(median=900, sigma=0.5, min=64, max=4000),
            output_tokens=TokenLengths(median=90, sigma=0.7, min=8, max=400),
            prefill=Prefill(tokens_per_s=3_500.0, floor_s=0.03),
            decode=Decode(base_s=0.025, per_running_s=0.0008),
            max_num_seqs=32,
            max_num_batched_tokens=1024,
            kv_cache=KvCache(blocks=2048, block_tokens=16),
            cached_ratio=0.7,
            abort_ratio=0.0,
        ),
        objective(ttft_s=0.9, tpot_s=0.05),
        fault_kinds(
            Strengths(
                surge=8,
                long_ratio=0.15,
                long_tokens=7000,
                kv_taken=0.9,
                places=1,
                defer_ratio=0.7,
                defer_s=2.0,
                cpu_slowdown=3.0,
                gpu_slowdown=2.5,
                accepted=0.4,
                refused_ratio=0.5,
                front_s=1.5,
                cold_slowdown=3.0,
                hold_back_s=1.5,
                network_s=1.2,
                client_token_s=0.12,
            )
        ),
        (12, 13),
    ),
    Setting(
        "long documents, short answers",
        Scenario(
            model=MODEL,
            max_model_len=32_768,
            arrival_rate=2.0,
            input_tokens=TokenLengths(median=3000, sigma=0.7, min=200, max=16_000),
            output_tokens=TokenLengths(median=40, sigma=0.5, min=4, max=200),
            prefill=Prefill(tokens_per_s=16_000.0, floor_s=0.012),
            decode=Decode(base_s=0.012, per_running_s=0.0004),
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            kv_cache=KvCache(blocks=16_384, block_tokens=16),
            cached_ratio=0.6,
            abort_ratio=0.0,
        ),
        objective(ttft_s=0.8, tpot_s=0.05),
        fault_kinds(
            Strengths(
                surge=6,
                long_ratio=0.2,
                long_tokens=24_000,
                kv_taken=0.96,
                places=1,
                defer_ratio=0.5,
                defer_s=1.5,
                cpu_slowdown=3.0,
                gpu_slowdown=2.5,
                accepted=0.1,
                refused_ratio=0.2,
                front_s=1.0,
                cold_slowdown=3.0,
                hold_back_s=1.0,
                network_s=0.9,
                client_token_s=0.15,
            )
        ),
        (14,),
    ),
)
