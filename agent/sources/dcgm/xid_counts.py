"""Xid errors, counted from the series of dcgm-exporter about them."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from agent.catalog import gpu_facts as f
from agent.catalog.dcgm_fields import XID_LAST, XID_TOTAL, XID_WINDOW, is_blank
from agent.catalog.gpu_problems import COUNTED_XIDS
from agent.records.gpu import Facts

Rows = Iterable[tuple[Mapping[str, str], float]]
# The value by Xid in one kind of series.
Levels = Mapping[int, int]

# Real ones have three digits; a broken exposition must not make a series of every number.
_LARGEST_XID = 9999


class XidSeries(Enum):
    """The kinds of series about Xids, by their names."""

    LAST = XID_LAST
    WINDOW = (XID_WINDOW,)
    TOTAL = (XID_TOTAL,)


XidLevels = Mapping[XidSeries, Levels]

XID_SERIES = frozenset(name for kind in XidSeries for name in kind.value)


def levels(kind: XidSeries, rows: Rows, dropped: Counter[str]) -> Levels:
    """The value by Xid in the rows of one GPU; rows without a usable one count in `dropped`.

    Rows for several pods or instances each repeat the GPU's value: the highest one counts.
    """
    found: dict[int, int] = {}
    for labels, value in rows:
        if is_blank(value):
            continue
        try:
            xid, level = _READ[kind](labels, value)
        except ValueError:
            dropped["xid_malformed"] += 1
            continue
        if xid:
            found[xid] = max(level, found.get(xid, 0))
    return found


def _last(_labels: Mapping[str, str], value: float) -> tuple[int, int]:
    return _checked(value), 1


def _counted(labels: Mapping[str, str], value: float) -> tuple[int, int]:
    # A window without an Xid is a zero without the label.
    xid = _checked(float(labels.get("xid") or 0))
    if value < 0:
        raise ValueError
    return xid, int(value)


def _checked(xid: float) -> int:
    if not (0 <= xid <= _LARGEST_XID and xid == int(xid)):
        raise ValueError
    return int(xid)


_READ: Mapping[XidSeries, Callable[[Mapping[str, str], float], tuple[int, int]]] = {
    XidSeries.LAST: _last,
    XidSeries.WINDOW: _counted,
    XidSeries.TOTAL: _counted,
}


@dataclass(slots=True)
class _GpuXids:
    levels: dict[XidSeries, Levels]
    counted: dict[XidSeries, Counter[int]] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    facts: Facts = field(default_factory=dict)

    def take(self, kind: XidSeries, now: Levels) -> None:
        before = self.levels.get(kind, {})
        counted = self.counted.setdefault(kind, Counter())
        for xid, level in now.items():
            counted[xid] += _growth(kind, before.get(xid, 0), level)
        # A total keeps its last value, so that a row that was missing once is not an increase.
        self.levels[kind] = {**before, **now} if kind is XidSeries.TOTAL else now

    def new(self) -> dict[int, int]:
        most: Counter[int] = Counter()
        for counted in self.counted.values():
            most |= counted
        return {xid: count for xid, count in most.items() if count > self.counts.get(xid, 0)}


def _growth(kind: XidSeries, before: int, now: int) -> int:
    """How many errors are new at least, if a series went from one value to another."""
    if now >= before:
        return now - before
    # A total falls when the exporter restarts; a window falls as it moves on.
    return now if kind is XidSeries.TOTAL else 0


class XidCounts:
    """How often each GPU had each Xid since its first exposition. It outlives the exporter.

    The first exposition is where counting starts. A series that is absent keeps its last value:
    after an interval without it, only the difference is new. All series report the same errors,
    at different times, so the highest count of any series counts.
    """

    def __init__(self) -> None:
        self._gpus: dict[str, _GpuXids] = {}

    def read(self, gpu: str, xids: XidLevels, at: float) -> Mapping[int, int]:
        """Take in an exposition; returns the Xids that are new in it, with their count in all."""
        state = self._gpus.get(gpu)
        if state is None:
            state = self._gpus[gpu] = _GpuXids(dict(xids))
        for kind, now in xids.items():
            state.take(kind, now)
        new = state.new()
        state.counts |= new
        if xids or state.facts:
            state.facts = _facts(state, new, at)
        return new

    def facts(self, gpu: str) -> Facts:
        """The counts as facts; none for a GPU without any series about Xids."""
        state = self._gpus.get(gpu)
        return {} if state is None else state.facts


def _facts(state: _GpuXids, new: Iterable[int], at: float) -> Facts:
    counts = {**dict.fromkeys(COUNTED_XIDS, 0), **state.counts}
    return {
        **state.facts,
        **{(f.XID_ERRORS.name, (str(xid),)): float(count) for xid, count in counts.items()},
        **{(f.XID_LAST_SEEN.name, (str(xid),)): at for xid in new},
    }
