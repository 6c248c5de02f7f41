"""The reverse proxy: an ASGI application that stands before one or several engines."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from agent.sources.proxy.answers import BROKEN, STOPPING
from agent.sources.proxy.choosing import EngineChoice, EngineFacts, ProxiedEngine
from agent.sources.proxy.exchange import Ending, Measuring
from agent.sources.proxy.guard import GuardedMeasuring
from agent.sources.proxy.parts import Clocks, Limits, ProxyParts, Receive, Scope, Send
from agent.sources.proxy.pool import EnginePool
from agent.sources.proxy.relay import Relay

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProxySinks:
    """Where the proxy tells what went wrong inside the agent, by a short word to count.

    Whatever the word, the traffic went on: a request was relayed unmeasured, or to an engine that
    was not chosen with care. Only with "relay" did the client get an error of the proxy's own.
    """

    on_failure: Callable[[str], None]


class Proxy:
    """Relays every request as it came, and has those measured that `measuring` wants."""

    def __init__(
        self,
        engines: Sequence[ProxiedEngine],
        facts: EngineFacts,
        *,
        measuring: Measuring | None,
        clocks: Clocks,
        sinks: ProxySinks,
        limits: Limits | None = None,
    ) -> None:
        self._sinks = sinks
        self._told: set[str] = set()
        self._live: set[Relay] = set()
        self._draining = False
        self._quiet = asyncio.Event()
        limits = limits or Limits()
        self._parts = ProxyParts(
            choice=EngineChoice(engines, facts),
            pools={
                engine.name: EnginePool(engine.url, clocks.monotonic, limits.connect_s)
                for engine in engines
            },
            measuring=None if measuring is None else GuardedMeasuring(measuring, self._failed),
            clocks=clocks,
            limits=limits,
            on_failure=self._failed,
        )

    @property
    def outstanding(self) -> Mapping[str, int]:
        """The requests that each engine has not answered to the end, by its name."""
        return self._parts.choice.outstanding

    @property
    def live(self) -> int:
        """The exchanges that are under way with clients."""
        return len(self._live)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI call. Nothing leaves it but the end of the event loop."""
        if scope["type"] != "http":
            return
        relay = Relay(self._parts, scope, receive, send)
        if self._draining:
            await relay.answer(STOPPING)
            return
        self._live.add(relay)
        try:
            await relay.run()
        except Exception:
            self._failed("relay")
            await relay.answer(BROKEN)
        finally:
            self._live.discard(relay)
            if self._draining and not self._live:
                self._quiet.set()

    async def drain(self, limit_s: float) -> int:
        """Refuse what is new and let the rest end; how many had to be cut after the limit."""
        self._draining = True
        if not self._live:
            return 0
        self._quiet.clear()
        try:
            async with asyncio.timeout(limit_s):
                await self._quiet.wait()
        except TimeoutError:
            pass
        cut = list(self._live)
        for relay in cut:
            relay.interrupt(Ending.REFUSED)
        return len(cut)

    async def close(self) -> None:
        """Cut what is under way and close the connections to the engines."""
        await self.drain(0)
        for pool in self._parts.pools.values():
            pool.close()

    def _failed(self, reason: str) -> None:
        """Count a failure inside the agent; the log tells the first of each kind."""
        if reason not in self._told:
            self._told.add(reason)
            _LOG.exception("the proxy goes on after a failure in %r; told once", reason)
        self._sinks.on_failure(reason)
