"""The HTTP server in front of the proxy's clients."""

import logging
import socket
from collections.abc import Sequence
from typing import Any

from agent.sources.client_connection import BoundedProtocol
from agent.sources.listening import AsgiServer
from agent.sources.proxy.reverse_proxy import ReverseProxy
from agent.sources.socket_clients import SocketClients

# Longer than the 60 s for which most load balancers keep an idle connection, so that none sends
# a request into a connection that is being closed.
_IDLE_S = 75

# A stream may be read slowly, and waits in little memory. A slow reader's kernel takes a part of
# its buffer at a time, which is a minute of a stream or more.
UNREAD_S = 300.0


class RelayProtocol(BoundedProtocol):
    """The HTTP protocol for an application that only relays."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # uvicorn would log each unfinished response of an engine and each malformed request of a
        # client. Neither is a fault of the agent, and the first is measured.
        self.logger = _SILENT

    def on_headers_complete(self) -> None:
        """Handle the complete head; drop later lines, which are trailers and not relayed."""
        super().on_headers_complete()
        if not self._ignores_upgrade:
            self.headers = []

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
