"""When an engine worked on requests, and on how many tokens, as far as their rows show."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import chain
from math import inf
from typing import NamedTuple

import numpy as np

from agent.records.columns import Array, Integers, Mask, MinuteRequests
from agent.records.request import Status


class TimeRange(NamedTuple):
    """A range of time in Unix seconds. `until` is not part of it."""

    from_at: float
    until: float

    @property
    def length_s(self) -> float:
        """Seconds, never negative."""
        return max(self.until - self.from_at, 0.0)

    def within(self, other: "TimeRange") -> "TimeRange":
        """The part of this range inside another; of no length if they do not meet."""
        from_at = max(self.from_at, other.from_at)
        return TimeRange(from_at, max(min(self.until, other.until), from_at))

    def share_in(self, other: "TimeRange") -> float:
        """The share of this range inside another; a range of no length is inside whole or not."""
        if self.until > self.from_at:
            return self.within(other).length_s / self.length_s
        return float(other.from_at <= self.from_at < other.until)

    def holds(self, times: Array) -> Mask:
        """Which of these times are in it."""
        return (self.from_at <= times) & (times < self.until)


EVER = TimeRange(-inf, inf)


class TimeRanges(NamedTuple):
    """Many ranges of time."""

    from_at: Array
    until: Array

    @classmethod
    def of(cls, ranges: Iterable[Iterable[float]]) -> "TimeRanges":
        """These ranges."""
        ends = np.fromiter(chain.from_iterable(ranges), dtype=np.float64)
        return cls(ends[::2], ends[1::2])

    def plus(self, time: TimeRange) -> "TimeRanges":
        """With one more."""
        return TimeRanges(*[np.append(*each) for each in zip(self, time, strict=True)])

    @property
    def length_s(self) -> Array:
        """Seconds of each, never negative."""
        found: Array = np.maximum(self.until - self.from_at, 0.0)
        return found

    def chosen(self, which: Mask | Integers) -> "TimeRanges":
        """Some of them."""
        return TimeRanges(self.from_at[which], self.until[which])

    def within_s(self, time: TimeRange) -> Array:
        """Seconds of each inside a range."""
        begins, ends = np.maximum(self.from_at, time.from_at), np.minimum(self.until, time.until)
        found: Array = np.maximum(ends - begins, 0.0)
        return found

    def share_in(self, time: TimeRange) -> Array:
        """The share of each inside a range, as of one range."""
        whole_or_not = time.holds(self.from_at).astype(np.float64)
        lasts = self.until > self.from_at
        return np.divide(self.within_s(time), self.length_s, out=whole_or_not, where=lasts)


def covered_s(ranges: TimeRanges, time: TimeRange) -> float:
    """Seconds of `time` that lie in at least one of the ranges."""
    order = np.argsort(ranges.from_at, kind="stable")
    begins = ranges.from_at[order]
    ends = np.minimum(ranges.until[order], time.until)
    reached = np.maximum.accumulate(np.concatenate([[time.from_at], ends]))
    covered = float(np.maximum(reached[1:] - np.maximum(begins, reached[:-1]), 0.0).sum())
    # Parts of a range that others cover add up to a rounding error more than the range.
    return min(covered, time.length_s)


def merged(times: TimeRanges) -> list[TimeRange]:
    """The same times in order, those that meet as one; at least one is given."""
    order = np.argsort(times.from_at)
    begins, reached = times.from_at[order], np.maximum.accumulate(times.until[order])
    apart = np.flatnonzero(begins[1:] > reached[:-1])
    first, last = np.append(0, apart + 1), np.append(apart, order.size - 1)
    ends = zip(begins[first].tolist(), reached[last].tolist(), strict=True)
    return [TimeRange(*each) for each in ends]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Activities:
    """The time and the tokens of requests at work; each column has a value for each.

    `rows` are the ids of their rows. `wasted` were aborted or failed. A prompt is taken to be
    computed evenly from `begin_at` to `first_at`. The first output token of each of its `choices`
    comes then, the others evenly until `last_at`. `timed` means that the engine itself gave the
    start and the end of prefill; else the request may have waited in it.
    """

    rows: Integers
    begin_at: Array
    first_at: Array
    last_at: Array
    computed_tokens: Array
    cached_tokens: Array
    output_tokens: Array
    choices: Array
    wasted: Mask
    timed: Mask

    @property
    def prefill(self) -> TimeRanges:
        """From the start to the first token."""
        return TimeRanges(self.begin_at, self.first_at)

    @property
    def decode(self) -> TimeRanges:
        """From the first token to the last one."""
        return TimeRanges(self.first_at, self.last_at)

    @property
    def whole(self) -> TimeRanges:
        """From the start of prefill to the last token."""
        return TimeRanges(self.begin_at, self.last_at)

    @property
    def decoded_tokens(self) -> Array:
        """The output tokens without the first of each choice, which prefill computes."""
        found: Array = np.maximum(self.output_tokens - self.choices, 0.0)
        return found

    def chosen(self, which: Mask | Integers) -> "Activities":
        """Some of them."""
        return Activities(**{each.name: getattr(self, each.name)[which] for each in fields(self)})

    def input_counted_in(self, time: TimeRange) -> Array:
        """The computed prompt tokens that the engine counts in `time`.

        An engine counts a whole prompt when its first output token is there.
        """
        return self.computed_tokens * time.holds(self.first_at)

    def output_in(self, time: TimeRange) -> Array:
        """The output tokens that came in `time`."""
        return self.first_in(time) + self.decoded_tokens * self.decode.share_in(time)

    def first_in(self, time: TimeRange) -> Array:
        """The first output tokens that came in `time`: one of each choice."""
        return self.choices * (time.holds(self.first_at) & (self.output_tokens > 0))


def request_activities(requests: MinuteRequests, cached_share: float = 0.0) -> Activities:
    """The requests that the engine worked on.

    `cached_share` stands in for the cached share of a prompt whose row does not have it.
    """
    rows = requests.chosen(worked_on(requests))
    begin_at, first_at, last_at = _phase_times(rows)
    prompt = _not_negative(rows.input_tokens)
    unknown = np.isnan(rows.cached_tokens)
    cached = np.where(unknown, np.rint(prompt * cached_share), rows.cached_tokens)
    cached = np.clip(cached, 0.0, prompt)
    return Activities(
        rows=rows.rows,
        begin_at=begin_at,
        first_at=first_at,
        last_at=last_at,
        computed_tokens=prompt - cached,
        cached_tokens=cached,
        output_tokens=_not_negative(rows.output_tokens),
        choices=_choices(rows),
        wasted=~rows.succeeded,
        timed=_known(rows.prefill_s),
    )


def worked_on(requests: MinuteRequests) -> Mask:
    """False if nothing shows that the engine began: refused, or given up in the queue."""
    any_token = (requests.output_tokens > 0) | _known(requests.ttft_s)
    return requests.have(Status.OK) | any_token | _known(requests.prefill_s)


def requested_choices(requests: MinuteRequests) -> Array:
    """Each request's `n`: how many answers it asked for."""
    known = np.where(np.isnan(requests.choices), 1.0, requests.choices)
    return np.where(known == 0, 1.0, known)


def _choices(requests: MinuteRequests) -> Array:
    answers = np.minimum(requested_choices(requests), _not_negative(requests.output_tokens))
    return np.maximum(answers, 1.0)


def _phase_times(rows: MinuteRequests) -> tuple[Array, Array, Array]:
    """The start and the end of prefill, and the end of decode.

    A prefill of unknown end has no length. An engine reports the decode time of one choice. Of
    several, the last one ends the request.
    """
    start = rows.started_at + _not_negative(rows.queue_s)
    by_token = np.maximum(rows.started_at + _not_negative(rows.ttft_s), start)
    first = np.where(_known(rows.ttft_s), by_token, start)
    first = np.where(_known(rows.prefill_s), start + _not_negative(rows.prefill_s), first)
    choices = _choices(rows)
    timed = _known(rows.decode_s) & (choices == 1)
    last = np.where(timed, first + _not_negative(rows.decode_s), np.maximum(rows.ended_at, first))
    return start, first, np.where(rows.output_tokens <= choices, first, last)


def _known(values: Array) -> Mask:
    return ~np.isnan(values)


def _not_negative(values: Array) -> Array:
    """0 too if it is unknown."""
    found: Array = np.fmax(values, 0.0)
    return found
