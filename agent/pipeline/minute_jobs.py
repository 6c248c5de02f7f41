"""The job of each minute: computes an engine's new minutes, and older ones again for late rows."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from agent.analysis.efficiency.engine_observation import LONGEST_READ_S, minute_start_near
from agent.analysis.efficiency.time_range import TimeRange, TimeRanges, merged
from agent.analysis.ledger import LONGEST_OPEN_S, ledgers_to_close
from agent.catalog.reasons import StoreWrite
from agent.errors import StoreUnavailable
from agent.pipeline.deployment import EngineDeployment
from agent.pipeline.minute_calculator import GpuSamplesOf, MinuteBounds, MinuteCalculator
from agent.records.columns import BookedRequests, Mask
from agent.records.minute import LONGEST_REQUEST_S, MINUTE_LENGTH_S, MinuteRow
from agent.store.minutes import MinuteStore

_LOG = logging.getLogger(__name__)

# How far back a late row may change stored minutes.
OPEN_S = 2 * LONGEST_REQUEST_S
# Missed minutes are computed in batches of this size.
_MINUTES_AT_ONCE = 10
# Computing a minute again reads the rows of all minutes that share a request with it. A late row is
# not counted if more requests than this have ended since its start.
MAX_ROWS_AGAIN = 200_000


# A minute as it is now, and as it was before; None if it is new.
OnMinute = Callable[[MinuteRow, MinuteRow | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The times of the job in seconds.

    An interval of more than `max_gap_s` between two samples counts as unread. A minute is computed
    `settle_s` after its end, when the rows of its requests are stored. Samples are kept for
    `keep_s`.
    """

    max_gap_s: float
    settle_s: float
    keep_s: float


