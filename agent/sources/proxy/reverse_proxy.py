"""The reverse proxy: an ASGI application in front of one or several engines."""

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from ssl import SSLContext
from typing import Any

from agent.catalog.reasons import ProxyFailure
from agent.sources.client_connection import BoundedProtocol, SocketClients
from agent.sources.listening import AsgiServer
from agent.sources.proxy.client_response import CLIENT, PROXY_FAILED, STOPPING
from agent.sources.proxy.engine_connection import ConnectionPool
from agent.sources.proxy.exchange import Ending, GuardedMeasuring, Measuring, OnFailure
from agent.sources.proxy.load_balancer import (
    EngineLookup,
    LoadBalancer,
    OpenRequests,
    ProxiedEngine,
)
from agent.sources.proxy.outlier_detection import OutlierDetection
from agent.sources.proxy.relay import Relay
from agent.sources.proxy.relay_context import (
    BodyMemory,
    Clocks,
    ProxyLimits,
    Receive,
    RelayContext,
    Scope,
    Send,
)

_LOG = logging.getLogger(__name__)


class ReverseProxy:
    """Relays every request and measures those that `measuring` wants.

    `on_failure` counts failures inside the agent. The traffic went on in each case: the request was
    relayed unmeasured, or to an engine chosen without load balancing. Only after
    `ProxyFailure.RELAY` did the client get an error response of the proxy.
    """

    def __init__(
        self,
        engines: Sequence[ProxiedEngine],
        lookup: EngineLookup,
        *,
        measuring: Measuring | None,
        clocks: Clocks,
        limits: ProxyLimits,
        on_failure: OnFailure,
        open_requests: OpenRequests | None = None,
        tls: SSLContext | None = None,
        outliers: OutlierDetection | None = None,
    ) -> None:
        self._on_failure = on_failure
        self._logged: set[ProxyFailure] = set()
        self._live: set[Relay] = set()
        self._draining = False
        self._drained = asyncio.Event()
        self.balancer = LoadBalancer(engines, lookup, open_requests, outliers, clocks.monotonic)
        self._context = RelayContext(
            balancer=self.balancer,
            pools={
                engine.name: ConnectionPool(engine.url, clocks.monotonic, limits.connect_s, tls)
                for engine in engines
            },
            measuring=None if measuring is None else GuardedMeasuring(measuring, self._failed),
            clocks=clocks,
            limits=limits,
            body_memory=BodyMemory(limits.body_memory_bytes),
            kept_memory=BodyMemory(limits.kept_memory_bytes),
            on_failure=self._failed,
        )

    @property
    def live(self) -> int:
        """The number of exchanges under way with clients."""
        return len(self._live)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI call. Catches every exception except `CancelledError` at shutdown."""
        if scope["type"] != "http":
            return
        relay = Relay(self._context, scope, receive, send)
        if self._draining:
            await relay.respond(STOPPING)
            return
        self._live.add(relay)
        try:
            await relay.run()
        except Exception:
            self._failed(ProxyFailure.RELAY)
            await relay.respond(PROXY_FAILED)
        finally:
            self._live.discard(relay)
            if self._draining and not self._live:
                self._drained.set()

    async def drain(self, limit_s: float) -> int:
        """Refuse new requests and let open ones end; return how many were cut after the limit."""
        self._draining = True
        if not self._live:
            return 0
        self._drained.clear()
        try:
            async with asyncio.timeout(limit_s):
                await self._drained.wait()
        except TimeoutError:
            pass
        cut = list(self._live)
        for relay in cut:
            relay.interrupt(Ending.REFUSED)
        return len(cut)

    async def close(self) -> None:
        """Cut open exchanges and close the connections to the engines."""
        await self.drain(0)
        for pool in self._context.pools.values():
            pool.close()

    def _failed(self, reason: ProxyFailure) -> None:
        """Count a failure inside the agent; log the first one of each reason."""
        if reason not in self._logged:
            self._logged.add(reason)
            _LOG.exception("proxy failure %r: the traffic goes on; logged once", str(reason))
        self._on_failure(reason)


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
