"""Cost and energy of a user's window, from the booked minutes in it."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import fsum

from agent.analysis.cost.weights import Method
from agent.catalog.time_units import HOUR_S
from agent.records.minute import MinuteRow

_MILLION = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowCost:
    """Dollars and tokens of the minutes with a price. `methods` are those that were used."""

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
        """What all requests cost together, the aborted ones included."""
        return self.computed + self.cached + self.decode


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRatios:
    """Dollars per something; None where there was none of it.

    *Active* figures are of busy time for requests with a row. `overhead` is the bill over the cost
    of the requests. *Allocated* figures spread the whole bill.
    """

    per_million_computed_input: float | None
    per_million_cached_input: float | None
    per_million_input: float | None
    per_million_output: float | None
    per_request: float | None
    overhead: float | None
    allocated_per_request: float | None
    allocated_per_million_good_tokens: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """Cost and energy of a window. `cost` and `ratios` are None where no minute has a price.

    They cover the minutes with a price: `priced_s` of all engines' time together, without
    `unpriced_s`. `joules` and `gpu_hours` are None unless every minute knows its own.
    `joules_per_output_token` covers the minutes that know their joules.
    """

    cost: WindowCost | None
    ratios: CostRatios | None
    priced_s: float
    unpriced_s: float
    joules: float | None
    joules_per_output_token: float | None
    gpu_hours: float | None


def spending(minutes: Sequence[MinuteRow]) -> Spending:
    """What the minutes cost, and their energy."""
    priced = [minute for minute in minutes if minute.bill_usd is not None]
    metered = [minute for minute in minutes if minute.joules is not None]
    cost = _cost(priced) if priced else None
    return Spending(
        cost=cost,
        ratios=None if cost is None else _ratios(cost, priced),
        priced_s=fsum(minute.length_s for minute in priced),
        unpriced_s=fsum(minute.length_s for minute in minutes if minute.bill_usd is None),
        joules=_total([minute.joules for minute in minutes]),
        joules_per_output_token=_per(
            fsum(minute.joules or 0.0 for minute in metered),
            fsum(minute.counted_output_tokens for minute in metered),
        ),
        gpu_hours=_total(
            [None if m.gpus is None else m.gpus * m.length_s / HOUR_S for m in minutes]
        ),
    )


def usd_per_million_by_objective(minutes: Sequence[MinuteRow]) -> dict[str, float]:
    """The whole bill per million output tokens of requests that met each objective, in dollars.

    Of minutes with a price that know these tokens. Objectives that no request met are left out.
    """
    pairs = [(minute.bill_usd, minute.good_tokens_by_objective) for minute in minutes]
    known = [(usd, tokens) for usd, tokens in pairs if usd is not None and tokens is not None]
    good: defaultdict[str, list[float]] = defaultdict(list)
    for _, tokens in known:
        for objective, count in tokens.items():
            good[objective].append(count)
    bill = fsum(usd for usd, _ in known)
    return {
        objective: bill / fsum(counts) * _MILLION
        for objective, counts in good.items()
        if fsum(counts) > 0
    }


def _cost(priced: Sequence[MinuteRow]) -> WindowCost:
    def total(of_minute: Callable[[MinuteRow], float | None]) -> float:
        return fsum(of_minute(minute) or 0.0 for minute in priced)

    return WindowCost(
        bill=total(lambda minute: minute.bill_usd),
        idle=total(lambda minute: minute.idle_usd),
        unknown=total(lambda minute: minute.unknown_usd),
        unseen=total(lambda minute: minute.unseen_usd),
        aborted=total(lambda minute: minute.aborted_usd),
        computed=total(lambda minute: minute.computed_usd),
        cached=total(lambda minute: minute.cached_usd),
        decode=total(lambda minute: minute.decode_usd),
        computed_tokens=total(lambda minute: minute.computed_tokens),
        cached_tokens=total(lambda minute: minute.cached_tokens),
        output_tokens=total(lambda minute: minute.output_tokens),
        methods=frozenset(Method(minute.method) for minute in priced),
    )


def _ratios(cost: WindowCost, priced: Sequence[MinuteRow]) -> CostRatios:
    """The good tokens and all requests bear the whole bill."""
    prefill, tokens = cost.computed + cost.cached, cost.computed_tokens + cost.cached_tokens
    requests = sum(minute.requests for minute in priced)
    good_tokens = fsum(minute.good_tokens for minute in priced)
    return CostRatios(
        per_million_computed_input=_per(cost.computed, cost.computed_tokens, _MILLION),
        per_million_cached_input=_per(cost.cached, cost.cached_tokens, _MILLION),
        per_million_input=_per(prefill, tokens, _MILLION),
        per_million_output=_per(cost.decode, cost.output_tokens, _MILLION),
        per_request=_per(cost.requests, requests),
        overhead=_per(cost.bill, cost.requests),
        allocated_per_request=_per(cost.bill, requests),
        allocated_per_million_good_tokens=_per(cost.bill, good_tokens, _MILLION),
    )


def _per(amount: float, count: float, unit: float = 1.0) -> float | None:
    return amount / count * unit if count > 0 else None


def _total(values: Sequence[float | None]) -> float | None:
    """The sum; None where there are no values or any is unknown."""
    known = [value for value in values if value is not None]
    return fsum(known) if known and len(known) == len(values) else None
