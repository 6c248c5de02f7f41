"""Efficiency and cost of a window, from the minutes that are kept."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from math import fsum
from typing import Any

from agent.analysis.cost.good_tokens import usd_per_million_by_objective
from agent.analysis.cost.window_cost import spending
from agent.analysis.efficiency.window_efficiency import (
    Utilisation,
    WindowEfficiency,
    window_efficiency,
)
from agent.outputs.api import efficiency_schema as a
from agent.records.minute import MinuteRow
from agent.records.queries import Selection, Window

Windows = Callable[[Window, Selection], Sequence[MinuteRow]]


def efficiency_and_cost(ask: Windows, over: Window, chosen: Selection) -> dict[str, Any]:
    """The fields of a summary; none where nothing was counted.

    GPUs work for all requests at once: of a tenant or an objective alone nothing is told.
    """
    if chosen.tenant is not None or chosen.objective is not None:
        return {}
    windows = ask(over, chosen)
    found = window_efficiency(windows)
    if found is None:
        return {}
    counted: dict[str, Any] = {
        "counted_from": _moment(min(window.from_at for window in windows)),
        "counted_until": _moment(max(window.until for window in windows)),
    }
    return {
        "mfu": found.mfu,
        "mbu": found.mbu,
        "efficiency": a.EfficiencyAnswer(**counted, **_efficiency(found)),
        "cost": _cost(windows, counted),
    }


def _moment(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)


def _efficiency(found: WindowEfficiency) -> dict[str, Any]:
    sources = {
        "requests": (found.mfu, found.mbu),
        "engine": found.engine,
        "hardware": found.hardware,
    }
    return {
        "prefill": _use(found.prefill),
        "decode": _use(found.decode),
        "busy": _use(found.busy),
        "sources": {name: a.UseAnswer(mfu=mfu, mbu=mbu) for name, (mfu, mbu) in sources.items()},
        "steps": sorted(found.steps),
        "disagreements": [a.DisagreementAnswer(**each) for each in found.disagreements],
        "rejected_draft_share": found.rejected_draft_share,
        "preemptions": found.preemptions,
    }


def _use(use: Utilisation | None) -> a.UseAnswer | None:
    if use is None:
        return None
    at = use.position
    return a.UseAnswer(
        mfu=use.mfu,
        mbu=use.mbu,
        achieved_flops_per_s=use.achieved_flops_per_s,
        achieved_bytes_per_s=use.achieved_bytes_per_s,
        flops_per_byte=None if at is None else at.intensity,
        ridge_flops_per_byte=None if at is None else at.ridge,
        roofline_share=None if at is None else at.share,
        bound=use.bound,
        actions=list(use.actions),
    )


def _cost(windows: Sequence[MinuteRow], counted: dict[str, Any]) -> a.CostAnswer | None:
    spent = spending(windows)
    cost, per = spent.cost, spent.ratios
    if cost is None or per is None:
        return None
    priced = [window for window in windows if window.bill_usd is not None]
    electricity = [window.electricity_usd for window in priced]
    known = [usd for usd in electricity if usd is not None]
    return a.CostAnswer(
        **counted,
        priced_s=spent.priced_s,
        unpriced_s=spent.unpriced_s,
        bill_usd=cost.bill,
        busy_usd=cost.requests + cost.unseen,
        prefill_usd=cost.computed + cost.cached,
        decode_usd=cost.decode,
        idle_usd=cost.idle,
        unknown_usd=cost.unknown,
        unseen_usd=cost.unseen,
        aborted_usd=cost.aborted,
        wasted_usd=cost.unseen + cost.aborted,
        electricity_usd=fsum(known) if len(known) == len(electricity) else None,
        usd_per_hour=_usd_per_hour(priced),
        usd_per_million_input_tokens=per.per_million_input,
        usd_per_million_computed_input_tokens=per.per_million_computed_input,
        usd_per_million_cached_input_tokens=per.per_million_cached_input,
        usd_per_million_output_tokens=per.per_million_output,
        usd_per_request=per.per_request,
        overhead=per.overhead,
        allocated_usd_per_request=per.allocated_per_request,
        usd_per_million_tokens_within_objective=per.allocated_per_million_good_tokens,
        usd_per_million_tokens_by_objective=usd_per_million_by_objective(priced),
        gpu_hours=spent.gpu_hours,
        joules=spent.joules,
        joules_per_output_token=spent.joules_per_output_token,
        methods=sorted(cost.methods),
    )


def _usd_per_hour(windows: Sequence[MinuteRow]) -> float:
    """Each engine by its own minutes: one may have been counted in fewer of them than another."""
    of_engine: dict[str, list[MinuteRow]] = {}
    for window in windows:
        of_engine.setdefault(window.engine, []).append(window)
    return fsum(
        3600 * fsum(w.bill_usd or 0.0 for w in own) / fsum(w.length_s for w in own)
        for own in of_engine.values()
    )
