"""The proxy's own error responses, in the JSON shape that OpenAI clients parse."""

import json
from dataclasses import dataclass

from agent.sources.client_connection import RETRY_AFTER_S
from agent.sources.proxy.headers import HeaderLines


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorResponse:
    """An error response of the proxy; `closes` also closes the client's connection."""

    status: int
    kind: str
    message: str
    retry_after_s: int | None = None
    closes: bool = False

    @property
    def body(self) -> bytes:
        """The error as JSON."""
        error = {"message": self.message, "type": self.kind, "code": self.status}
        return json.dumps({"error": error}).encode()

    def headers(self, size_bytes: int) -> HeaderLines:
        """Return the header lines for a body of `size_bytes`."""
        lines = [
            (b"content-type", b"application/json"),
            (b"content-length", str(size_bytes).encode()),
        ]
        if self.retry_after_s is not None:
            lines.append((b"retry-after", str(self.retry_after_s).encode()))
        if self.closes:
            lines.append((b"connection", b"close"))
        return lines


STOPPING = ErrorResponse(
    status=503,
    kind="proxy_stopping",
    message="this proxy is stopping and takes no new requests; send the request again",
    retry_after_s=RETRY_AFTER_S,
    closes=True,
)
NO_WEBSOCKET = ErrorResponse(
    status=501,
    kind="upgrade_refused",
    message="this proxy relays HTTP and no WebSocket; connect to the engine directly",
    closes=True,
)
PROXY_FAILED = ErrorResponse(
    status=500,
    kind="proxy_error",
    message="the proxy failed on this request; see its log",
)


def unreachable(engine: str, reason: str) -> ErrorResponse:
    """Return the error for an engine that sent no response."""
    return ErrorResponse(
        status=502, kind="engine_unreachable", message=f"engine {engine} sent no response: {reason}"
    )


def timed_out(engine: str, step: str, limit_s: float) -> ErrorResponse:
    """Return the error for an engine that exceeded a timeout."""
    return ErrorResponse(
        status=504,
        kind="engine_timeout",
        message=f"engine {engine} did not {step} within {limit_s:g} s",
    )
