"""A worker of the proxy: relays and measures requests, and hands their records to the agent."""

import asyncio
import logging
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

import uvloop

from agent.analysis.verdicts import Judge
from agent.app.connection_limits import PROXY, ConnectionLimits, raise_descriptors
from agent.app.doors import tls_options
from agent.app.stopping import WORKER_FLUSHES_WITHIN_S
from agent.app.supervising import supervisor_gone
from agent.settings import Settings
from agent.settings.proxy_settings import ProxySettings
from agent.sources.listening import AsgiServer
from agent.sources.proxy.handover.messages import EngineState
from agent.sources.proxy.handover.place import HandoverPlace
from agent.sources.proxy.handover.sending import HandoverSender
from agent.sources.proxy.load_balancer import EngineLookup, ProxiedEngine
from agent.sources.proxy.measuring.request_measuring import MeasuringOptions, RequestMeasuring
from agent.sources.proxy.open_requests import OpenRequests
from agent.sources.proxy.proxy_server import proxy_server
from agent.sources.proxy.relay_context import Clocks, ProxyLimits
from agent.sources.proxy.reverse_proxy import ReverseProxy
from agent.sources.proxy.tracing.request_spans import ProxyTracing

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """What a worker gets from its supervisor: a listening socket and the way to the agent."""

    number: int
    listening: socket.socket
    handover: HandoverPlace
    open_requests: OpenRequests


class ProxyWorker:
    """The proxy in one process."""

    def __init__(self, settings: Settings, workplace: Workplace) -> None:
        proxy = settings.proxy
        self._drain_s = proxy.drain
        self._workplace = workplace
        self._tls = tls_options(settings.security)
        self._engines: Mapping[str, EngineState] = {}
        self._stopping = asyncio.Event()
        self._retired = False
        self._sender = HandoverSender(
            workplace.handover,
            workplace.number,
            on_engines=self._learn,
            on_retire=self._next_run_is_there,
            live=lambda: self._proxy.live,
        )
        exports = settings.otlp.forward_to is not None
        self._tracing = ProxyTracing(
            self._export if exports else None,
            service=settings.name,
            ratio=proxy.trace_ratio,
            client_sampling=proxy.client_sampling,
            keep=Judge(settings.all_objectives()).missed,
        )
        engines = [e for e in settings.engines if proxy.engine in (None, e.name)]
        self._loop = asyncio.get_running_loop()
        self._proxy = ReverseProxy(
            [ProxiedEngine(engine.name, engine.url) for engine in engines],
            EngineLookup(models=self._models_of, healthy=self._is_healthy),
            measuring=RequestMeasuring(
                settings.name,
                self._tracing,
                self._sender.take,
                self._sender.failed,
                _options(proxy),
            ),
            clocks=Clocks(time.time, time.monotonic),
            limits=_limits(proxy),
            on_failure=self._sender.failed,
            open_requests=workplace.open_requests,
        )

    def _export(self, body: bytes) -> None:
        # Called on a thread of the SDK.
        self._loop.call_soon_threadsafe(self._sender.take_spans, body)

    def _learn(self, engines: Mapping[str, EngineState]) -> None:
        self._engines = engines

    def _models_of(self, engine: str) -> frozenset[str] | None:
        state = self._engines.get(engine)
        return None if state is None else state.models

    def _is_healthy(self, engine: str) -> bool:
        # Until the agent says otherwise.
        state = self._engines.get(engine)
        return state is None or state.healthy

    async def run(self) -> None:
        """Serve until SIGTERM or until the supervisor is gone, then let streams end."""
        self._loop.add_signal_handler(signal.SIGTERM, self._stopping.set)
        self._workplace.open_requests.begin(self._workplace.number)
        handing_over = asyncio.create_task(self._sender.run())
        watching = asyncio.create_task(self._watch_supervisor())
        limits = ConnectionLimits(
            raise_descriptors(), lambda _, reason: self._sender.client_cut(reason)
        )
        listening, clients = self._workplace.listening, limits.clients(PROXY)
        server = proxy_server(self._proxy, listening, clients, **self._tls)
        server.start()
        await self._stopping.wait()
        watching.cancel()
        if self._retired:
            await self._retire(server)
        await self._end(server)
        # The last spans come from a thread of the SDK.
        await asyncio.sleep(0)
        lost = await self._sender.flush(WORKER_FLUSHES_WITHIN_S)
        if lost:
            _LOG.warning("%d proxied requests are lost: the agent did not store them", lost)
        handing_over.cancel()

    async def _watch_supervisor(self) -> None:
        await supervisor_gone()
        _LOG.warning("the supervisor is gone; the proxy ends with its open streams")
        self._stopping.set()

    def _next_run_is_there(self) -> None:
        self._retired = True
        self._stopping.set()

    async def _retire(self, server: AsgiServer) -> None:
        """Let all open streams end, however long they take; new ones go to the next run."""
        _LOG.info("proxy worker %d: %d streams go on", self._workplace.number, self._proxy.live)
        ending = asyncio.create_task(server.stop(within_s=None))
        gone = asyncio.create_task(supervisor_gone())
        await asyncio.wait([ending, gone], return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()

    async def _end(self, server: AsgiServer) -> None:
        cut = await self._proxy.drain(self._drain_s)
        if cut:
            _LOG.warning("%d streams were cut after %g s of draining", cut, self._drain_s)
        await self._proxy.close()
        await server.stop()
        self._tracing.close()


def run_worker(settings: Settings, workplace: Workplace) -> int:
    """Run a worker in this process; the exit status."""

    async def work() -> None:
        await ProxyWorker(settings, workplace).run()

    # A thread that encodes spans must not delay a token.
    sys.setswitchinterval(0.0002)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work())
    return 0


def _options(settings: ProxySettings) -> MeasuringOptions:
    return MeasuringOptions(
        tenant_header=settings.tenant_header,
        count_tokens=settings.count_tokens,
        continuous_usage=settings.continuous_usage,
        return_request_id=settings.return_request_id,
    )


def _limits(settings: ProxySettings) -> ProxyLimits:
    return ProxyLimits(
        connect_s=settings.connect_timeout,
        answer_s=settings.answer_timeout,
        gap_s=settings.gap_timeout,
    )
