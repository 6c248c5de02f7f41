"""Minute by minute: how well an engine used its GPUs, and what that and each request cost."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from agent.analysis.efficiency.observation import minute_start_near
from agent.analysis.efficiency.time_range import TimeRange
from agent.catalog.reasons import StoreWrite
from agent.errors import StoreUnavailable
from agent.pipeline.deployment import EngineDeployment
from agent.pipeline.minute_booking import Edges, GpuReadings, MinuteBooker
from agent.records.engine import EngineSample
from agent.records.minute import (
    LONGEST_REQUEST_S,
    MINUTE_S,
    MinuteRow,
    RequestCost,
    StoredRequest,
)

_LOG = logging.getLogger(__name__)

# A row that comes later finds its windows closed.
OPEN_S = 2 * LONGEST_REQUEST_S
# Of many minutes that were missed, so many are counted together.
_WINDOWS_AT_ONCE = 10
# Counting a minute again reads the rows of all minutes that it shares a request with: where so many
# requests ended since a request began, it comes too late for that, however soon it ended.
MAX_ROWS_AGAIN = 200_000


class Store(Protocol):
    """Where windows are kept, and what they are made of."""

    def newest(self, engine: str) -> MinuteRow | None:
        """The last window that was kept."""

    def between(self, engine: str, from_at: float, until: float) -> list[MinuteRow]:
        """The windows that overlap a time, in order."""

    def first_reading(self, engine: str, since: float) -> float | None:
        """When the engine's page was first read after a moment."""

    def readings(self, engine: str, from_at: float, until: float) -> list[EngineSample]:
        """Readings in a time, and the nearest on either side of it."""

    def requests(self, engine: str, from_at: float, until: float) -> list[StoredRequest]:
        """The counted requests that overlap a time."""

    def unpriced(self, engine: str, since: float, until: float) -> list[tuple[float, float]]:
        """From when to when each request that began by `until` lasted, if it has no part yet."""

    def keep(self, windows: Sequence[MinuteRow], parts: Sequence[RequestCost], now: float) -> None:
        """Keep windows and the parts of requests together."""


