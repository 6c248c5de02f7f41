"""The bill: of some time of an engine, of a user's window, and as a statement by group."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_FLOOR, Decimal
from itertools import pairwise
from math import fsum

from agent.analysis.efficiency.engine_observation import counter_increase
from agent.analysis.efficiency.request_activity import TimeRange
from agent.catalog.gpu_facts import ENERGY
from agent.catalog.time_units import HOUR_S
from agent.records.gpu import GpuSample
from agent.records.minute import Cost, MinuteRow, total
from agent.records.prices import Electricity, PriceList

# Unix seconds and joules.
_Point = tuple[float, float]


def energy_joules(
    samples: Iterable[GpuSample], gpus: Collection[str], time: TimeRange
) -> float | None:
    """Joules that these GPUs (UUIDs) drew in `time`; None if one's samples do not span it.

    Energy is taken to flow evenly between two samples. What a GPU drew between its last sample and
    a counter reset is unknown, so that the result is then a lower bound.
    """
    counted: dict[str, list[_Point]] = {gpu: [] for gpu in gpus}
    for sample in samples:
        joules = sample.fact(ENERGY.name)
        if sample.gpu in counted and joules is not None:
            counted[sample.gpu].append((sample.at, joules))
    drawn = [_drawn(sorted(points), time) for points in counted.values()]
    known = [joules for joules in drawn if joules is not None]
    return fsum(known) if known and len(known) == len(drawn) else None


def _drawn(points: Sequence[_Point], time: TimeRange) -> float | None:
    if not points or points[0][0] > time.from_at or points[-1][0] < time.until:
        return None
    return fsum(
        (counter_increase(before, after) or 0.0) * TimeRange(begun, ended).share_in(time)
        for (begun, before), (ended, after) in pairwise(points)
        if begun < ended
    )


_KWH_J = 3.6e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """Dollars. `electricity_usd` is None if it has no price or was not measured."""

    gpus_usd: float
    electricity_usd: float | None = None

    @property
    def usd(self) -> float:
        """All that is known of it."""
        return self.gpus_usd + (self.electricity_usd or 0.0)


def bill(
    prices: PriceList,
    time: TimeRange,
    *,
    engine: str,
    gpus: Sequence[str | None],
    joules: float | None = None,
) -> Bill | None:
    """Price x time x GPUs, and electricity; None if any GPU has no price at some moment.

    `gpus` holds the product name of each GPU of the engine, None if it is unknown.
    """
    parts = [_gpus_usd(prices, part, engine, gpus) for part in _between_changes(prices, time)]
    known = [usd for usd in parts if usd is not None]
    if not gpus or len(known) < len(parts):
        return None
    return Bill(gpus_usd=fsum(known), electricity_usd=electricity_usd(prices.electricity, joules))


def electricity_usd(electricity: Electricity | None, joules: float | None) -> float | None:
    """Dollars for the energy, times the building's PUE; None if price or energy is unknown."""
    if electricity is None or joules is None:
        return None
    return joules / _KWH_J * electricity.pue * electricity.usd_per_kwh


def gpu_hours(gpus: int, time: TimeRange) -> float:
    """GPU-hours of some time: a bill that needs no price."""
    return gpus * time.length_s / HOUR_S


def _between_changes(prices: PriceList, time: TimeRange) -> list[TimeRange]:
    changes = prices.changes_between(time.from_at, time.until)
    return [TimeRange(*ends) for ends in pairwise([time.from_at, *changes, time.until])]


def _gpus_usd(
    prices: PriceList, part: TimeRange, engine: str, gpus: Sequence[str | None]
) -> float | None:
    hourly = [prices.gpu_hour_usd(engine, gpu, part.from_at) for gpu in gpus]
    known = [usd for usd in hourly if usd is not None]
    if len(known) < len(hourly):
        return None
    return fsum(known) * part.length_s / HOUR_S


_MILLION = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRatios:
    """Dollars per something; None if there was none of it.

    *Active* figures are of busy time for requests with a row. `overhead` is the bill over the cost
    of the requests. *Allocated* figures spread the whole bill; output then is all that engines
    counted, rows or not.
    """

    per_million_computed_input: float | None
    per_million_cached_input: float | None
    per_million_input: float | None
    per_million_output: float | None
    allocated_per_million_output: float | None
    per_request: float | None
    overhead: float | None
    allocated_per_request: float | None
    allocated_per_million_good_tokens: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """Cost and energy of a window. `cost` and `ratios` are None if no minute has a price.

    Dollars, `ratios` and `methods` are those of the minutes with a price: `priced_s` of all
    engines' time together, without `unpriced_s`. `joules` and `gpu_hours` are None unless every
    minute knows its own. `joules_per_output_token` covers the minutes that know their joules.
    """

    bill_usd: float
    cost: Cost | None
    ratios: CostRatios | None
    methods: frozenset[str]
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
        methods=frozenset(minute.method for minute in priced),
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
        allocated_per_million_output=_per(bill_usd, work.counted_output_tokens, _MILLION),
        per_request=_per(cost.requests, requests),
        overhead=_per(bill_usd, cost.requests),
        allocated_per_request=_per(bill_usd, requests),
        allocated_per_million_good_tokens=_per(bill_usd, good_tokens, _MILLION),
    )


