"""The response to one client, through its server or, for pieces of a stream, past it."""

from collections.abc import Callable
from typing import Protocol

from agent.sources.proxy.error_responses import ErrorResponse
from agent.sources.proxy.exchange import RawHeaders
from agent.sources.proxy.headers import with_added
from agent.sources.proxy.relay_context import Scope, Send

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