# A window as it is now, and as it was before: None where it is new.
OnWindow = Callable[[MinuteRow, MinuteRow | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds. `max_gap_s` between two readings leaves the time between them unread.

    A window is counted `settle_s` after its end, when the rows of its requests have come. What is
    older than `keep_s` has no readings any more.
    """

    max_gap_s: float
    settle_s: float
    keep_s: float


class MinuteJob:
    """Counts the minutes of one engine, each when it is over and again when more rows have come."""

    def __init__(
        self,
        engine: EngineDeployment,
        store: Store,
        gpu_readings: GpuReadings,
        *,
        timing: Timing,
        on_window: OnWindow,
        on_failure: Callable[[StoreWrite], None],
    ) -> None:
        """`on_failure` gets a short word for what the store did not take."""
        self._engine = engine
        self._store = store
        self._timing = timing
        self._on_window = on_window
        self._on_failure = on_failure
        self._counter = MinuteBooker(engine, store, gpu_readings, timing.max_gap_s)

    def count(self, now: float) -> None:
        """Count every minute that is over and was not counted; to be called each minute."""
        try:
            self._count_all(now)
        except StoreUnavailable as error:
            _LOG.warning("minutes of engine %s wait to be counted: %s", self._engine.engine, error)
            self._on_failure(StoreWrite.ENGINE_WINDOWS)

    def _count_all(self, now: float) -> None:
        edges = list(self._new_edges(now))
        for first in range(0, len(edges), _WINDOWS_AT_ONCE):
            self._count(edges[first : first + _WINDOWS_AT_ONCE], now)

    def _new_edges(self, now: float) -> Iterator[Edges]:
        """The edges of each window that is over and not yet kept."""
        begin = self._begin(now)
        if begin is None:
            return
        mark, from_at = begin
        timing = self._timing
        while mark + MINUTE_S + timing.max_gap_s + timing.settle_s <= now:
            until = self._edge(mark + MINUTE_S)
            yield Edges(mark, from_at, until)
            mark, from_at = mark + MINUTE_S, until

    def _begin(self, now: float) -> tuple[int, float] | None:
        """Where the first window of all begins: where the last one ended."""
        newest = self._store.newest(self._engine.engine)
        oldest = now - self._timing.keep_s
        if newest is not None and newest.until >= oldest:
            return newest.starts_at + MINUTE_S, newest.until
        first = self._store.first_reading(self._engine.engine, oldest)
        return None if first is None else (int(first // MINUTE_S) * MINUTE_S, first)

    def _edge(self, mark: int) -> float:
        # Each window has an edge of its own, however seldom the page is read.
        gap_s = min(self._timing.max_gap_s, MINUTE_S)
        readings = self._store.readings(self._engine.engine, mark, mark + gap_s)
        return minute_start_near(mark, [reading.at for reading in readings], max_gap_s=gap_s)

    def _count(self, new: Sequence[Edges], now: float) -> None:
        """Count new windows, and again those that requests without a part reach into."""
        still_open, until = self._still_open(new[0].from_at, now), new[-1].until
        oldest = min(still_open.since, still_open.new_from)
        # Also those that ended after it: they change what others cost in the minutes before.
        unpriced = self._store.unpriced(self._engine.engine, oldest, until)
        late = [TimeRange(*lasted) for lasted in unpriced if still_open.takes(*lasted)]
        *others, last = _merged([*late, TimeRange(new[0].from_at, until)])
        for time in others:
            self._count_again(time, [], still_open, now)
        self._count_again(last, new, still_open, now)

    def _still_open(self, new_from: float, now: float) -> "_Open":
        kept = self._store.between(self._engine.engine, now - OPEN_S - LONGEST_REQUEST_S, new_from)
        rows = 0
        for window in reversed(kept):
            rows += window.requests
            if rows > MAX_ROWS_AGAIN:
                return _Open(now - OPEN_S, new_from, window.until)
        return _Open(now - OPEN_S, new_from)

    def _count_again(
        self, time: TimeRange, new: Sequence[Edges], still_open: "_Open", now: float
    ) -> None:
        """Who shares a window with a changed request costs something else, in all its windows."""
        name = self._engine.engine
        changed = [*map(_edges_of, self._store.between(name, *time)), *new]
        if not changed:
            return
        begin, end = min(changed).from_at, max(changed).until
        touched = list(filter(still_open.has, self._store.requests(name, begin, end)))
        begin = min([request.from_at for request in touched] + [begin])
        end = max([request.record.ended_at for request in touched] + [end])
        kept = {window.starts_at: window for window in self._store.between(name, begin, end)}
        edges = sorted([*map(_edges_of, kept.values()), *new])
        counted = self._counter.count(edges, kept, still_open.has)
        parts = [counted.part(request) for request in touched]
        self._store.keep(counted.windows, parts, now)
        for window in counted.windows:
            self._on_window(window, kept.get(window.starts_at))


class _Open(NamedTuple):
    """Since when a request must have lasted, or until when, for its row to be counted now.

    One that comes later would change what others cost that are not counted again. So would one that
    began before `crowded_until`, and those are too many.
    """

    since: float
    new_from: float
    crowded_until: float = 0.0

    def takes(self, from_at: float, until: float) -> bool:
        """Whether a request without a part comes in time."""
        in_time = from_at >= self.since or until >= self.new_from
        return in_time and from_at >= self.crowded_until

    def has(self, request: StoredRequest) -> bool:
        """Whether a request is counted: it was, or it comes in time."""
        return request.priced or self.takes(request.from_at, request.record.ended_at)


def _edges_of(window: MinuteRow) -> Edges:
    return Edges(window.starts_at, window.from_at, window.until)


def _merged(times: Iterable[TimeRange]) -> list[TimeRange]:
    """The same times, those that meet as one, in order."""
    merged: list[TimeRange] = []
    for time in sorted(times):
        if merged and time.from_at <= merged[-1].until:
            merged[-1] = TimeRange(merged[-1].from_at, max(merged[-1].until, time.until))
        else:
            merged.append(time)
    return merged
