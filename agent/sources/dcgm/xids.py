"""Xid errors, counted from what an exporter's pages say of them."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from agent.catalog import gpu_facts as f
from agent.catalog.dcgm_fields import XID_LAST, XID_TOTAL, XID_WINDOW, is_blank
from agent.catalog.xids import COUNTED_XIDS
from agent.records.gpu import Facts

Rows = Iterable[tuple[Mapping[str, str], float]]
# How often by Xid, as one kind of series puts it.
Levels = Mapping[int, int]

# Real ones have three digits; a broken page must not make a series of every number.
_LARGEST_XID = 9999


class XidSource(Enum):
    """The kinds of series that tell of Xids, by their names."""

    LAST = XID_LAST
    WINDOW = (XID_WINDOW,)
    TOTAL = (XID_TOTAL,)


Told = Mapping[XidSource, Levels]

XID_SERIES = frozenset(name for source in XidSource for name in source.value)


def levels(source: XidSource, rows: Rows, dropped: Counter[str]) -> Levels:
    """What the rows of one GPU say by Xid; rows without a usable number count in `dropped`.

    Of rows for several pods or instances the highest stands: each repeats the GPU's number.
    """
    told: dict[int, int] = {}
    for labels, value in rows:
        if is_blank(value):
            continue
        try:
            xid, level = _READ[source](labels, value)
        except ValueError:
            dropped["xid_malformed"] += 1
            continue
        if xid:
            told[xid] = max(level, told.get(xid, 0))
    return told


def _last(_labels: Mapping[str, str], value: float) -> tuple[int, int]:
    return _checked(value), 1


def _counted(labels: Mapping[str, str], value: float) -> tuple[int, int]:
    # While there was no Xid, the window is told as a zero without the label.
    xid = _checked(float(labels.get("xid") or 0))
    if value < 0:
        raise ValueError
    return xid, int(value)


def _checked(xid: float) -> int:
    if not (0 <= xid <= _LARGEST_XID and xid == int(xid)):
        raise ValueError
    return int(xid)


_READ: Mapping[XidSource, Callable[[Mapping[str, str], float], tuple[int, int]]] = {
    XidSource.LAST: _last,
    XidSource.WINDOW: _counted,
    XidSource.TOTAL: _counted,
}


@dataclass(slots=True)
class _Gpu:
    levels: dict[XidSource, Levels]
    seen: dict[XidSource, Counter[int]] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    facts: Facts = field(default_factory=dict)

    def take(self, source: XidSource, now: Levels) -> None:
        before = self.levels.get(source, {})
        seen = self.seen.setdefault(source, Counter())
        for xid, level in now.items():
            seen[xid] += _growth(source, before.get(xid, 0), level)
        # A total stays until it is told again, so that a row that was missing once is no growth.
        self.levels[source] = {**before, **now} if source is XidSource.TOTAL else now

    def news(self) -> dict[int, int]:
        most: Counter[int] = Counter()
        for seen in self.seen.values():
            most |= seen
        return {xid: count for xid, count in most.items() if count > self.counts.get(xid, 0)}


def _growth(source: XidSource, before: int, now: int) -> int:
    """How many errors are new at least, where a series went from one level to another."""
    if now >= before:
        return now - before
    # A total falls when the exporter starts anew; the window falls as it moves on.
    return now if source is XidSource.TOTAL else 0


class XidCounts:
    """How often each GPU had each Xid since it was first seen. It outlives the exporter.

    The first page is where counting starts. A series that is not told leaves its last level in
    place: after a gap, what it says is new only as far as it differs. All series tell of the same
    errors, at moments of their own, so the one that saw most gives the count.
    """

    def __init__(self) -> None:
        self._gpus: dict[str, _Gpu] = {}

    def read(self, gpu: str, told: Told, at: float) -> Mapping[int, int]:
        """Take in a page; the Xids that are new on it, and how many of each that makes in all."""
        state = self._gpus.get(gpu)
        if state is None:
            state = self._gpus[gpu] = _Gpu(dict(told))
        for source, now in told.items():
            state.take(source, now)
        news = state.news()
        state.counts |= news
        if told or state.facts:
            state.facts = _facts(state, news, at)
        return news

    def facts(self, gpu: str) -> Facts:
        """The counts as facts; none for a GPU of which no page ever told Xids."""
        state = self._gpus.get(gpu)
        return {} if state is None else state.facts


def _facts(state: _Gpu, news: Iterable[int], at: float) -> Facts:
    counts = {**dict.fromkeys(COUNTED_XIDS, 0), **state.counts}
    return {
        **state.facts,
        **{(f.XID_ERRORS.name, (str(xid),)): float(count) for xid, count in counts.items()},
        **{(f.XID_LAST_SEEN.name, (str(xid),)): at for xid in news},
    }
