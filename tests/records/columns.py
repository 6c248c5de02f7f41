"""Makes the columns that minutes are computed from."""

from collections.abc import Sequence

from agent.analysis.efficiency.request_activity import Activities, request_activities
from agent.records.columns import MinuteRequests
from agent.records.request import RequestRecord
from agent.store.minutes import ONE_PROMPT_ROUTE, minute_requests_from


def minute_requests(records: Sequence[RequestRecord]) -> MinuteRequests:
    """These requests, as if they were read from rows; they met no objective."""
    return minute_requests_from([[_row(number, record) for number, record in enumerate(records)]])


def active(records: Sequence[RequestRecord], cached_share: float = 0.0) -> Activities:
    """When the engine worked on these requests."""
    return request_activities(minute_requests(records), cached_share)


def _row(number: int, record: RequestRecord) -> tuple[object, ...]:
    return (
        *(number, record.vantage.value, record.status.value, "{}"),
        *(record.started_at, record.ended_at, record.ttft_s),
        *(record.queue_s, record.prefill_s, record.decode_s),
        *(record.input_tokens, record.cached_tokens, record.output_tokens),
        None if record.proxied is None else record.proxied.choices,
        *(record.finish_reason == "abort", record.route == ONE_PROMPT_ROUTE, False, False),
    )
