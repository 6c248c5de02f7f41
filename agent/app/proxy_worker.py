"""A worker of the proxy: relays and measures requests, and hands their records to the agent."""

import asyncio
import logging
import signal
import socket
import sys
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import uvloop

from agent.analysis.verdicts import Judge
from agent.app.listeners import ConnectionLimits, raise_descriptors
from agent.app.proxy_rotation import WorkerRotation, outlier_detection
from agent.app.supervising import WORKER_FLUSHES_WITHIN_S, supervisor_gone
from agent.http_client import client_tls
from agent.settings import Settings
from agent.settings.settings_model import ProxySettings
from agent.sources.listening import TlsFiles
from agent.sources.proxy.handover.messages import HandoverAddress
from agent.sources.proxy.handover.sending import MAX_WAITING_RECORDS, HandoverSender, RequestSlots
from agent.sources.proxy.load_balancer import EngineLookup, OpenRequests, ProxiedEngine
from agent.sources.proxy.measuring.measured_exchange import MeasuringOptions, RequestMeasuring
from agent.sources.proxy.relay_context import KEPT_MEMORY_BYTES, Clocks, ProxyLimits
from agent.sources.proxy.request_spans import ProxyTracing
from agent.sources.proxy.reverse_proxy import ProxyServer, ReverseProxy

_LOG = logging.getLogger(__name__)

_DRAINED_CHECK_S = 0.1
# After the drain, for responses that are in the kernel's buffers.
_CLIENTS_LEAVE_WITHIN_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """What a worker gets from its supervisor: listening sockets and the address of the agent.

    It is one of `workers`.
    """

    number: int
    workers: int
    listening: Sequence[socket.socket]
    tls: TlsFiles | None
    handover: HandoverAddress
    open_requests: OpenRequests
    slots: RequestSlots

    @property
    def memory(self) -> "WorkerMemory":
        """What outlives the worker."""
        counts = self.open_requests
        return WorkerMemory(self.number, self.slots.descriptor, counts.descriptor, [*counts])


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """What outlives a worker: the descriptors of its slots and of the counts of open requests.

    A later supervisor gets it.
    """

    worker: int
    slots: int
    open_requests: int
    engines: Sequence[str]

    @property
    def descriptors(self) -> tuple[int, int]:
        """Those of its memory."""
        return self.slots, self.open_requests


class ProxyWorker:
    """The proxy in one process."""

    def __init__(self, settings: Settings, config: WorkerConfig) -> None:
        proxy = settings.proxy
        self._drain_s = proxy.drain
        self._config = config
        self._stopping = asyncio.Event()
        self._retiring = asyncio.Event()
        engines = [e for e in settings.engines if proxy.engine in (None, e.name)]
        outliers = outlier_detection(proxy, engines)
        self._rotation = WorkerRotation(outliers)
        self._sender = HandoverSender(
            config.handover,
            config.number,
            config.slots,
            MAX_WAITING_RECORDS // config.workers,
            on_engines=self._rotation.learn,
            on_retire=self._retiring.set,
            live=lambda: self._proxy.live,
            rotation=lambda: self._rotation.report(self._proxy.balancer),
        )
        self._tracing = self._make_tracing(settings)
        self._loop = asyncio.get_running_loop()
        self._proxy = ReverseProxy(
            [ProxiedEngine(engine.name, engine.url) for engine in engines],
            EngineLookup(models=self._rotation.models, healthy=self._rotation.healthy),
            measuring=self._measuring(settings),
            clocks=Clocks(time.time, time.monotonic),
            limits=_limits(proxy),
            tls=client_tls(settings.tls.ca),
            on_failure=self._sender.failed,
            open_requests=config.open_requests,
            outliers=outliers,
        )

    def _make_tracing(self, settings: Settings) -> ProxyTracing:
        exports = settings.otlp.forward_to is not None
        return ProxyTracing(
            self._export if exports else None,
            service=settings.name,
            ratio=settings.proxy.trace_ratio,
            client_sampling=settings.proxy.client_sampling,
            keep=Judge(settings.all_objectives()).missed,
        )

    def _measuring(self, settings: Settings) -> RequestMeasuring:
        sender = self._sender
        return RequestMeasuring(
            settings.name,
            self._tracing,
            sender.take,
            sender.failed,
            _options(settings.proxy),
            opened=sender.opened,
            lost=sender.lost,
        )

    def _export(self, body: bytes) -> None:
        # Called on a thread of the SDK.
        self._loop.call_soon_threadsafe(self._sender.take_spans, body)

    async def run(self) -> bool:
        """Serve until SIGTERM or until the supervisor is gone, then let streams end.

        Returns whether its slots are needed no more: it is of an earlier run and handed all over.
        """
        self._loop.add_signal_handler(signal.SIGTERM, self._stopping.set)
        self._sender.begin(self._config.open_requests.begin(self._config.number))
        handing_over = asyncio.create_task(self._sender.run())
        watching = asyncio.create_task(self._watch_supervisor())
        limits = ConnectionLimits(
            raise_descriptors(), lambda _, reason: self._sender.client_cut(reason)
        )
        config = self._config
        if config.tls is not None:
            config.tls.follow()
        clients = limits.proxied(config.workers)
        server = ProxyServer(self._proxy, config.listening, clients, config.tls)
        server.start()
        await self._stop_or(self._retiring.wait())
        if not self._stopping.is_set():
            await self._retire(server)
        watching.cancel()
        await self._end(server)
        # The last spans come from a thread of the SDK.
        await asyncio.sleep(0)
        lost = await self._sender.flush(WORKER_FLUSHES_WITHIN_S - _CLIENTS_LEAVE_WITHIN_S)
        if lost:
            _LOG.warning("%d proxied requests are lost: the agent did not take them", lost)
        handing_over.cancel()
        return self._retiring.is_set() and not lost

    async def _watch_supervisor(self) -> None:
        await supervisor_gone()
        _LOG.warning("the supervisor is gone; the proxy ends with its open streams")
        self._stopping.set()

    async def _stop_or(self, other: Coroutine[Any, Any, object]) -> None:
        """Return when the worker is to stop or the other work has ended, which is then left."""
        works = [asyncio.ensure_future(work) for work in (self._stopping.wait(), other)]
        _, left = await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
        for work in left:
            work.cancel()

    async def _retire(self, server: ProxyServer) -> None:
        """Let all open streams end, and hand all records over, however long it takes; new ones go
        to the next run."""
        _LOG.info("proxy worker %d: %d streams go on", self._config.number, self._proxy.live)
        await self._stop_or(server.stop(within_s=None))
        await self._stop_or(self._sender.flush(None))

    async def _end(self, server: ProxyServer) -> None:
        deadline = time.monotonic() + self._drain_s
        cut = await self._proxy.drain(self._drain_s)
        if cut:
            _LOG.warning("%d streams were cut after %g s of draining", cut, self._drain_s)
        await self._refuse_until(deadline)
        await self._proxy.close()
        await server.stop(within_s=_CLIENTS_LEAVE_WITHIN_S)
        self._tracing.close()

    async def _refuse_until(self, deadline: float) -> None:
        """Refuse new requests while streams of other workers are open.

        The clients in the queue of a worker that is gone would be cut off without a response.
        """
        open_requests = self._config.open_requests
        while any(open_requests.values()) and time.monotonic() < deadline:
            await asyncio.sleep(_DRAINED_CHECK_S)


