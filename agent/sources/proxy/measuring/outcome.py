"""How a request ended, out of what the relay saw and what the answer told."""

from collections.abc import Mapping
from typing import NamedTuple

from agent.records.request import Status
from agent.sources.proxy.exchange import Ending
from agent.sources.proxy.measuring.reading import Findings


class Outcome(NamedTuple):
    """How a request ended; `error` is a short word for what went wrong, None where nothing did."""

    status: Status
    error: str | None


_OK = Outcome(Status.OK, None)
_UNFINISHED = Outcome(Status.ERROR, "unfinished")
_ENDINGS: Mapping[Ending, Outcome] = {
    Ending.CLIENT_GONE: Outcome(Status.CANCELLED, "client_gone"),
    Ending.ENGINE_GONE: Outcome(Status.ERROR, "engine_gone"),
    Ending.UNREACHABLE: Outcome(Status.ERROR, "unreachable"),
    Ending.TIMEOUT: Outcome(Status.TIMEOUT, "timeout"),
    Ending.REFUSED: Outcome(Status.ERROR, "refused"),
}
_THROTTLED = frozenset((429, 503))


def outcome_of(
    ending: Ending, http_status: int | None, findings: Findings, *, streamed: bool
) -> Outcome:
    """The outcome of an exchange.

    An error that the engine told comes before how the exchange ended; the client's own fault (HTTP
    4xx) is an error like any other. A client that leaves when the stream has ended got it all, and
    a stream that just stops, without saying why, failed.
    """
    if findings.error is not None:
        return Outcome(Status.ERROR, findings.error)
    if http_status is not None and http_status >= 300:
        status = Status.THROTTLED if http_status in _THROTTLED else Status.ERROR
        return Outcome(status, f"http_{http_status}")
    if findings.done:
        return _OK
    if ending is not Ending.COMPLETE:
        return _ENDINGS[ending]
    return _UNFINISHED if streamed and not findings.finishes else _OK
