"""The reverse proxy in front of one or several engines, its clients, and its server."""

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Sequence
from ssl import SSLContext
from typing import cast

from agent.catalog.reasons import ClientCut, ProxyFailure
from agent.sources.client_connection import BoundedClient, SocketClients
from agent.sources.listening import TlsFiles, sweep_regularly
from agent.sources.proxy.client_response import STOPPING, RelayClient
from agent.sources.proxy.engine_connection import ConnectionPool
from agent.sources.proxy.engine_request import ClientRequest
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
    DeferredWork,
    ProxyLimits,
    RelayContext,
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
            deferred=DeferredWork(),
            ended=self._ended,
            on_failure=self._failed,
        )

    @property
    def live(self) -> int:
        """The number of exchanges under way with clients."""
        return len(self._live)

    def relay(self, client: RelayClient, request: ClientRequest) -> Relay:
        """Return the relay of a request, which may have come in part."""
        return Relay(self._context, client, request)

    def begin(self, relay: Relay) -> None:
        """Begin relaying. Raises nothing."""
        try:
            if self._draining:
                relay.refuse(STOPPING)
            else:
                self._live.add(relay)
                relay.begin()
        except Exception:
            relay.fault()

    def _ended(self, relay: Relay) -> None:
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
        """Cut open exchanges, make the records that wait, and close the engines' connections."""
        await self.drain(0)
        self._context.deferred.finish()
        for pool in self._context.pools.values():
            pool.close()

    def _failed(self, reason: ProxyFailure) -> None:
        """Count a failure inside the agent; log the first one of each reason."""
        if reason not in self._logged:
            self._logged.add(reason)
            _LOG.exception("proxy failure %r: the traffic goes on; logged once", str(reason))
        self._on_failure(reason)


# A stream may be read slowly, and waits in little memory. A slow reader's kernel takes a part of
# its buffer at a time, which is a minute of a stream or more.
UNREAD_S = 300.0

# A client may have sent a request before it learns that the server stops.
_LAST_REQUEST_S = 1.0


class ProxyClient(BoundedClient):
    """A client's connection. Its requests are relayed one after another."""

    def __init__(self, proxy: ReverseProxy, clients: SocketClients, *, scheme: str) -> None:
        super().__init__(clients, asyncio.get_running_loop())
        self.scheme = scheme
        self.address: str | None = None
        self._proxy = proxy
        self._relay: Relay | None = None
        # The request that is read, and those that are not relayed yet.
        self._request: ClientRequest | None = None
        self._queue: deque[ClientRequest] = deque()
        self._stopping = self._held = False
        # When the connection is closed if nothing comes after the last response.
        self._closes_s: float | None = None
        self._reading_paused = self._writing_paused = False

    # What limits are applied to

    @property
    def reading_paused(self) -> bool:
        """Whether nothing is read from the client now."""
        return self._reading_paused

    @property
    def writing_paused(self) -> bool:
        """Whether a response waits until the client takes it."""
        return self._writing_paused

    @property
    def _answered(self) -> bool:
        return self._relay is None and not self._queue

    @property
    def _response_started(self) -> bool:
        return self._relay is not None and self._relay.response is not None

    def refuses_upgrade(self, upgrade: bytes) -> bool:
        """Whether the proxy refuses the request: it relays no WebSockets."""
        return b"websocket" in upgrade

    def overdue(self, now_s: float) -> ClientCut | None:
        """Return the limit that the client exceeds; close its connection after a long pause."""
        if self._closes_s is not None and now_s > self._closes_s:
            self.transport.close()
            return None
        return super().overdue(now_s)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the first request."""
        # uvloop's transports are not subclasses of asyncio's.
        self.transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if isinstance(peer, tuple) else None
        self._enter()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request that is relayed."""
        self._leave()
        self._queue.clear()
        # The parser holds bound methods of this object: break the cycle.
        self.parser = self._request = None
        relay, self._relay = self._relay, None
        if relay is None:
            return
        try:
            relay.leave()
        except Exception:
            relay.fault()

    def data_received(self, data: bytes) -> None:
        """Parse bytes of requests, and relay what came."""
        self._closes_s = None
        super().data_received(data)
        if self.transport.is_closing():
            return
        relay = self._relay
        if relay is None:
            self._relay_next()
            return
        try:
            relay.take_body()
        except Exception:
            relay.fault()

    def pause_writing(self) -> None:
        """Read no more from the engine."""
        self._take(more=False)

    def resume_writing(self) -> None:
        """Read from the engine again."""
        self._take(more=True)

    def _take(self, *, more: bool) -> None:
        self._writing_paused = not more
        if self._relay is not None:
            self._relay.client_takes(more=more)

    # Requests

    def _begin_request(self) -> None:
        self.headers, self.url = [], b""

    def on_url(self, url: bytes) -> None:
        """Take a part of the URL."""
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a line of the head, or of the trailers, which are dropped."""
        self.headers.append((name.lower(), value))

    def _take_head(self) -> None:
        parser = self.parser
        # uvicorn closes the connection of each client of HTTP/1.0, too.
        lasts = parser.get_http_version() != "1.0" and parser.should_keep_alive()
        self._request = ClientRequest(
            parser.get_method(),
            self.url,
            self.headers,
            keeps_alive=lasts and not self._stopping,
        )
        self._queue.append(self._request)
        self.headers = []
        self._pause_if_needed()

    def _take_body(self, body: bytes) -> None:
        if self._request is not None:
            self._request.add_body(body)

    def _end_request(self) -> None:
        if self._request is not None:
            self._request.whole = True

    def _relay_next(self) -> None:
        """Relay the next request, if it is its turn."""
        while self._relay is None and self._queue and not self.transport.is_closing():
            self.idle_since_s = None
            self._relay = relay = self._proxy.relay(self, self._queue.popleft())
            if self._queue or self._reading_paused:
                self._pause_if_needed()
            self._proxy.begin(relay)

    def hold(self, held: bool) -> None:
        """Read nothing more of the request's body, or go on."""
        self._held = held
        self._pause_if_needed()

    def _pause_if_needed(self) -> None:
        """Read nothing while a request waits for its turn, or for the engine."""
        waits = self._held or (bool(self._queue) and self._relay is not None)
        if waits is self._reading_paused or self.transport.is_closing():
            return
        self._reading_paused = waits
        if waits:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def finish(self, request: ClientRequest) -> None:
        """Go on with the next request after a whole response."""
        self._relay = None
        if not request.keeps_alive:
            self.transport.close()
        if self._finish_answered():
            self._closes_s = self.loop.time() + self.idle_s
        if self._queue:
            self.loop.call_soon(self._relay_next)

    # The end

    def shutdown(self) -> None:
        """Serve the request that is open or on its way, then close the connection."""
        self._stopping = True
        if self._answered:
            self.loop.call_later(_LAST_REQUEST_S, self._close_unused)
        elif self._queue:
            self._queue[-1].keeps_alive = False
        elif self._relay is not None:
            self._relay.request.keeps_alive = False

    def _close_unused(self) -> None:
        if self._answered and not self._head_bytes:
            self.transport.close()


