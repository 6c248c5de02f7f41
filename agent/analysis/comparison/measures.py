"""What is compared of two runs: each figure, which way is better, and what change matters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from agent.analysis.comparison.cells import SplitRun
from agent.analysis.comparison.percentiles import both, percentiles
from agent.analysis.comparison.resampling import (
    Apart,
    Measured,
    Ratio,
    absolute,
    relative,
    together,
)
from agent.catalog.time_units import HOUR_S
from agent.records.columns import Array, Integers
from agent.records.event import EventKind

_MILLION = 1e6
# Requests beyond a percentile, without which it is the chance of a single one.
_BEYOND = 3
_LEAST_REQUESTS = 40
# A smaller change of the load is in every two runs, and explains little.
_LOAD_MATTERS = 0.05
# Tails are those of the busiest hours, which differ more from day to day.
_OF_TAIL = 2.0
QUANTILES = (0.5, 0.95, 0.99)


class Better(StrEnum):
    """Which way a figure is better; a figure of the load is neither."""

    LOWER = "lower"
    HIGHER = "higher"
    NEITHER = "neither"


class Quantity(StrEnum):
    """What a figure is of."""

    SECONDS = "s"
    SHARE = "share"
    REQUESTS_PER_S = "requests/s"
    TOKENS_PER_S = "tokens/s"
    PER_HOUR = "per hour"
    USD = "USD"
    TOKENS = "tokens"
    REQUESTS = "requests"


class Pair(NamedTuple):
    """A figure of both runs, and of the blocks of both together, those of `before` first."""

    before: Measured
    after: Measured
    both: Measured

    def grouped(self, of_before: Integers, of_after: Integers) -> "Pair":
        """The figure in longer blocks, which begin with these."""
        starts = np.concatenate([of_before, of_after + self.before.blocks])
        return Pair(
            self.before.grouped(of_before), self.after.grouped(of_after), self.both.grouped(starts)
        )


PairOf = Callable[[SplitRun, SplitRun], Pair | None]
SumsOf = Callable[[SplitRun], Ratio | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One line of a comparison. A smaller change than `least` does not matter.

    A change is a part of the figure before if `is_relative`, else a difference. `requests` are
    those that each run must have for a verdict.
    """

    name: str
    quantity: Quantity
    better: Better
    least: float
    pair: PairOf
    is_relative: bool = True
    requests: int = _LEAST_REQUESTS
    quantile: float | None = None

    @property
    def is_latency(self) -> bool:
        """Whether it is a percentile of a time."""
        return self.quantile is not None and self.quantity is Quantity.SECONDS

    @property
    def follows_load(self) -> bool:
        """Whether more load makes it worse, and less makes it better."""
        return self.is_latency

    @property
    def least_of_day(self) -> float:
        """By how much days differ that are alike: a rate as the load does, and a tail more."""
        is_rate = self.quantity in (Quantity.REQUESTS_PER_S, Quantity.TOKENS_PER_S)
        is_tail = self.is_latency and not self.is_median
        least = max(self.least, _LOAD_MATTERS) if is_rate else self.least
        return least * (_OF_TAIL if is_tail else 1.0)

    @property
    def is_median(self) -> bool:
        """Whether it is the median of a time."""
        return self.is_latency and self.quantile == QUANTILES[0]

    @property
    def is_share(self) -> bool:
        """Whether it lies between 0 and 1."""
        return self.quantity is Quantity.SHARE

    @property
    def apart(self) -> Apart:
        """How far two figures are apart."""
        return relative if self.is_relative else absolute

    def change(self, before: float, after: float) -> float | None:
        """A part of what it was, or the difference; None if it is unknown."""
        if not np.isfinite(before) or not np.isfinite(after):
            return None
        if not self.is_relative:
            return after - before
        return after / before - 1 if before > 0 else None


def percentile_name(name: str, quantile: float) -> str:
    """The name of a measure, such as TTFT p95."""
    return f"{name} p{quantile * 100:g}"


def _percentile_of(column: str, quantile: float) -> PairOf:
    def pair(before: SplitRun, after: SplitRun) -> Pair | None:
        columns = [each.sorted_column(column) for each in (before, after)]
        found = percentiles(quantile, columns, [before.cells.number, after.cells.number])
        return None if found is None else Pair(found[0], found[1], both(found[0], found[1]))

    return pair


def _percentiles_of(
    name: str, column: str, quantity: Quantity, better: Better, least: float
) -> tuple[Measure, ...]:
    return tuple(
        Measure(
            name=percentile_name(name, quantile),
            quantity=quantity,
            better=better,
            least=least,
            pair=_percentile_of(column, quantile),
            requests=max(round(_BEYOND / (1 - quantile)), _LEAST_REQUESTS),
            quantile=quantile,
        )
        for quantile in QUANTILES
    )


def _ratio_of(sums: SumsOf) -> PairOf:
    def pair(before: SplitRun, after: SplitRun) -> Pair | None:
        first, second = sums(before), sums(after)
        if first is None or second is None:
            return None
        return Pair(first, second, together(first, second))

    return pair


def _higher(name: str, quantity: Quantity, sums: SumsOf) -> Measure:
    return Measure(
        name=name, quantity=quantity, better=Better.HIGHER, least=0.03, pair=_ratio_of(sums)
    )


