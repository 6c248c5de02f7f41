"""The server that clients of the proxy meet."""

import logging
import socket
from typing import Any

from agent.sources.listening import AsgiServer, BoundedProtocol
from agent.sources.proxy.proxy import Proxy

# Longer than the 60 s for which load balancers mostly keep an idle connection, so that none sends
# a request into one that is just being closed.
_IDLE_S = 75


class RelayProtocol(BoundedProtocol):
    """uvicorn's, for an application that only relays.

    A client that closes its sending side has left: uvicorn then closes the other side too, as it
    does in the engine itself, because nothing tells such a client from one that is gone.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # It would tell of each answer that an engine left unfinished, and of each malformed
        # request; the first is measured, and both are the doing of others.
        self.logger = _SILENT

    def on_headers_complete(self) -> None:
        """The head is complete; lines that come after it are trailers, which nobody relays."""
        super().on_headers_complete()
        self.headers = []


_SILENT = logging.Logger("proxy", level=logging.CRITICAL + 1)


def proxy_server(proxy: Proxy, listening: socket.socket) -> AsgiServer:
    """A server that adds nothing of its own to what the engines answer."""
    return AsgiServer(
        proxy,
        listening,
        http=RelayProtocol,
        server_header=False,
        date_header=False,
        # The address of the peer is what is relayed, not what the peer says of others.
        proxy_headers=False,
        timeout_keep_alive=_IDLE_S,
    )
