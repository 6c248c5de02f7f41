"""The HTTP server in front of the proxy's clients."""

import logging
import socket
from collections.abc import Mapping
from typing import Any

from agent.sources.listening import AsgiServer, BoundedProtocol
from agent.sources.proxy.reverse_proxy import ReverseProxy

# Longer than the 60 s for which most load balancers keep an idle connection, so that none sends
# a request into a connection that is being closed.
_IDLE_S = 75


class RelayProtocol(BoundedProtocol):
    """uvicorn's HTTP protocol for an application that only relays.

    A client that closes its sending side counts as gone: uvicorn then closes the other side too, as
    it does in the engine itself. The two cases cannot be distinguished.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # uvicorn would log each unfinished response of an engine and each malformed request of a
        # client. Neither is a fault of the agent, and the first is measured.
        self.logger = _SILENT

    def on_headers_complete(self) -> None:
        """Handle the complete head; drop later lines, which are trailers and not relayed."""
        super().on_headers_complete()
        self.headers = []


_SILENT = logging.Logger("proxy", level=logging.CRITICAL + 1)


def proxy_server(
    proxy: ReverseProxy, listening: socket.socket, options: Mapping[str, Any] | None = None
) -> AsgiServer:
    """Return a server that adds no headers of its own to the engines' responses.

    `options` are further ones of uvicorn, such as TLS.
    """
    return AsgiServer(
        proxy,
        listening,
        http=RelayProtocol,
        server_header=False,
        date_header=False,
        # Relay the address of the peer, not the one in its X-Forwarded-For.
        proxy_headers=False,
        timeout_keep_alive=_IDLE_S,
        **(options or {}),
    )
