"""The faults that are injected into a simulated engine, and the causes that are true of each."""

from typing import NamedTuple

from agent.catalog.causes import Cause
from tests.analysis.causes.fault_runs import InjectedFault


class FaultKind(NamedTuple):
    """A fault, and the causes that are true of it: what it does to a request is any of them.

    `outside` the engine, only a proxy sees it.
    """

    fault: InjectedFault
    causes: frozenset[Cause]
    outside: bool = False

    def __hash__(self) -> int:
        return hash(self.fault.name)


def _kind(fault: InjectedFault, *causes: Cause, outside: bool = False) -> FaultKind:
    return FaultKind(fault, frozenset(causes), outside)


KINDS = (
    # More requests wait for each other, fill the batch, and interrupt it with their prompts.
    _kind(
        InjectedFault(name="queue surge", engine={"surge": 12}),
        *(Cause.BURST, Cause.BATCH_LOAD),
        *(Cause.PREFILL_CONTENTION, Cause.PREFILL_INTERFERENCE),
    ),
    # Their own prefill, and the queue, prefill and decode of the requests between them.
    _kind(
        InjectedFault(name="long prompts", engine={"long_ratio": 0.1, "long_tokens": 7500}),
        *(Cause.LONG_PROMPT, Cause.PREFILL_BACKLOG),
        *(Cause.PREFILL_CONTENTION, Cause.PREFILL_INTERFERENCE),
    ),
    _kind(
        InjectedFault(name="tiny KV cache", engine={"kv_taken": 0.97}),
        *(Cause.KV_PRESSURE, Cause.PREEMPTION),
    ),
    _kind(InjectedFault(name="few places", engine={"max_num_seqs": 2}), Cause.SEQUENCE_CAP),
    _kind(
        InjectedFault(name="slow grammar", engine={"defer_ratio": 1.0, "defer_s": 0.6}),
        *(Cause.DEFERRED, Cause.GRAMMAR),
    ),
    _kind(InjectedFault(name="cache lost", engine={"cache_lost": True}), Cause.CACHE_MISS),
    _kind(InjectedFault(name="CPU short", cpu_slowdown=4.0), Cause.CPU_STARVED),
    _kind(InjectedFault(name="GPU throttled", gpu_slowdown=3.0), Cause.GPU_THROTTLED),
    _kind(InjectedFault(name="slow tokeniser", engine={"front_s": 0.5}), Cause.TOKENISING),
    _kind(InjectedFault(name="cold start", cold_slowdown=4.0), Cause.COLD_START),
    _kind(InjectedFault(name="engine death", dies=True), Cause.ENGINE_FAILURE),
    _kind(InjectedFault(name="hold-back", hold_back_s=0.6), Cause.PARSER_HOLDBACK, outside=True),
    _kind(InjectedFault(name="network", network_s=0.5), Cause.NETWORK, outside=True),
    _kind(InjectedFault(name="slow client", client_token_s=0.06), Cause.SLOW_CLIENT, outside=True),
)
