"""The response to one client, and the error responses of the proxy itself.

Errors have the JSON shape that OpenAI clients parse.
"""

import asyncio
import json
from dataclasses import dataclass
from typing import Protocol

from agent.sources.client_connection import RETRY_AFTER_S, STATUS_LINE
from agent.sources.proxy.engine_request import ClientRequest
from agent.sources.proxy.exchange import RawHeaders
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


_BODYLESS = (204, 304)


class RelayClient(Protocol):
    """The connection of the client whose request is relayed."""

    transport: asyncio.Transport
    address: str | None
    scheme: str

    @property
    def writing_paused(self) -> bool:
        """Whether the client takes its response slowly."""

    def hold(self, held: bool) -> None:
        """Read nothing more of the request's body, or go on."""

    def finish(self, request: ClientRequest) -> None:
        """Go on after the whole response."""


class ClientResponse:
    """Writes the response of one request; the head is written with the first piece of the body.

    The request says whether the connection is kept open after it.
    """

    __slots__ = (
        "_bodyless",
        "_chunked",
        "_head",
        "_left_bytes",
        "_transport",
    )

    def __init__(
        self,
        transport: asyncio.Transport,
        request: ClientRequest,
        status: int,
        headers: RawHeaders,
    ) -> None:
        self._transport = transport
        self._left_bytes: int | None = None
        parts, closes = [STATUS_LINE[status]], False
        for name, value in headers:
            if name == b"content-length":
                self._left_bytes = int(value)
            elif name == b"connection":
                closes = True
            parts += (name, b": ", value, b"\r\n")
        self._bodyless = request.method == "HEAD" or status in _BODYLESS
        # Also for HTTP/1.0, as vLLM's own server does.
        self._chunked = self._left_bytes is None and not self._bodyless
        if closes:
            request.keeps_alive = False
        elif not request.keeps_alive:
            parts.append(b"connection: close\r\n")
        if self._chunked:
            parts.append(b"transfer-encoding: chunked\r\n")
        parts.append(b"\r\n")
        self._head = b"".join(parts)

    def flush(self) -> None:
        """Write the head, if it was not written."""
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)

    def send(self, data: bytes) -> None:
        """Write a piece of the body."""
        if not data or self._bodyless:
            return
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        elif self._left_bytes is not None:
            self._left_bytes -= len(data)
            if self._left_bytes < 0:
                raise RuntimeError("the response is longer than its content-length")
        self._write(data)

    def end(self, data: bytes) -> None:
        """Write the last piece of the body, which may be empty."""
        if self._chunked:
            piece = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
            self._write(piece + b"0\r\n\r\n")
            return
        self.send(data)
        self.flush()
        if self._left_bytes and not self._bodyless:
            raise RuntimeError("the response is shorter than its content-length")

    def _write(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        self._transport.write(data)
