"""The ledger of vanished work: what an engine counted less what rows of its requests say."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import fsum, inf

import numpy as np
from numpy.typing import NDArray

from agent.analysis.efficiency.counter_growth import Growth
from agent.analysis.efficiency.engine_observation import EngineObservation
from agent.analysis.efficiency.request_activity import RequestActivity, request_activities
from agent.analysis.efficiency.time_range import TimeRange
from agent.catalog import engine_facts as fact
from agent.catalog.reasons import WithoutRow
from agent.records.engine import EngineSample
from agent.records.ledger import Ledger
from agent.records.minute import MinuteRow
from agent.records.request import RequestRecord, Status

# With one prompt, an engine counts it once for each choice. Elsewhere a request may have several
# prompts, and how many choices each has is unknown.
_ONE_PROMPT = "/v1/chat/completions"

# Work of longer requests counts as vanished until their rows come: aborted ones without a row may
# follow each other so closely that no sample shows that all others have ended.
LONGEST_OPEN_S = 900.0
# An engine's gauges are of its last step. A step with long prompts takes as long as this.
_STEP_S = 0.5
# A sample has the time at which its read began. Few reads of unknown length take longer.
_READ_S = 0.2


def minute_ledger(observed: EngineObservation, rows: Sequence[RequestRecord]) -> Ledger | None:
    """The counts of the observed time; None where no two samples show what the engine counted.

    Times between two samples with a restart between them are left out, of the engine and of rows:
    what it counted before its end is unknown.
    """
    counted = [each for each in observed.intervals if each.counted]
    growth = Growth()
    for interval in counted:
        growth = growth.plus(interval.growth.times(interval.time.share_in(observed.time)))
    if growth.input_tokens is None and growth.output_tokens is None:
        return None
    entries = [entry for row in rows if (entry := _Entry.of(row)) is not None]
    spans = list(_joined(each.time.within(observed.time) for each in counted))
    return Ledger(
        input_tokens=growth.input_tokens,
        output_tokens=growth.output_tokens,
        requests=growth.first_tokens,
        finished=growth.finished,
        refused=growth.refused,
        died=_died(observed, rows),
        row_input_tokens=fsum(entry.input_in(span) for entry in entries for span in spans),
        row_output_tokens=fsum(entry.output_in(span) for entry in entries for span in spans),
        row_requests=fsum(entry.begun_in(span) for entry in entries for span in spans),
        row_finished=fsum(entry.finished_in(span) for entry in entries for span in spans),
        row_refused=fsum(entry.refused_in(span) for entry in entries for span in spans),
        untold_rows=fsum(entry.untold_in(span) for entry in entries for span in spans),
    )


def unmatched_requests(
    observed: EngineObservation, samples: Iterable[EngineSample], rows: Sequence[RequestRecord]
) -> float | None:
    """How many requests in the engine may have had no row, in the sample with the fewest.

    At 0, or where the engine ended, no request that began before is still open. None where no
    sample says how many requests the engine has.
    """
    if any(each.restarted for each in observed.intervals):
        return 0.0
    inside = [each for each in samples if observed.time.from_at <= each.at < observed.time.until]
    presence = _Presence.of(rows)
    without = [
        count - presence.certain(sample)
        for sample in inside
        if (count := _requests_in(sample)) is not None
    ]
    return max(min(without), 0.0) if without else None


def unaccounted_requests(ledger: Ledger) -> Mapping[WithoutRow, float]:
    """Requests without a row, by what became of them, as far as the engine counts requests.

    Of a short time a figure may be below 0: the next time has as many more.
    """
    found: dict[WithoutRow, float] = {}
    if ledger.requests is not None:
        found[WithoutRow.DIED] = ledger.died
        without = ledger.requests - ledger.row_requests - ledger.died
        if ledger.finished is None:
            found[WithoutRow.UNKNOWN] = without
        else:
            finished = ledger.finished - ledger.row_finished
            found[WithoutRow.FINISHED] = finished
            found[WithoutRow.ABORTED] = without - finished
    if ledger.refused is not None:
        found[WithoutRow.REFUSED] = ledger.refused - ledger.row_refused
    return found


def ledgers_to_close(minutes: Sequence[MinuteRow], now: float) -> list[MinuteRow]:
    """Those of these minutes, in order, whose requests have all ended, by the minutes after them.

    A request that is open all through a later minute is without a row in each of its samples.
    """
    found, unmatched = [], inf
    for minute in reversed(minutes):
        over = unmatched == 0 or minute.until < now - LONGEST_OPEN_S
        if over and minute.ledger is not None and not minute.ledger_closed:
            found.append(minute)
        if minute.unmatched is not None:
            unmatched = min(unmatched, minute.unmatched)
    return found[::-1]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A row in the ledger: a request that reached the engine. `choices` are its answers."""

    row: RequestRecord
    activity: RequestActivity | None
    choices: int

    @classmethod
    def of(cls, row: RequestRecord) -> "_Entry | None":
        """None where nothing shows a first token, and the engine did not refuse it either."""
        begun = bool(row.output_tokens) or row.ttft_s is not None
        if not begun and (row.status is not Status.OK or row.output_tokens == 0):
            return cls(row, None, 1) if row.status is Status.THROTTLED else None
        (activity,) = request_activities([row])
        requested = 1 if row.proxied is None else row.proxied.choices or 1
        return cls(row, activity, activity.choices if row.output_tokens else requested)

    def begun_in(self, time: TimeRange) -> float:
        """Its choices whose first token came in a time: all of them at once."""
        if self.activity is None:
            return 0.0
        first_at = self.activity.prefill.until
        return self.choices * TimeRange(first_at, first_at).share_in(time)

    def input_in(self, time: TimeRange) -> float:
        """Its prompt, which engines count with the first token, cached tokens included."""
        times = self.choices if self.row.route == _ONE_PROMPT else 1
        return times * (self.row.input_tokens or 0) if self.begun_in(time) else 0.0

    def output_in(self, time: TimeRange) -> float:
        """Its output tokens that came in a time."""
        return 0.0 if self.activity is None else self.activity.output_in(time)

    def finished_in(self, time: TimeRange) -> float:
        """Its choices, where the engine finished them in a time."""
        well = self.row.status is Status.OK and self.row.finish_reason != "abort"
        if self.activity is None or not well:
            return 0.0
        ended_at = self.activity.decode.until
        return self.choices * TimeRange(ended_at, ended_at).share_in(time)

    def refused_in(self, time: TimeRange) -> float:
        """1 where the engine refused it in a time."""
        ended_at = self.row.ended_at
        return TimeRange(ended_at, ended_at).share_in(time) if self.activity is None else 0.0

    def untold_in(self, time: TimeRange) -> float:
        """1 where its first token came in a time and the row does not have its tokens."""
        untold = self.row.input_tokens is None or self.row.output_tokens is None
        return float(untold and self.begun_in(time) > 0)