# uvicorn's own.
_BACKLOG = 2048
_STOP_WITHIN_S = 5.0


class ProxyServer:
    """Serves a proxy on one socket, or on several of one address."""

    def __init__(
        self,
        proxy: ReverseProxy,
        listening: socket.socket | Sequence[socket.socket],
        clients: SocketClients | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        self._proxy = proxy
        self._sockets = [listening] if isinstance(listening, socket.socket) else [*listening]
        self._clients = clients or SocketClients("listen")
        self._tls = tls
        self._servers: list[asyncio.Server] = []
        self._starting: asyncio.Task[None] | None = None
        self._sweeping: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port of the address."""
        return int(self._sockets[0].getsockname()[1])

    def start(self) -> None:
        """Serve in the running event loop."""
        self._starting = asyncio.create_task(self._start())
        self._sweeping = asyncio.create_task(sweep_regularly(self._clients))

    async def _start(self) -> None:
        loop, tls = asyncio.get_running_loop(), self._tls
        for each in self._sockets:
            server = await loop.create_server(
                self._client,
                sock=each,
                backlog=_BACKLOG,
                ssl=None if tls is None else tls.context(),
            )
            self._servers.append(server)

    def _client(self) -> ProxyClient:
        scheme = "http" if self._tls is None else "https"
        return ProxyClient(self._proxy, self._clients, scheme=scheme)

    async def stop(self, *, within_s: float | None = _STOP_WITHIN_S) -> None:
        """Accept no new clients, and wait until the open requests have ended or the limit is over.

        Clients that are left then are cut off. A wait that is cancelled lets them go on, and a
        later call can set a limit.
        """
        if self._starting is None or self._sweeping is None:
            return
        await self._starting
        for server in self._servers:
            server.close()
        for each in self._sockets:
            each.close()
        for client in self._clients:
            if isinstance(client, ProxyClient):
                client.shutdown()
        try:
            async with asyncio.timeout(within_s):
                await self._clients.all_left()
        except TimeoutError:
            name, left = self._clients.name, [*self._clients]
            _LOG.warning("%s: %d clients were cut off after %g s", name, len(left), within_s)
            for client in left:
                client.transport.abort()
            await self._clients.all_left()
        self._sweeping.cancel()
