"""When a request was worked on, and on how many tokens, as far as its row tells."""

from collections.abc import Iterable
from typing import NamedTuple

from agent.analysis.efficiency.time_range import TimeRange
from agent.records.request import RequestRecord, Status

RequestKey = tuple[str, str]


class RequestActivity(NamedTuple):
    """One request at work. `key` is its trace and span; `wasted` says that nobody had use for it.

    Its prompt is computed evenly over `prefill`; the first output token of each of its `choices`
    comes at the end of that, the others evenly over `decode`.
    """

    key: RequestKey
    prefill: TimeRange
    decode: TimeRange
    computed_tokens: int
    cached_tokens: int
    output_tokens: int
    wasted: bool
    choices: int = 1

    @property
    def whole(self) -> TimeRange:
        """From the start of its prefill to its last token."""
        return TimeRange(self.prefill.from_at, self.decode.until)

    @property
    def decoded_tokens(self) -> int:
        """The output tokens but the first of each choice, which prefill brings."""
        return max(self.output_tokens - self.choices, 0)

    def input_told_in(self, window: TimeRange) -> float:
        """The computed prompt tokens that an engine counts in the window: with the first token."""
        return self.computed_tokens * _moment(self.prefill.until).share_in(window)

    def output_in(self, window: TimeRange) -> float:
        """The output tokens that came in the window."""
        if not self.output_tokens:
            return 0.0
        first = _moment(self.prefill.until).share_in(window)
        return self.choices * first + self.decoded_tokens * self.decode.share_in(window)


def _moment(at: float) -> TimeRange:
    return TimeRange(at, at)


def request_activities(
    records: Iterable[RequestRecord], cached_share: float = 0.0
) -> list[RequestActivity]:
    """The requests that were worked on.

    Of a prompt whose row does not tell how much of it was cached, `cached_share` is taken to be.
    """
    found = (_activity(record, cached_share) for record in records)
    return [activity for activity in found if activity is not None]


def _activity(record: RequestRecord, cached_share: float) -> RequestActivity | None:
    """None where nothing shows that the engine began: one was refused, or left in the queue."""
    output_tokens = _whole(record.output_tokens)
    begun = record.status is Status.OK or output_tokens or record.ttft_s is not None
    if not begun and record.prefill_s is None:
        return None
    prefill, decode = _phases(record)
    prompt = _whole(record.input_tokens)
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
    )


def _choices(record: RequestRecord) -> int:
    """How many answers its output tokens are of; one where nobody asked for more."""
    asked = 1 if record.proxied is None else record.proxied.choices or 1
    return max(min(asked, _whole(record.output_tokens)), 1)


def _phases(record: RequestRecord) -> tuple[TimeRange, TimeRange]:
    """Prefill and decode; a prefill whose end nobody saw is taken to be a moment, at its start.

    Of several choices an engine tells the decode of one, and the last of them ends the request.
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


def _seconds(told: float | None) -> float:
    return max(told or 0.0, 0.0)


def _whole(told: int | None) -> int:
    return max(told or 0, 0)


def _cached(told: int | None, prompt: int, cached_share: float) -> int:
    cached = round(prompt * cached_share) if told is None else told
    return min(max(cached, 0), prompt)