def _joined(times: Iterable[TimeRange]) -> Iterator[TimeRange]:
    """The same times, those that meet as one."""
    last: TimeRange | None = None
    for time in times:
        if last is not None and time.from_at <= last.until:
            last = TimeRange(last.from_at, time.until)
        else:
            if last is not None:
                yield last
            last = time
    if last is not None:
        yield last


def _requests_in(sample: EngineSample) -> float | None:
    """Running and waiting: rows of the proxy alone do not say when their wait ended."""
    running = sample.fact(fact.REQUESTS_RUNNING.name)
    return None if running is None else running + (sample.fact(fact.REQUESTS_WAITING.name) or 0.0)


@dataclass(frozen=True, slots=True)
class _Presence:
    """When each request with a row came to the engine and left it, and its choices."""

    begins: NDArray[np.float64]
    ends: NDArray[np.float64]
    choices: NDArray[np.float64]

    @classmethod
    def of(cls, rows: Iterable[RequestRecord]) -> "_Presence":
        """Without those that the engine did not take."""
        taken = [row for row in rows if row.status not in (Status.THROTTLED, Status.INVALID)]
        entries = [(_Entry.of(row), row) for row in taken]
        return cls(
            begins=np.array([row.started_at for row in taken], dtype=np.float64),
            ends=np.array([_left_at(*each) for each in entries], dtype=np.float64),
            choices=np.array([1 if each is None else each.choices for each, _ in entries], float),
        )

    def at(self, at: float) -> float:
        """How many choices were in the engine at a moment."""
        return self._in(at, at)

    def certain(self, sample: EngineSample) -> float:
        """How many were there before and after a sample, so that it contains them."""
        read_s = sample.fact(fact.SCRAPE_DURATION.name)
        return self._in(sample.at - _STEP_S, sample.at + (_READ_S if read_s is None else read_s))

    def _in(self, since: float, until: float) -> float:
        return float(self.choices[(self.begins <= since) & (until < self.ends)].sum())


def _left_at(entry: _Entry | None, row: RequestRecord) -> float:
    """A slow client may still read what the engine finished before."""
    known = None if entry is None else entry.activity
    return row.ended_at if known is None else known.decode.until


def _died(observed: EngineObservation, rows: Iterable[RequestRecord]) -> float:
    """Requests without a row that ran at the last sample before the engine ended."""
    time = observed.time
    ends = [each for each in observed.intervals if each.restarted]
    inside = [each for each in ends if time.from_at <= each.time.from_at < time.until]
    if not inside:
        return 0.0
    presence = _Presence.of(rows)
    return fsum(
        max((each.running[0] or 0.0) - presence.at(each.time.from_at), 0.0) for each in inside
    )
