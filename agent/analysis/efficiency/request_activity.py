"""When an engine worked on a request, and on how many tokens, as far as the request's row shows."""

from collections.abc import Iterable
from typing import NamedTuple

from agent.analysis.efficiency.time_range import TimeRange
from agent.records.request import RequestRecord, Status

RequestKey = tuple[str, str]


class RequestActivity(NamedTuple):
    """The time and the tokens of one request at work.

    `key` is its trace id and span id. `wasted` means that it was aborted or failed. Its prompt is
    taken to be computed evenly over `prefill`. The first output token of each of its `choices`
    comes at the end of `prefill`, the others evenly over `decode`. `timed` means that the engine
    itself gave the start and the end of `prefill`; else the request may have waited in it.
    """

    key: RequestKey
    prefill: TimeRange
    decode: TimeRange
    computed_tokens: int
    cached_tokens: int
    output_tokens: int
    wasted: bool
    choices: int = 1
    timed: bool = False

    @property
    def whole(self) -> TimeRange:
        """From the start of its prefill to its last token."""
        return TimeRange(self.prefill.from_at, self.decode.until)

    @property
    def decoded_tokens(self) -> int:
        """The output tokens without the first of each choice, which prefill computes."""
        return max(self.output_tokens - self.choices, 0)

    def input_counted_in(self, time: TimeRange) -> float:
        """The computed prompt tokens that the engine counts in `time`.

        An engine counts a whole prompt when its first output token is there.
        """
        return self.computed_tokens * _instant(self.prefill.until).share_in(time)

    def output_in(self, time: TimeRange) -> float:
        """The output tokens that came in `time`."""
        return self.first_in(time) + self.decoded_tokens * self.decode.share_in(time)

    def first_in(self, time: TimeRange) -> float:
        """The first output tokens that came in `time`: one of each choice."""
        if not self.output_tokens:
            return 0.0
        return self.choices * _instant(self.prefill.until).share_in(time)


def _instant(at: float) -> TimeRange:
    return TimeRange(at, at)


def request_activities(
    records: Iterable[RequestRecord], cached_share: float = 0.0
) -> list[RequestActivity]:
    """The requests that the engine worked on.

    `cached_share` stands in for the cached share of a prompt whose row does not have it.
    """
    found = (_activity(record, cached_share) for record in records)
    return [activity for activity in found if activity is not None]


def _activity(record: RequestRecord, cached_share: float) -> RequestActivity | None:
    """None where nothing shows that the engine began: refused, or given up in the queue."""
    output_tokens = _not_negative(record.output_tokens)
    begun = record.status is Status.OK or output_tokens or record.ttft_s is not None
    if not begun and record.prefill_s is None:
        return None
    prefill, decode = _phase_times(record)
    prompt = _not_negative(record.input_tokens)
    cached = _cached(record.cached_tokens, prompt, cached_share)
    return RequestActivity(
        key=(record.trace_id, record.span_id),
        prefill=prefill,
        decode=decode,
        computed_tokens=prompt - cached,
        cached_tokens=cached,
        output_tokens=output_tokens,
        wasted=record.status is not Status.OK or record.finish_reason == "abort",
        choices=_choices(record),
        timed=record.prefill_s is not None,
    )


def _choices(record: RequestRecord) -> int:
    """The request's `n`: how many answers its output tokens belong to."""
    requested = 1 if record.proxied is None else record.proxied.choices or 1
    return max(min(requested, _not_negative(record.output_tokens)), 1)


def _phase_times(record: RequestRecord) -> tuple[TimeRange, TimeRange]:
    """Prefill and decode. A prefill of unknown end has no length.

    An engine reports the decode time of one choice. Of several, the last one ends the request.
    """
    start = record.started_at + _seconds(record.queue_s)
    first = start
    if record.prefill_s is not None:
        first = start + _seconds(record.prefill_s)
    elif record.ttft_s is not None:
        first = max(record.started_at + _seconds(record.ttft_s), start)
    last = max(record.ended_at, first)
    if record.output_tokens is not None and record.output_tokens <= _choices(record):
        last = first
    elif record.decode_s is not None and _choices(record) == 1:
        last = first + _seconds(record.decode_s)
    return TimeRange(start, first), TimeRange(first, last)


def _seconds(value: float | None) -> float:
    return max(value or 0.0, 0.0)


def _not_negative(count: int | None) -> int:
    return max(count or 0, 0)


def _cached(known: int | None, prompt: int, cached_share: float) -> int:
    cached = round(prompt * cached_share) if known is None else known
    return min(max(cached, 0), prompt)
