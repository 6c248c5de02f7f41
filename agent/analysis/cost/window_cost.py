"""Cost and energy of a user's window, from the booked minutes in it."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

from agent.analysis.cost.weights import Method
from agent.catalog.time_units import HOUR_S
from agent.records.minute import Cost, MinuteRow, total

_MILLION = 1e6


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

    Dollars, `ratios` and `methods` are those of the minutes with a price: `priced_s` of all
    engines' time together, without `unpriced_s`. `joules` and `gpu_hours` are None unless every
    minute knows its own. `joules_per_output_token` covers the minutes that know their joules.
    """

    bill_usd: float
    cost: Cost | None
    ratios: CostRatios | None
    methods: frozenset[Method]
    priced_s: float
    unpriced_s: float
    joules: float | None
    joules_per_output_token: float | None
    gpu_hours: float | None


def spending(minutes: Sequence[MinuteRow]) -> Spending:
    """What the minutes cost, and their energy."""
    priced = [minute for minute in minutes if minute.bill_usd is not None]
    metered = [minute for minute in minutes if minute.joules is not None]
    bill_usd = fsum(minute.bill_usd or 0.0 for minute in priced)
    cost = total(minute.cost for minute in priced if minute.cost is not None)
    return Spending(
        bill_usd=bill_usd,
        cost=cost,
        ratios=None if cost is None else _ratios(bill_usd, cost, priced),
        methods=frozenset(Method(minute.method) for minute in priced),
        priced_s=fsum(minute.length_s for minute in priced),
        unpriced_s=fsum(minute.length_s for minute in minutes if minute.bill_usd is None),
        joules=_total([minute.joules for minute in minutes]),
        joules_per_output_token=_per(
            fsum(minute.joules or 0.0 for minute in metered),
            fsum(minute.work.counted_output_tokens for minute in metered),
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


def _ratios(bill_usd: float, cost: Cost, priced: Sequence[MinuteRow]) -> CostRatios:
    """The good tokens and all requests bear the whole bill."""
    work = total(minute.work for minute in priced)
    assert work is not None, "a minute has a price"
    requests = sum(minute.requests for minute in priced)
    good_tokens = fsum(minute.good_tokens for minute in priced)
    return CostRatios(
        per_million_computed_input=_per(cost.computed, work.computed_tokens, _MILLION),
        per_million_cached_input=_per(cost.cached, work.cached_tokens, _MILLION),
        per_million_input=_per(cost.prefill, work.prompt_tokens, _MILLION),
        per_million_output=_per(cost.decode, work.output_tokens, _MILLION),
        per_request=_per(cost.requests, requests),
        overhead=_per(bill_usd, cost.requests),
        allocated_per_request=_per(bill_usd, requests),
        allocated_per_million_good_tokens=_per(bill_usd, good_tokens, _MILLION),
    )


def _per(amount: float, count: float, unit: float = 1.0) -> float | None:
    return amount / count * unit if count > 0 else None


def _total(values: Sequence[float | None]) -> float | None:
    """The sum; None where there are no values or any is unknown."""
    known = [value for value in values if value is not None]
    return fsum(known) if known and len(known) == len(values) else None