class MinuteJob:
    """Stores the minutes of one engine: each when it is over, and again when late rows come.

    A scheduler calls `compute` each minute.
    """

    def __init__(
        self,
        deployment: EngineDeployment,
        store: MinuteStore,
        gpu_samples: GpuSamplesOf,
        *,
        timing: Timing,
        on_minute: OnMinute,
        on_failure: Callable[[StoreWrite], None],
    ) -> None:
        """`on_failure` gets the kind of write that failed."""
        self._engine = deployment.engine
        self._store = store
        self._timing = timing
        self._on_minute = on_minute
        self._on_failure = on_failure
        self._calculator = MinuteCalculator(deployment, store, gpu_samples, timing.max_gap_s)

    def compute(self, now: float) -> None:
        """Compute and store every minute that is over and not yet stored."""
        try:
            bounds = list(self._new_bounds(now))
            for first in range(0, len(bounds), _MINUTES_AT_ONCE):
                self._compute_batch(bounds[first : first + _MINUTES_AT_ONCE], now)
            self._close_ledgers(min([each.from_at for each in bounds] + [now]), now)
        except StoreUnavailable as error:
            _LOG.warning("minutes of engine %s are not stored yet: %s", self._engine, error)
            self._on_failure(StoreWrite.ENGINE_WINDOWS)

    def _close_ledgers(self, since: float, now: float) -> None:
        """Close the ledgers of the minutes whose requests have all ended."""
        recent = self._store.between(self._engine, since - 2 * LONGEST_OPEN_S, now)
        open_before = ledgers_to_close(recent, now)
        closed = [replace(minute, ledger_closed=True) for minute in open_before]
        if closed:
            self._store.write(closed, (), now)
        for minute, before in zip(closed, open_before, strict=True):
            self._on_minute(minute, before)

    def _new_bounds(self, now: float) -> Iterator[MinuteBounds]:
        """The bounds of each minute that is over and not yet stored."""
        begin = self._begin(now)
        if begin is None:
            return
        starts_at, from_at = begin
        timing = self._timing
        while starts_at + MINUTE_LENGTH_S + timing.max_gap_s + timing.settle_s <= now:
            until = self._start_of(starts_at + MINUTE_LENGTH_S)
            yield MinuteBounds(starts_at, from_at, until)
            starts_at, from_at = starts_at + MINUTE_LENGTH_S, until

    def _begin(self, now: float) -> tuple[int, float] | None:
        """Where the first new minute begins: at the end of the newest stored one."""
        newest = self._store.newest(self._engine)
        oldest = now - self._timing.keep_s
        if newest is not None and newest.until >= oldest:
            return newest.starts_at + MINUTE_LENGTH_S, newest.until
        first = self._store.first_sample_at(self._engine, oldest)
        return None if first is None else (int(first // MINUTE_LENGTH_S) * MINUTE_LENGTH_S, first)

    def _start_of(self, due_at: int) -> float:
        # No two minutes begin at the same sample, even with few samples.
        gap_s = min(self._timing.max_gap_s, MINUTE_LENGTH_S)
        samples = self._store.samples(self._engine, due_at, due_at + gap_s)
        return minute_start_near(due_at, [sample.at for sample in samples], max_gap_s=gap_s)

    def _compute_batch(self, new: Sequence[MinuteBounds], now: float) -> None:
        """Compute new minutes, and those again in which a request has no complete cost yet."""
        open_for, until = self._open_for(new[0].from_at, now), new[-1].until
        oldest = min(open_for.since, open_for.new_from)
        # Requests that ended in the new minutes change what others cost in the minutes before.
        unpriced = self._store.unpriced(self._engine, oldest, until)
        late = open_for.changed_by(unpriced.chosen(open_for.takes(unpriced)))
        *others, last = merged(late.plus(TimeRange(new[0].from_at, until)))
        for time in others:
            self._compute_again(time, [], open_for, now)
        self._compute_again(last, new, open_for, now)

    def _open_for(self, new_from: float, now: float) -> "_OpenFor":
        stored = self._store.between(self._engine, now - OPEN_S - LONGEST_REQUEST_S, new_from)
        rows = 0
        for minute in reversed(stored):
            rows += minute.requests
            if rows > MAX_ROWS_AGAIN:
                return _OpenFor(now - OPEN_S, new_from, minute.until)
        return _OpenFor(now - OPEN_S, new_from)

    def _compute_again(
        self, time: TimeRange, new: Sequence[MinuteBounds], open_for: "_OpenFor", now: float
    ) -> None:
        """Compute all minutes of the requests that share a minute with a changed request.

        Their cost changes in each of their minutes.
        """
        changed = [*map(_bounds_of, self._store.between(self._engine, *time)), *new]
        if not changed:
            return
        begin, end = min(changed).from_at, max(changed).until
        across = self._store.requests_across(self._engine, begin, end)
        touched = across.chosen(open_for.has(across))
        from_at = float(touched.from_at.min(initial=begin))
        until = float(touched.ended_at.max(initial=end))
        before = {
            minute.starts_at: minute for minute in self._store.between(self._engine, from_at, until)
        }
        bounds = sorted([*map(_bounds_of, before.values()), *new])
        computed = self._calculator.compute(bounds, before, open_for.has)
        self._store.write(computed.minutes, computed.costs_in(TimeRange(begin, end)), now)
        for minute in computed.minutes:
            self._on_minute(minute, before.get(minute.starts_at))


class _OpenFor(NamedTuple):
    """Bounds on a request's start and end. A row outside them is too late to count.

    It would change the cost of requests whose minutes are not computed again. A request that
    changes a minute before `crowded_until` would change the cost of too many.
    """

    since: float
    new_from: float
    crowded_until: float = 0.0

    def takes(self, requests: TimeRanges) -> Mask:
        """Which requests without a complete cost come in time."""
        in_time = (requests.from_at >= self.since) | (requests.until >= self.new_from)
        return in_time & (self.changed_by(requests).from_at >= self.crowded_until)

    def changed_by(self, requests: TimeRanges) -> TimeRanges:
        """The times whose minutes such requests change.

        The last sample of the minute before may show one, if it began while that was read.
        """
        return TimeRanges(requests.from_at - LONGEST_READ_S, requests.until)

    def has(self, requests: BookedRequests) -> Mask:
        """Which requests have a share of their minutes: they had one before, or come in time."""
        return requests.priced | self.takes(TimeRanges(requests.from_at, requests.ended_at))


def _bounds_of(minute: MinuteRow) -> MinuteBounds:
    return MinuteBounds(minute.starts_at, minute.from_at, minute.until)
