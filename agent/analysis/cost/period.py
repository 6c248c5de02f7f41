"""What requests and tokens cost over many windows."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

from agent.analysis.cost.minute_cost import MinuteCost
from agent.analysis.cost.weights import Method

_MILLION = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowCost:
    """The sums of windows, all in the unit of their bills. `methods` are those that were used."""

    bill: float
    idle: float
    unknown: float
    unseen: float
    aborted: float
    computed: float
    cached: float
    decode: float
    computed_tokens: float
    cached_tokens: float
    output_tokens: float
    methods: frozenset[Method]

    @property
    def requests(self) -> float:
        """What all requests cost together, those that were aborted among them."""
        return self.computed + self.cached + self.decode


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRatios:
    """Costs per something, None where there was none of it.

    *Active* figures are of busy time spent on requests with a row. Times `overhead` they are
    *allocated*: idle, unknown and unseen spread over them, so that they make up the bill.
    """

    per_million_computed_input: float | None
    per_million_cached_input: float | None
    per_million_input: float | None
    per_million_output: float | None
    per_request: float | None
    overhead: float | None
    allocated_per_request: float | None
    allocated_per_million_good_tokens: float | None


def window_cost(costs: Sequence[MinuteCost]) -> WindowCost | None:
    """The windows together; None where there is none."""
    if not costs:
        return None
    return WindowCost(
        bill=fsum(cost.bill for cost in costs),
        idle=fsum(cost.idle for cost in costs),
        unknown=fsum(cost.unknown for cost in costs),
        unseen=fsum(cost.unseen for cost in costs),
        aborted=fsum(cost.aborted for cost in costs),
        computed=fsum(cost.computed for cost in costs),
        cached=fsum(cost.cached for cost in costs),
        decode=fsum(cost.decode for cost in costs),
        computed_tokens=fsum(cost.computed_tokens for cost in costs),
        cached_tokens=fsum(cost.cached_tokens for cost in costs),
        output_tokens=fsum(cost.output_tokens for cost in costs),
        methods=frozenset(cost.method for cost in costs),
    )


def cost_ratios(
    period: WindowCost | None, *, requests: int, good_tokens: float
) -> CostRatios | None:
    """What the period's tokens and requests cost; None without a price.

    `requests` are those that were worked on and ended in it, `good_tokens` the output tokens of
    those that met their objective. The latter bear the whole bill.
    """
    if period is None:
        return None
    prefill, tokens = period.computed + period.cached, period.computed_tokens + period.cached_tokens
    return CostRatios(
        per_million_computed_input=_per(period.computed, period.computed_tokens, _MILLION),
        per_million_cached_input=_per(period.cached, period.cached_tokens, _MILLION),
        per_million_input=_per(prefill, tokens, _MILLION),
        per_million_output=_per(period.decode, period.output_tokens, _MILLION),
        per_request=_per(period.requests, requests),
        overhead=_per(period.bill, period.requests),
        allocated_per_request=_per(period.bill, requests),
        allocated_per_million_good_tokens=_per(period.bill, good_tokens, _MILLION),
    )


def _per(amount: float, count: float, unit: float = 1.0) -> float | None:
    return amount / count * unit if count > 0 else None
