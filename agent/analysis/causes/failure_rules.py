"""Rules for requests that failed. Such requests have no excess; the first rule gives the cause."""

from agent.analysis.causes.missed_case import Claim, MissedCase
from agent.catalog.reasons import ProxyFailure
from agent.records.request import Status

# A poll finds a death after the requests broke. Its event counts for requests that ran at most this
# long before or after it.
_SEEN_WITHIN_S = 15.0
_SERVER_ERROR = 500
_UNAVAILABLE = 503


def admission(case: MissedCase, left_s: float) -> Claim | None:
    """The engine refused requests because its queue was full."""
    record = case.record
    refused = case.timeline.sampled.rejected(record.started_at, record.ended_at)
    if record.status is Status.THROTTLED:
        return Claim(0.0, (f"the request was refused with HTTP status {record.http_status}",))
    if record.http_status != _UNAVAILABLE or refused <= 0:
        return None
    return Claim(0.0, (f"the engine refused {refused:.0f} requests then (by its samples)",))


def engine_failure(case: MissedCase, left_s: float) -> Claim | None:
    """The engine died, hung, or answered with an error of its own."""
    record = case.record
    for at, event in case.timeline.died_at:
        if record.started_at - _SEEN_WITHIN_S <= at <= record.ended_at + _SEEN_WITHIN_S:
            return Claim(0.0, (f"event {event} of the engine at {at:.0f} (Unix time)",))
    if record.status is not Status.ERROR:
        return None
    status = record.http_status
    if status is not None and status >= _SERVER_ERROR:
        return Claim(0.0, (f"the engine answered with HTTP status {status}",))
    error = record.proxied and record.proxied.error
    if error is None or error == ProxyFailure.WORKER_DIED:
        return None
    return Claim(0.0, (f"the response ended with the error {error}",))
