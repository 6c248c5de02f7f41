"""Listening sockets, and uvicorn servers that run in the agent's own event loop."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from agent.errors import SettingsInvalid

_BACKLOG = 1024

# uvicorn's own limit, which it applies only with its h11 parser.
MAX_HEAD_BYTES = 64 * 1024


def open_socket(setting: str, host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0 takes a free one. Raises SettingsInvalid on failure."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        reason = error.strerror or error
        raise SettingsInvalid(
            [f"{setting}: cannot listen on {host}:{port}: {reason}; choose another address"]
        ) from error


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with a size limit on heads and trailers."""

    _head_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Parse bytes of a request; refuse a head above the limit."""
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse_head()

    def send_400_response(self, msg: str) -> None:
        """Refuse a malformed request, or a head above the limit."""
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
        else:
            super().send_400_response(msg)

    def _refuse_head(self) -> None:
        body = b"send a head of at most %d bytes" % MAX_HEAD_BYTES
        self.transport.write(
            STATUS_LINE[431]
            + b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
            + b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        self.transport.close()

    def on_headers_complete(self) -> None:
        """Handle the complete head. Raises ValueError, which stops the parser, above the limit."""
        # The bytes received may include a body, so count the head alone.
        if self._head_bytes > MAX_HEAD_BYTES:
            lines_bytes = sum(len(name) + len(value) + 4 for name, value in self.headers)
            if len(self.url) + lines_bytes > MAX_HEAD_BYTES:
                raise ValueError("the head is too long")
        self._head_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Pass on a part of the body, which has no limit here."""
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Reset the count at the end of the request."""
        self._head_bytes = 0
        super().on_message_complete()


_OPTIONS: dict[str, Any] = {
    "http": BoundedProtocol,
    "ws": "none",
    "lifespan": "off",
    "access_log": False,
    "log_config": None,
    "timeout_graceful_shutdown": 5,
}


class _EmbeddedServer(uvicorn.Server):
    """uvicorn without its signal handling: the agent stops all its servers together."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield


class AsgiServer:
    """Serves one ASGI application on one socket; `options` override uvicorn's."""

    def __init__(self, application: Any, listening: socket.socket, **options: Any) -> None:
        config = uvicorn.Config(application, **_OPTIONS | options)
        self._server = _EmbeddedServer(config)
        self._socket = listening
        self._serving: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port of the socket."""
        return int(self._socket.getsockname()[1])

    def start(self) -> None:
        """Serve in the running event loop."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))

    async def stop(self) -> None:
        """Accept no new requests and wait until the open ones have ended."""
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving
