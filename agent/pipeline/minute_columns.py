"""The columns of a kept window, from what was counted in it."""

from dataclasses import asdict
from typing import Any

from agent.analysis.cost.bill import Bill
from agent.analysis.cost.minute_cost import MinuteCost
from agent.analysis.efficiency.minute_efficiency import MinuteEfficiency
from agent.analysis.efficiency.observation import Observation
from agent.analysis.efficiency.phase_work import PhaseTotals
from agent.analysis.efficiency.work import StepSource
from agent.records.minute import MinuteRow

_STEPS = {StepSource.COUNTED: "counted", StepSource.ESTIMATED: "estimated"}


def counted_columns(observed: Observation, busy_s: float, output_tokens: float) -> dict[str, Any]:
    """What the engine tells, which may be less than the `output_tokens` of its rows."""
    growth = observed.growth
    return {
        "counted_output_tokens": max(growth.output_tokens or 0.0, output_tokens),
        "cache_full_s": min(observed.cache_full_s, busy_s),
        "preemptions": growth.preemptions,
        "draft_tokens": growth.draft_tokens,
        "accepted_draft_tokens": growth.accepted_draft_tokens,
    }


def work_columns(phases: PhaseTotals | None) -> dict[str, Any]:
    """Work and seconds by phase; nothing where the model is not known."""
    if phases is None:
        return {}
    return {
        "steps": _STEPS[phases.steps],
        "prefill_s": phases.prefill_s,
        "prefill_flops": phases.prefill_work.flops,
        "prefill_bytes": phases.prefill_work.bytes_moved,
        "decode_s": phases.decode_s,
        "decode_flops": phases.decode_work.flops,
        "decode_bytes": phases.decode_work.bytes_moved,
        "shared_bytes": phases.shared_bytes,
    }


def view_columns(found: MinuteEfficiency, before: MinuteRow | None) -> dict[str, Any]:
    """What the engine and the GPUs say; of GPUs, few readings outlast some minutes."""
    hardware = (found.hardware.mfu, found.hardware.mbu)
    if before is not None:
        hardware = (before.hardware_mfu, before.hardware_mbu)
    return {
        "engine_mfu": found.engine.mfu,
        "engine_mbu": found.engine.mbu,
        "hardware_mfu": hardware[0],
        "hardware_mbu": hardware[1],
        "disagreements": tuple(asdict(each) for each in found.disagreements),
    }


def dollar_columns(billed: Bill | None, cost: MinuteCost | None) -> dict[str, Any]:
    """The bill and what it was for; nothing without a price."""
    if billed is None or cost is None:
        return {}
    return {
        "gpus_usd": billed.gpus_usd,
        "electricity_usd": billed.electricity_usd,
        "idle_usd": cost.idle,
        "unknown_usd": cost.unknown,
        "unseen_usd": cost.unseen,
        "aborted_usd": cost.aborted,
        "aborted_prefill_usd": cost.aborted_prefill,
        "computed_usd": cost.computed,
        "cached_usd": cost.cached,
        "decode_usd": cost.decode,
    }
