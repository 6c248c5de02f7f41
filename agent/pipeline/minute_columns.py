"""The columns of a booked minute, from the analysis of its samples and requests."""

from dataclasses import asdict
from typing import Any

from agent.analysis.cost.bill import Bill
from agent.analysis.cost.minute_cost import MinuteCost
from agent.analysis.efficiency.engine_observation import EngineObservation
from agent.analysis.efficiency.minute_efficiency import MinuteEfficiency
from agent.analysis.efficiency.phase_work import PhaseTotals
from agent.records.minute import MinuteRow


def counter_columns(
    observed: EngineObservation, busy_s: float, output_tokens: float
) -> dict[str, Any]:
    """What the engine counted: output tokens at least those of its rows, cache at most busy."""
    growth = observed.growth
    return {
        "counted_output_tokens": max(growth.output_tokens or 0.0, output_tokens),
        "cache_full_s": min(observed.cache_full_s, busy_s),
        "preemptions": growth.preemptions,
        "draft_tokens": growth.draft_tokens,
        "accepted_draft_tokens": growth.accepted_draft_tokens,
    }


def work_columns(totals: PhaseTotals | None) -> dict[str, Any]:
    """Work and seconds by phase; empty where the model is unknown."""
    if totals is None:
        return {}
    return {
        "steps": totals.steps.value,
        "prefill_s": totals.prefill_s,
        "prefill_flops": totals.prefill_work.flops,
        "prefill_bytes": totals.prefill_work.bytes_moved,
        "decode_s": totals.decode_s,
        "decode_flops": totals.decode_work.flops,
        "decode_bytes": totals.decode_work.bytes_moved,
        "shared_bytes": totals.shared_bytes,
    }


def source_columns(found: MinuteEfficiency, before: MinuteRow | None) -> dict[str, Any]:
    """The engine's and the hardware's figures.

    A minute that is booked again keeps the hardware's: most GPU samples live only some minutes.
    """
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
    """The bill and its parts; empty without a price."""
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
