"""The reverse proxy: an ASGI application in front of one or several engines."""

import asyncio
import logging
from collections.abc import Sequence
from ssl import SSLContext

from agent.catalog.reasons import ProxyFailure
from agent.sources.proxy.body_room import BodyRoom
from agent.sources.proxy.connection_pool import ConnectionPool
from agent.sources.proxy.error_responses import PROXY_FAILED, STOPPING
from agent.sources.proxy.exchange import Ending, Measuring, OnFailure
from agent.sources.proxy.guard import GuardedMeasuring
from agent.sources.proxy.load_balancer import EngineLookup, LoadBalancer, ProxiedEngine
from agent.sources.proxy.open_requests import OpenRequests
from agent.sources.proxy.outlier_detection import OutlierDetection
from agent.sources.proxy.relay import Relay
from agent.sources.proxy.relay_context import (
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
            room=BodyRoom(limits.body_room_bytes),
            kept=BodyRoom(limits.kept_room_bytes),
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
