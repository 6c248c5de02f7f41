"""The response to one client, and the error responses of the proxy itself.

Pieces of a stream go past the server. Errors have the JSON shape that OpenAI clients parse.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from agent.sources.client_connection import RETRY_AFTER_S
from agent.sources.proxy.exchange import RawHeaders
from agent.sources.proxy.headers import HeaderLines, with_added
from agent.sources.proxy.relay_context import Scope, Send


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


# The ASGI extension with the client's connection.
CLIENT = "goodput.client"


class ProxyClient(Protocol):
    """The connection of the client whose request is served.

    `when_gone` is called if the client leaves before the end of the response.
    """

    when_gone: Callable[[], None] | None

    @property
    def gone(self) -> bool:
        """Whether the client has left."""

    def takes_now(self) -> bool:
        """Whether a piece of the response can be written now."""

    def write(self, piece: bytes) -> None:
        """Write a piece of the response."""


class ClientResponse:
    """Sends the response. `client` is the connection, for pieces that need not wait for it.

    `added_headers` are sent if the response has none of their names.
    """

    __slots__ = ("_begun", "_send", "added_headers", "client")

    def __init__(self, scope: Scope, send: Send) -> None:
        self.client: ProxyClient = scope["extensions"][CLIENT]
        self._send = send
        self._begun = False
        self.added_headers: RawHeaders = ()

    async def begin(self, status: int, headers: RawHeaders) -> None:
        """Send the head."""
        self._begun = True
        lines = with_added(headers, self.added_headers)
        await self._send({"type": "http.response.start", "status": status, "headers": lines})

    async def send(self, data: bytes, *, more: bool) -> None:
        """Send a piece of the body when the client takes it."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def fail(self, error: ErrorResponse) -> None:
        """Send a response of the proxy's own; does nothing if a response has begun."""
        if self._begun:
            return
        body = error.body
        await self.begin(error.status, error.headers(len(body)))
        await self.send(body, more=False)

    def watch(self, when_gone: Callable[[], None]) -> None:
        """Call when the client leaves, or now if it has left."""
        self.client.when_gone = when_gone
        if self.client.gone:
            when_gone()