def run_worker(settings: Settings, config: WorkerConfig) -> int:
    """Run a worker in this process; the exit status."""

    async def work() -> bool:
        return await ProxyWorker(settings, config).run()

    # A thread that encodes spans must not delay a token.
    sys.setswitchinterval(0.0002)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        done = runner.run(work())
    # Until the tasks have ended, one could write to a slot.
    if done:
        config.slots.release()
    return 0


def take_over(memory: WorkerMemory | None, handover: HandoverAddress) -> int:
    """Hand over what a worker of an earlier run left when it died; the exit status."""
    if memory is None:
        _LOG.warning("a proxy worker died, of a version that leaves nothing of its requests")
        return 0
    counts = OpenRequests(memory.engines, descriptor=memory.open_requests)
    try:
        slots = RequestSlots.left(memory.slots)
    except ValueError as error:
        _LOG.warning("the requests of a proxy worker that died have no rows: %s", error)
        slots = RequestSlots(0)
        slots.begin()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_take_over(memory.worker, slots, counts.begin(memory.worker), handover))
    slots.release()
    return 0


async def _take_over(
    worker: int, slots: RequestSlots, open_before: int, handover: HandoverAddress
) -> None:
    sender = HandoverSender(handover, worker, slots)
    sender.begin(open_before)
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    works = [stopping.wait(), supervisor_gone(), sender.flush(None)]
    handing_over, *ends = [asyncio.ensure_future(each) for each in (sender.run(), *works)]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    lost = await sender.flush(WORKER_FLUSHES_WITHIN_S)
    if lost:
        _LOG.warning("%d proxied requests are lost: the agent did not take them", lost)
    for work in (handing_over, *ends):
        work.cancel()


def _options(settings: ProxySettings) -> MeasuringOptions:
    return MeasuringOptions(
        tenant_header=settings.tenant_header,
        user_header=settings.user_header,
        workload_header=settings.workload_header,
        session_header=settings.session_header,
        count_tokens=settings.count_tokens,
        continuous_usage=settings.continuous_usage,
        return_request_id=settings.return_request_id,
    )


def _limits(settings: ProxySettings) -> ProxyLimits:
    return ProxyLimits(
        connect_s=settings.connect_timeout,
        answer_s=settings.answer_timeout,
        gap_s=settings.gap_timeout,
        kept_memory_bytes=KEPT_MEMORY_BYTES if settings.retry else 0,
    )
