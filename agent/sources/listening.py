"""Sockets and uvicorn servers that live inside this program's own event loop."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from agent.errors import SettingsInvalid

_BACKLOG = 1024

# uvicorn's own limit, which it keeps only with its other parser.
MAX_HEAD_BYTES = 64 * 1024


def open_socket(what: str, host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. SettingsInvalid where it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        reason = error.strerror or error
        raise SettingsInvalid(
            [f"{what}: cannot listen on {host}:{port}: {reason}; choose another address"]
        ) from error


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's, with an end to what a head, or the trailers of a body, take of the memory."""

    _head_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Parse what came; a sender whose head does not end is sent away."""
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse_head()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, or too much of it."""
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
        """The head is complete. ValueError, by which the parser stops, where it is too long."""
        # What came may hold more than the head, hence the second look.
        if self._head_bytes > MAX_HEAD_BYTES:
            lines_bytes = sum(len(name) + len(value) + 4 for name, value in self.headers)
            if len(self.url) + lines_bytes > MAX_HEAD_BYTES:
                raise ValueError("the head is too long")
        self._head_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body, of which the application may have as much as it likes."""
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
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
    """uvicorn without its own signal handling: the program stops all its servers together."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield


class AsgiServer:
    """One ASGI application on one socket; `options` are uvicorn's, where others are wanted."""

    def __init__(self, application: Any, listening: socket.socket, **options: Any) -> None:
        config = uvicorn.Config(application, **_OPTIONS | options)
        self._server = _EmbeddedServer(config)
        self._socket = listening
        self._serving: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._socket.getsockname()[1])

    def start(self) -> None:
        """Serve in the running event loop."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))

    async def stop(self) -> None:
        """Take nothing new and end when what is under way has ended."""
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving
