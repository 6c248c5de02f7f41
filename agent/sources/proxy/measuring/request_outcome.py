"""Status and error of a request, from the relay's ending and the response."""

from collections.abc import Mapping
from typing import NamedTuple

from agent.records.request import Status
from agent.sources.proxy.exchange import Ending
from agent.sources.proxy.measuring.response_readers import ResponseFindings


class RequestOutcome(NamedTuple):
    """How a request ended; `error` is a short code, None if nothing failed."""

    status: Status
    error: str | None


_OK = RequestOutcome(Status.OK, None)
_UNFINISHED = RequestOutcome(Status.ERROR, "unfinished")
_ENDINGS: Mapping[Ending, RequestOutcome] = {
    Ending.CLIENT_GONE: RequestOutcome(Status.CANCELLED, "client_gone"),
    Ending.ENGINE_GONE: RequestOutcome(Status.ERROR, "engine_gone"),
    Ending.UNREACHABLE: RequestOutcome(Status.ERROR, "unreachable"),
    Ending.TIMEOUT: RequestOutcome(Status.TIMEOUT, "timeout"),
    Ending.REFUSED: RequestOutcome(Status.ERROR, "refused"),
}
# The engine gave the request up: vLLM does so when it is stopped or paused.
_GIVEN_UP = ("abort", "error")
# In the types of errors that say what is wrong with the request.
_MISTAKES = ("badrequest", "invalid", "notfound", "validation")
_THROTTLED = frozenset((429, 503))
# 408 and 499 say that a request was not read or not answered in time.
_NOT_THE_CLIENTS = frozenset((408, 429, 499))


def outcome_of(
    ending: Ending, http_status: int | None, findings: ResponseFindings, *, streamed: bool
) -> RequestOutcome:
    """Return the outcome of an exchange.

    An error in the response wins over the ending, and so does a finish reason which says that the
    engine gave the request up. A client that leaves after the end of the stream got the whole
    response. A stream that stops without a finish reason failed.
    """
    if findings.error is not None:
        return RequestOutcome(Status.ERROR, findings.error)
    if http_status is not None and http_status >= 300:
        return RequestOutcome(_status_of(http_status), f"http_{http_status}")
    for reason in _GIVEN_UP:
        if reason in findings.finish_reasons:
            return RequestOutcome(Status.ERROR, reason)
    if findings.done:
        return _OK
    if ending is not Ending.COMPLETE:
        return _ENDINGS[ending]
    return _UNFINISHED if streamed and not findings.finish_reasons else _OK


def engine_failed(findings: ResponseFindings) -> bool:
    """Return whether a response with the status 200 says that the engine failed.

    vLLM reports what went wrong after the head as an event of the stream.
    """
    if findings.error is not None:
        return not any(mistake in findings.error.lower() for mistake in _MISTAKES)
    return any(reason in findings.finish_reasons for reason in _GIVEN_UP)


def _status_of(http_status: int) -> Status:
    """The status of a response other than 2xx; most of 4xx are the client's own mistakes."""
    if http_status in _THROTTLED:
        return Status.THROTTLED
    if 400 <= http_status < 500 and http_status not in _NOT_THE_CLIENTS:
        return Status.INVALID
    return Status.ERROR
