"""When an engine worked on requests, and on how many tokens, as far as their rows show."""

from dataclasses import dataclass, fields

import numpy as np

from agent.analysis.efficiency.time_range import TimeRange, TimeRanges
from agent.records.columns import Array, BookedRequests, Mask, Places
from agent.records.request import Status


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Activities:
    """The time and the tokens of requests at work; each column has a value for each.

    `rows` are the ids of their rows. `wasted` were aborted or failed. A prompt is taken to be
    computed evenly from `begin_at` to `first_at`. The first output token of each of its `choices`
    comes then, the others evenly until `last_at`. `timed` means that the engine itself gave the
    start and the end of prefill; else the request may have waited in it.
    """

    rows: Places
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

    def chosen(self, which: Mask | Places) -> "Activities":
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


def request_activities(requests: BookedRequests, cached_share: float = 0.0) -> Activities:
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


def worked_on(requests: BookedRequests) -> Mask:
    """False if nothing shows that the engine began: refused, or given up in the queue."""
    any_token = (requests.output_tokens > 0) | _known(requests.ttft_s)
    return requests.have(Status.OK) | any_token | _known(requests.prefill_s)


def requested_choices(requests: BookedRequests) -> Array:
    """Each request's `n`: how many answers it asked for."""
    known = np.where(np.isnan(requests.choices), 1.0, requests.choices)
    return np.where(known == 0, 1.0, known)


def _choices(requests: BookedRequests) -> Array:
    answers = np.minimum(requested_choices(requests), _not_negative(requests.output_tokens))
    return np.maximum(answers, 1.0)


def _phase_times(rows: BookedRequests) -> tuple[Array, Array, Array]:
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
