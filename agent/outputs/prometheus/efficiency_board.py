"""How well GPUs were used and what that cost, for the metrics page."""

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import fsum, inf

from agent.analysis.cost.good_tokens import usd_per_million_by_objective
from agent.analysis.cost.window_cost import spending
from agent.analysis.efficiency.window_efficiency import Utilisation, window_efficiency
from agent.catalog import efficiency_metrics as m
from agent.catalog.metric import Metric
from agent.outputs.prometheus.families import Family, family_of
from agent.outputs.prometheus.meter import UNKNOWN
from agent.records.minute import MinuteRow

Labels = tuple[str, ...]
Values = Iterator[tuple[Metric, Labels, float | None]]


class EfficiencyBoard:
    """Holds the newest window of each engine and adds all up; safe to use from several threads."""

    def __init__(self) -> None:
        self._newest: dict[str, MinuteRow] = {}
        self._counters: defaultdict[tuple[Metric, Labels], float] = defaultdict(float)
        self._sums: defaultdict[tuple[Metric, Labels], float] = defaultdict(float)
        self._lock = threading.Lock()

    def counted(self, window: MinuteRow, before: MinuteRow | None) -> None:
        """Show a window, counted for the first time or in place of what it was `before`."""
        with self._lock:
            for metric, labels, value in _sums(window):
                self._sums[metric, labels] += value
            for metric, labels, value in () if before is None else _sums(before):
                self._sums[metric, labels] -= value
            for metric, of in {(metric, labels[:2]) for metric, labels in self._sums}:
                self._raise(metric, of)
            newest = self._newest.get(window.engine)
            if newest is None or window.starts_at >= newest.starts_at:
                self._newest[window.engine] = window

    def _raise(self, metric: Metric, of: Labels) -> None:
        """Bring the counters of one engine up to their sums, and no further than all together.

        A counter never falls. While one is above its sum, since what it told turned out to be
        another's, those others wait: all together are the bill at any time.
        """
        keys = [key for key in self._sums if key[0] is metric and key[1][:2] == of]
        apart = {key: self._sums[key] - self._counters[key] for key in keys}
        more = max(fsum(apart.values()), 0.0)
        behind = {key: amount for key, amount in apart.items() if amount > 0}
        share = min(more / fsum(behind.values()), 1.0) if behind else 0.0
        for key, amount in behind.items():
            self._counters[key] += amount * share

    def families(self) -> Iterator[Family]:
        """Every figure that is known."""
        with self._lock:
            told = [(metric, labels, value) for (metric, labels), value in self._counters.items()]
            newest = list(self._newest.values())
        shown: defaultdict[Metric, dict[Labels, float]] = defaultdict(dict)
        for window in newest:
            for metric, labels, known in _gauges(window):
                if known is not None:
                    shown[metric][labels] = known
        for metric, labels, value in told:
            shown[metric][labels] = value
        yield from _families(shown)


def _families(shown: Mapping[Metric, Mapping[Labels, float]]) -> Iterator[Family]:
    for metric in m.EFFICIENCY_METRICS:
        if metric in shown:
            yield family_of(metric, metric.labels, shown[metric].items())


def _sums(window: MinuteRow) -> Iterator[tuple[Metric, Labels, float]]:
    """What is added up; nothing that is not known, which is not 0."""
    of = (window.engine, window.model or UNKNOWN)
    for state in ("busy", "idle", "unknown"):
        yield m.TIME, (*of, state), getattr(window, f"{state}_s")
    if window.joules is not None:
        yield m.ENERGY, of, window.joules
    if window.bill_usd is not None:
        for share, usd in shares_usd(window).items():
            yield m.COST, (*of, share), usd


def shares_usd(window: MinuteRow) -> dict[str, float]:
    """The bill of a window that has one, by what it was for."""
    aborted, in_prefill = window.aborted_usd or 0.0, window.aborted_prefill_usd or 0.0
    return {
        "prefill": (window.computed_usd or 0.0) + (window.cached_usd or 0.0) - in_prefill,
        "decode": (window.decode_usd or 0.0) - (aborted - in_prefill),
        "aborted": aborted,
        "unseen": window.unseen_usd or 0.0,
        "idle": window.idle_usd or 0.0,
        "unknown": window.unknown_usd or 0.0,
    }


def _gauges(window: MinuteRow) -> Values:
    of = (window.engine, window.model or UNKNOWN)
    yield from _efficiency(window, of)
    spent = spending([window])
    per = spent.ratios
    if per is not None and window.bill_usd is not None:
        yield m.COST_PER_MILLION, (*of, "input"), per.per_million_input
        yield m.COST_PER_MILLION, (*of, "computed_input"), per.per_million_computed_input
        yield m.COST_PER_MILLION, (*of, "cached_input"), per.per_million_cached_input
        yield m.COST_PER_MILLION, (*of, "output"), per.per_million_output
        good = per.allocated_per_million_good_tokens
        yield m.COST_PER_MILLION, (*of, "within_objective"), good
        for objective, usd in usd_per_million_by_objective([window]).items():
            yield m.COST_PER_MILLION_GOOD, (*of, objective), usd
        yield m.COST_PER_REQUEST, of, per.allocated_per_request
        yield m.COST_PER_HOUR, of, window.bill_usd / window.length_s * 3600
    yield m.ENERGY_PER_TOKEN, of, spent.joules_per_output_token


def _efficiency(window: MinuteRow, of: Labels) -> Values:
    found = window_efficiency([window])
    assert found is not None, "there is a window"
    for source, (mfu, mbu) in (
        ("requests", (found.mfu, found.mbu)),
        ("engine", found.engine),
        ("hardware", found.hardware),
    ):
        yield m.MFU, (*of, "all", source), mfu
        yield m.MBU, (*of, "all", source), mbu
    for phase, use in (("prefill", found.prefill), ("decode", found.decode), ("all", found.busy)):
        if use is not None:
            yield from _use(use, (*of, phase))
    for each in found.disagreements:
        labels = (*of, each["figure"], each["higher"], each["lower"], each.get("cause", UNKNOWN))
        yield m.DISAGREEMENT, labels, inf if each["times"] is None else each["times"]


def _use(use: Utilisation, labels: Labels) -> Values:
    engine, model, phase = labels
    if phase != "all":
        yield m.MFU, (*labels, "requests"), use.mfu
        yield m.MBU, (*labels, "requests"), use.mbu
    if use.position is not None:
        yield m.INTENSITY, labels, use.position.intensity
        yield m.RIDGE, (engine, model), use.position.ridge
        yield m.ROOF_SHARE, labels, use.position.share
    if use.bound is not None:
        yield m.BOUND, (*labels, use.bound.value), 1.0
