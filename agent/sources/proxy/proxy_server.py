"""The HTTP server in front of the proxy's clients."""

import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any

from agent.sources.client_connection import BoundedProtocol, SocketClients
from agent.sources.listening import AsgiServer
from agent.sources.proxy.client_response import CLIENT
from agent.sources.proxy.reverse_proxy import ReverseProxy

# Longer than the 60 s for which most load balancers keep an idle connection, so that none sends
# a request into a connection that is being closed.
_IDLE_S = 75

# A stream may be read slowly, and waits in little memory. A slow reader's kernel takes a part of
# its buffer at a time, which is a minute of a stream or more.
UNREAD_S = 300.0

# A client may have sent a request before it learns that the server stops.
_LAST_REQUEST_S = 1.0


class RelayProtocol(BoundedProtocol):
    """The HTTP protocol for an application that only relays."""

    when_gone: Callable[[], None] | None = None
    _stopping = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # uvicorn would log each unfinished response of an engine and each malformed request of a
        # client. Neither is a fault of the agent, and the first is measured.
        self.logger = _SILENT

    def on_message_begin(self) -> None:
        """Let the proxy write to the connection."""
        super().on_message_begin()
        extensions: Any = {CLIENT: self}
        self.scope["extensions"] = extensions

    def connection_lost(self, exc: Exception | None) -> None:
        """Signal the relay that its client left."""
        super().connection_lost(exc)
        if self.when_gone is not None:
            self.when_gone()

    @property
    def gone(self) -> bool:
        """Whether the client has left."""
        return bool(self._running.disconnected)

    def takes_now(self) -> bool:
        """Whether a piece of a chunked response can be written now."""
        running = self._running
        return (
            running.chunked_encoding
            and running.response_started
            and not running.disconnected
            and not self.flow.write_paused
        )

    def write(self, piece: bytes) -> None:
        """Write a piece of a chunked response."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))

    def on_headers_complete(self) -> None:
        """Handle the complete head; drop later lines, which are trailers and not relayed."""
        super().on_headers_complete()
        if not self._ignores_upgrade:
            self.headers = []
            if self._stopping:
                self.cycle.keep_alive = False

    def shutdown(self) -> None:
        """Serve the request that is open or on its way, then close the connection."""
        self._stopping = True
        if self._answered:
            self.loop.call_later(_LAST_REQUEST_S, self._close_unused)
        else:
            super().shutdown()

    def _close_unused(self) -> None:
        if self._answered and not self._head_bytes:
            self.transport.close()

    def refuses_upgrade(self, upgrade: bytes) -> bool:
        """Whether the proxy refuses the request: it relays no WebSockets."""
        return b"websocket" in upgrade


_SILENT = logging.Logger("proxy", level=logging.CRITICAL + 1)


def proxy_server(
    proxy: ReverseProxy,
    listening: socket.socket | Sequence[socket.socket],
    clients: SocketClients | None = None,
    **options: Any,
) -> AsgiServer:
    """Return a server that adds no headers of its own to the engines' responses.

    `options` are further ones of uvicorn, such as TLS.
    """
    return AsgiServer(
        proxy,
        listening,
        clients,
        http=RelayProtocol,
        server_header=False,
        date_header=False,
        # Relay the address of the peer, not the one in its X-Forwarded-For.
        proxy_headers=False,
        timeout_keep_alive=_IDLE_S,
        **options,
    )
