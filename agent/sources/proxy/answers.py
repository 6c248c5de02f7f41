"""What the proxy itself answers, in the shape in which OpenAI's clients read errors."""

import json
from dataclasses import dataclass

from agent.sources.proxy.headers import HeaderLines

_RETRY_AFTER_S = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnAnswer:
    """An error that the proxy tells; `closes` also ends the client's connection."""

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
        """The header lines of a body of that size."""
        lines = [
            (b"content-type", b"application/json"),
            (b"content-length", str(size_bytes).encode()),
        ]
        if self.retry_after_s is not None:
            lines.append((b"retry-after", str(self.retry_after_s).encode()))
        if self.closes:
            lines.append((b"connection", b"close"))
        return lines


STOPPING = OwnAnswer(
    status=503,
    kind="proxy_stopping",
    message="this proxy is stopping and takes no new requests; send the request again",
    retry_after_s=_RETRY_AFTER_S,
    closes=True,
)
NO_WEBSOCKET = OwnAnswer(
    status=501,
    kind="upgrade_refused",
    message="this proxy relays HTTP and no WebSocket; connect to the engine itself for that",
    closes=True,
)
BROKEN = OwnAnswer(
    status=500,
    kind="proxy_error",
    message="the proxy failed on this request; its log tells why",
)


def unreachable(engine: str, reason: str) -> OwnAnswer:
    """The answer where an engine gave none."""
    return OwnAnswer(
        status=502, kind="engine_unreachable", message=f"engine {engine} gave no answer: {reason}"
    )


def too_slow(engine: str, what: str, limit_s: float) -> OwnAnswer:
    """The answer where an engine let a limit pass."""
    return OwnAnswer(
        status=504,
        kind="engine_timeout",
        message=f"engine {engine} did not {what} within {limit_s:g} s",
    )
