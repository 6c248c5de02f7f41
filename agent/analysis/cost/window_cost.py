"""What kept windows cost together."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

from agent.analysis.cost.energy import joules_per_output_token
from agent.analysis.cost.minute_cost import MinuteCost
from agent.analysis.cost.period import CostRatios, WindowCost, cost_ratios, window_cost
from agent.analysis.cost.weights import Method
from agent.records.minute import MinuteRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """Windows together: costs and ratios in dollars, None where none of them has a price.

    They are of the windows with a price, which are `priced_s` of all engines' time together;
    `unpriced_s` are the rest. `joules` and `gpu_hours` are None unless all windows tell theirs, the
    joules of a token are of the windows that do.
    """

    cost: WindowCost | None
    ratios: CostRatios | None
    priced_s: float
    unpriced_s: float
    joules: float | None
    joules_per_output_token: float | None
    gpu_hours: float | None


def spending(windows: Sequence[MinuteRow]) -> Spending:
    """What the windows cost, and their energy."""
    priced = [window for window in windows if window.bill_usd is not None]
    cost = window_cost([_cost(window) for window in priced])
    metered = [window for window in windows if window.joules is not None]
    hours = _total([None if w.gpus is None else w.gpus * w.length_s / 3600 for w in windows])
    return Spending(
        cost=cost,
        ratios=cost_ratios(
            cost,
            requests=sum(window.requests for window in priced),
            good_tokens=fsum(window.good_tokens for window in priced),
        ),
        priced_s=fsum(window.length_s for window in priced),
        unpriced_s=fsum(window.length_s for window in windows if window.bill_usd is None),
        joules=_total([window.joules for window in windows]),
        joules_per_output_token=joules_per_output_token(
            _total([window.joules for window in metered]),
            fsum(window.counted_output_tokens for window in metered),
        ),
        gpu_hours=hours,
    )


def _total(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fsum(known) if known and len(known) == len(values) else None


def _cost(window: MinuteRow) -> MinuteCost:
    """The window, which has a price, without its requests."""
    return MinuteCost(
        bill=window.bill_usd or 0.0,
        idle=window.idle_usd or 0.0,
        unknown=window.unknown_usd or 0.0,
        unseen=window.unseen_usd or 0.0,
        aborted=window.aborted_usd or 0.0,
        aborted_prefill=window.aborted_prefill_usd or 0.0,
        computed=window.computed_usd or 0.0,
        cached=window.cached_usd or 0.0,
        decode=window.decode_usd or 0.0,
        requests={},
        computed_tokens=window.computed_tokens,
        cached_tokens=window.cached_tokens,
        output_tokens=window.output_tokens,
        method=Method(window.method),
    )