def _per(amount: float, count: float, unit: float = 1.0) -> float | None:
    return amount / count * unit if count > 0 else None


def _total(values: Sequence[float | None]) -> float | None:
    """The sum; None if there are no values or any is unknown."""
    known = [value for value in values if value is not None]
    return fsum(known) if known and len(known) == len(values) else None


# Lines are rounded to this, so that they add up as they are printed.
_CENT_PARTS = Decimal("0.000001")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpending:
    """A tenant, user and so on with its requests. Unknown figures are None."""

    group: str | None
    requests: int
    input_tokens: float | None
    output_tokens: float | None
    gpu_hours: float | None
    cost_usd: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BillParts:
    """A bill, and its parts: requests with a row, work without one, idle and unread time."""

    bill_usd: float
    rows_usd: float
    unaccounted_usd: float
    idle_usd: float
    unread_usd: float
    gpu_hours: float | None
    unaccounted_requests: float | None
    unaccounted_input_tokens: float | None
    unaccounted_output_tokens: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StatementLine:
    """One line; `group` is None on all lines but those of groups, and for requests without one."""

    line: str
    group: str | None = None
    requests: float | None = None
    input_tokens: float | None = None
    output_tokens: float | None = None
    gpu_hours: float | None = None
    cost_usd: Decimal | None = None


def statement(
    by: str, groups: Sequence[GroupSpending], bill: BillParts | None
) -> tuple[StatementLine, ...]:
    """The lines of the groups, then those that make up the bill, and the bill as the last one.

    No line is negative. Groups pay their `share_in_window`. `other requests` is the rest: requests
    beyond the listed groups, whose rows have expired, or that had not ended at the window's end.
    Without a bill there are only the groups.
    """
    if bill is None:
        return tuple(_group_line(by, group) for group in groups)
    part = share_in_window(groups, bill)
    lines = [_group_line(by, group, part) for group in groups]
    listed_usd = part * fsum(group.cost_usd or 0.0 for group in groups)
    lines += [
        StatementLine(
            line="unaccounted",
            requests=bill.unaccounted_requests,
            input_tokens=bill.unaccounted_input_tokens,
            output_tokens=bill.unaccounted_output_tokens,
        ),
        StatementLine(line="idle"),
        StatementLine(line="not read"),
        StatementLine(line="other requests"),
    ]
    whole = _rounded(bill.bill_usd)
    exact = [None if group.cost_usd is None else part * group.cost_usd for group in groups]
    exact += [bill.unaccounted_usd, bill.idle_usd, bill.unread_usd, bill.rows_usd - listed_usd]
    paid = [
        replace(line, cost_usd=usd)
        for line, usd in zip(lines, _adding_up(whole, exact), strict=True)
    ]
    return (*paid, StatementLine(line="bill", gpu_hours=bill.gpu_hours, cost_usd=whole))


def share_in_window(groups: Sequence[GroupSpending], bill: BillParts) -> float:
    """The part of the groups' cost that is in the bill: of long requests some is before it."""
    listed_usd = fsum(group.cost_usd or 0.0 for group in groups)
    return min(1.0, bill.rows_usd / listed_usd) if listed_usd > 0 else 1.0


def _adding_up(whole: Decimal, exact: Sequence[float | None]) -> list[Decimal | None]:
    """Parts in millionths that add up to the whole: those nearest to the next are rounded up."""
    known = {at: Decimal(str(max(usd, 0.0))) for at, usd in enumerate(exact) if usd is not None}
    paid = {at: usd.quantize(_CENT_PARTS, ROUND_FLOOR) for at, usd in known.items()}
    missing = int((whole - sum(paid.values())) / _CENT_PARTS)
    by_rest = sorted(known, key=lambda at: paid[at] - known[at])
    for at in by_rest[: max(missing, 0)]:
        paid[at] += _CENT_PARTS
    # Sums of many parts may differ in the last digits.
    paid[max(known, key=lambda at: known[at])] += whole - sum(paid.values())
    return [paid.get(at) for at in range(len(exact))]


def _group_line(by: str, group: GroupSpending, part: float = 1.0) -> StatementLine:
    return StatementLine(
        line=by,
        group=group.group,
        requests=group.requests,
        input_tokens=group.input_tokens,
        output_tokens=group.output_tokens,
        gpu_hours=None if group.gpu_hours is None else part * group.gpu_hours,
    )


def _rounded(usd: float) -> Decimal:
    # A sum has no zero with a sign.
    return Decimal(str(usd)).quantize(_CENT_PARTS) + 0
