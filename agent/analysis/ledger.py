"""The ledger of vanished work: what an engine counted less what rows of its requests say."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum, inf

import numpy as np

from agent.analysis.efficiency.engine_observation import EngineObservation, Increase
from agent.analysis.efficiency.request_activity import (
    Activities,
    TimeRange,
    TimeRanges,
    merged,
    request_activities,
    requested_choices,
)
from agent.catalog import engine_facts as fact
from agent.catalog.reasons import WithoutRow
from agent.records.columns import Array, Mask, MinuteRequests
from agent.records.engine import EngineSample
from agent.records.minute import Ledger, MinuteRow
from agent.records.request import Status

# Work of longer requests counts as vanished until their rows come: aborted ones without a row may
# follow each other so closely that no sample shows that all others have ended.
LONGEST_OPEN_S = 900.0
# An engine's gauges are of its last step. A step with long prompts takes as long as this.
_STEP_S = 0.5
# A sample has the time at which its read began. Few reads of unknown length take longer.
_READ_S = 0.2


def minute_ledger(observed: EngineObservation, requests: MinuteRequests) -> Ledger | None:
    """The counts of the observed time; None if no two samples show what the engine counted.

    Times between two samples with a restart between them are left out, of the engine and of rows:
    what it counted before its end is unknown.
    """
    counted = [each for each in observed.intervals if each.counted]
    increase = Increase()
    for interval in counted:
        increase = increase.plus(interval.increase.times(interval.time.share_in(observed.time)))
    if increase.input_tokens is None and increase.output_tokens is None:
        return None
    begun, refused = _Begun.of(requests), _refused_at(requests)
    spans = merged(TimeRanges.of(each.time.within(observed.time) for each in counted))
    rows = [
        {**begun.counts_in(span, observed), "row_refused": _count(span.holds(refused))}
        for span in spans
    ]
    return Ledger(
        input_tokens=increase.input_tokens,
        output_tokens=increase.output_tokens,
        requests=increase.first_tokens,
        finished=increase.finished,
        refused=increase.refused,
        died=_died(observed, requests),
        **{name: fsum(each[name] for each in rows) for name in rows[0]},
    )


def unmatched_requests(
    observed: EngineObservation, samples: Iterable[EngineSample], requests: MinuteRequests
) -> float | None:
    """How many requests in the engine may have had no row, in the sample with the fewest.

    At 0, or if the engine ended, no request that began before is still open. None if no
    sample says how many requests the engine has.
    """
    if any(each.restarted for each in observed.intervals):
        return 0.0
    inside = [each for each in samples if observed.time.from_at <= each.at < observed.time.until]
    presence = _Presence.of(requests)
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


@dataclass(frozen=True, slots=True, eq=False)
class _Begun:
    """The requests that had a first token. `choices` are the answers of each."""

    requests: MinuteRequests
    active: Activities
    choices: Array

    @classmethod
    def of(cls, requests: MinuteRequests) -> "_Begun":
        found = requests.chosen(_begun(requests))
        active, answered = request_activities(found), np.nan_to_num(found.output_tokens) != 0
        return cls(found, active, np.where(answered, active.choices, requested_choices(found)))

    def counts_in(self, time: TimeRange, observed: EngineObservation) -> dict[str, float]:
        """What the observed engine counts of them in a time, by the fields of a ledger.

        All choices begin at once, with the prompt, cached tokens included.
        """
        of_input = observed.as_counted(self.active, fact.INPUT_TOKENS)
        of_output = observed.as_counted(self.active, fact.OUTPUT_TOKENS)
        rows, begun = self.requests, time.holds(self.active.first_at)
        prompts = np.where(rows.one_prompt, self.choices, 1.0) * np.nan_to_num(rows.input_tokens)
        ended = time.holds(self.active.last_at) & rows.succeeded
        unknown = np.isnan(rows.input_tokens) | np.isnan(rows.output_tokens)
        return {
            "row_input_tokens": float(prompts[time.holds(of_input.first_at)].sum()),
            "row_output_tokens": float(of_output.output_in(time).sum()),
            "row_requests": float(self.choices[begun].sum()),
            "row_finished": float(self.choices[ended].sum()),
            "rows_without_tokens": _count(unknown & begun),
        }


def _begun(requests: MinuteRequests) -> Mask:
    tokens = requests.output_tokens
    ended_well: Mask = requests.have(Status.OK) & (tokens != 0)
    return ended_well | (tokens > 0) | ~np.isnan(requests.ttft_s)


def _refused_at(requests: MinuteRequests) -> Array:
    return requests.ended_at[requests.have(Status.THROTTLED) & ~_begun(requests)]


def _count(which: Mask) -> float:
    return float(np.count_nonzero(which))


def _requests_in(sample: EngineSample) -> float | None:
    """Running and waiting: rows of the proxy alone do not say when their wait ended."""
    running = sample.fact(fact.REQUESTS_RUNNING.name)
    return None if running is None else running + (sample.fact(fact.REQUESTS_WAITING.name) or 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class _Presence:
    """When each request with a row came to the engine and left it, and its choices."""

    begins: Array
    ends: Array
    choices: Array

    @classmethod
    def of(cls, requests: MinuteRequests) -> "_Presence":
        """Without those that the engine did not take."""
        taken = requests.chosen(~requests.have(Status.THROTTLED, Status.INVALID))
        # A slow client may still read what the engine finished before.
        ends, choices, begun = taken.ended_at.copy(), np.ones(taken.rows.size), _Begun.of(taken)
        indexes = np.flatnonzero(_begun(taken))
        ends[indexes], choices[indexes] = begun.active.last_at, begun.choices
        return cls(taken.started_at, ends, choices)

    def at(self, at: float) -> float:
        """How many choices were in the engine at a moment."""
        return self._in(at, at)

    def certain(self, sample: EngineSample) -> float:
        """How many were there before and after a sample, so that it contains them."""
        read_s = sample.fact(fact.SCRAPE_DURATION.name)
        return self._in(sample.at - _STEP_S, sample.at + (_READ_S if read_s is None else read_s))

    def _in(self, since: float, until: float) -> float:
        return float(self.choices[(self.begins <= since) & (until < self.ends)].sum())


def _died(observed: EngineObservation, requests: MinuteRequests) -> float:
    """Requests without a row that ran at the last sample before the engine ended."""
    time = observed.time
    ends = [each for each in observed.intervals if each.restarted]
    inside = [each for each in ends if time.from_at <= each.time.from_at < time.until]
    if not inside:
        return 0.0
    presence = _Presence.of(requests)
    return fsum(
        max((each.running[0] or 0.0) - presence.at(each.time.from_at), 0.0) for each in inside
    )