def _cost(name: str, sums: SumsOf) -> Measure:
    return Measure(
        name=name, quantity=Quantity.USD, better=Better.LOWER, least=0.03, pair=_ratio_of(sums)
    )


def _share(name: str, better: Better, least: float, sums: SumsOf) -> Measure:
    return Measure(
        name=name,
        quantity=Quantity.SHARE,
        better=better,
        least=least,
        pair=_ratio_of(sums),
        is_relative=False,
    )


def _events(name: str, kinds: Sequence[EventKind]) -> Measure:
    return Measure(
        name=name,
        quantity=Quantity.PER_HOUR,
        better=Better.LOWER,
        least=0.0,
        pair=_ratio_of(_events_of(kinds)),
        is_relative=False,
        requests=0,
    )


def _load(name: str, quantity: Quantity, sums: SumsOf) -> Measure:
    return Measure(
        name=name,
        quantity=quantity,
        better=Better.NEITHER,
        least=_LOAD_MATTERS,
        pair=_ratio_of(sums),
    )


def _known(values: Array) -> Array:
    return np.isfinite(values).astype(float)


def _mean(column: str) -> SumsOf:
    def ratio(split: SplitRun) -> Ratio | None:
        values = getattr(split.run, column)
        known = split.cells.sums(_known(values))
        return Ratio(split.cells.sums(values), known) if known.any() else None

    return ratio


def _rate(column: str) -> SumsOf:
    def ratio(split: SplitRun) -> Ratio | None:
        values = getattr(split.run, column)
        return Ratio(split.cells.sums(values), split.seconds) if _known(values).any() else None

    return ratio


def _requests(split: SplitRun) -> Ratio:
    return Ratio(split.cells.sums(np.ones(split.run.requests)), split.seconds)


def _of_minutes(part: str, whole: str, unit: float = 1.0) -> SumsOf:
    """A sum over another one, of the minutes that know both."""

    def ratio(split: SplitRun) -> Ratio | None:
        parts, wholes = (getattr(split.run.minutes, name) for name in (part, whole))
        known = _known(parts + wholes) > 0
        if not np.any(known & (wholes > 0)):
            return None
        sums = (split.minutes.sums(np.where(known, each, 0.0)) for each in (parts * unit, wholes))
        return Ratio(*sums)

    return ratio


def _events_of(kinds: Sequence[EventKind]) -> SumsOf:
    def ratio(split: SplitRun) -> Ratio | None:
        if split.run.events is None:
            return None
        counts = sum(split.events(split.run.events.get(kind, np.empty(0))) for kind in kinds)
        return Ratio(np.asarray(counts, dtype=float), split.seconds / HOUR_S)

    return ratio


OOM_KINDS = (EventKind.HOST_OOM, EventKind.CUDA_OOM)
DEATH_KINDS = (
    *(EventKind.ENGINE_DEAD, EventKind.HANG, EventKind.GPU_FAULT),
    EventKind.SIZING_ERROR,
)
_LATENCIES = (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("end to end", "e2e_s"))

ATTAINMENT, GOODPUT = "attainment", "goodput"
OUTPUT_RATE, ERRORS = "output tokens/s", "error ratio"
OOMS, OTHER_FAILURES = "OOMs", "other failures"

MEASURES: tuple[Measure, ...] = (
    *(
        measure
        for name, column in _LATENCIES
        for measure in _percentiles_of(name, column, Quantity.SECONDS, Better.LOWER, 0.03)
    ),
    _share(ATTAINMENT, Better.HIGHER, 0.01, _mean("met")),
    _higher(GOODPUT, Quantity.REQUESTS_PER_S, _rate("met")),
    _higher(OUTPUT_RATE, Quantity.TOKENS_PER_S, _rate("output_tokens")),
    _share(ERRORS, Better.LOWER, 0.005, _mean("failed")),
    _events(OOMS, OOM_KINDS),
    # A normal stop, too, begins with an engine that is unreachable.
    _events(OTHER_FAILURES, (*DEATH_KINDS, EventKind.UNREACHABLE)),
    _share("MFU", Better.HIGHER, 0.01, _of_minutes("flops", "possible_flops")),
    _share("MBU", Better.HIGHER, 0.01, _of_minutes("moved_bytes", "possible_bytes")),
    _cost("USD per million output tokens", _of_minutes("bill_usd", "output_tokens", _MILLION)),
    _cost("USD per million good tokens", _of_minutes("bill_usd", "good_tokens", _MILLION)),
)


REQUEST_RATE = _load("requests/s", Quantity.REQUESTS_PER_S, _requests)
# By Little's law: the time that all requests took, over the time.
IN_FLIGHT = _load("requests in flight", Quantity.REQUESTS, _rate("e2e_s"))
LENGTHS = (
    _load("input tokens, mean", Quantity.TOKENS, _mean("input_tokens")),
    *_percentiles_of(
        "input tokens", "input_tokens", Quantity.TOKENS, Better.NEITHER, _LOAD_MATTERS
    )[:2],
    _load("output tokens, mean", Quantity.TOKENS, _mean("output_tokens")),
    *_percentiles_of(
        "output tokens", "output_tokens", Quantity.TOKENS, Better.NEITHER, _LOAD_MATTERS
    )[:2],
)
LOAD_MEASURES = (REQUEST_RATE, IN_FLIGHT, *LENGTHS)
