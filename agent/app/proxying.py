"""Builds and runs the traced proxy: server, measuring, record intake, and span export."""

import logging
import time
from collections.abc import Callable
from functools import partial

from agent.app.connection_limits import PROXY
from agent.app.doors import Doors
from agent.app.jobs import Jobs
from agent.catalog import metrics as m
from agent.outputs.prometheus.meter import Meter
from agent.pipeline.client_labels import ClientLabels, TenantPlaces
from agent.pipeline.intake import RecordIntake
from agent.pipeline.request_pipeline import RequestPipeline
from agent.records.request import RequestRecord
from agent.settings import Settings
from agent.settings.proxy_settings import ProxySettings
from agent.settings.values import host_and_port
from agent.sources.engines.directory import EngineDirectory
from agent.sources.engines.fetch import open_session
from agent.sources.engines.served import ServedModels
from agent.sources.listening import AsgiServer
from agent.sources.proxy.load_balancer import EngineLookup, ProxiedEngine
from agent.sources.proxy.measuring.request_measuring import MeasuringOptions, RequestMeasuring
from agent.sources.proxy.proxy_server import proxy_server
from agent.sources.proxy.relay_context import Clocks, ProxyLimits
from agent.sources.proxy.reverse_proxy import ReverseProxy
from agent.sources.proxy.tracing.request_spans import ProxyTracing

MODELS_POLL_S = 10.0

_LOG = logging.getLogger(__name__)


class Proxying:
    """The proxy of one agent. Made only if `proxy.listen` is set."""

    def __init__(
        self,
        settings: Settings,
        *,
        pipeline: RequestPipeline,
        meter: Meter,
        directory: EngineDirectory,
        slow: Callable[[RequestRecord], bool],
        export: Callable[[bytes], None] | None,
        now: Callable[[], float],
    ) -> None:
        """`slow` selects requests that missed their objective; `export` gets OTLP bodies."""
        proxy = settings.proxy
        self._settings = proxy
        self._intake = RecordIntake(pipeline.accept, meter.proxy_failed)
        self._labels = ClientLabels(
            answered=directory.learn_answered,
            is_served=directory.is_served,
            tenants=TenantPlaces(settings.known_tenants(), proxy.max_tenants),
            on_replaced=meter.label_replaced,
        )
        self._tracing = _tracing(settings, export, slow)
        engines = [e for e in settings.engines if proxy.engine in (None, e.name)]
        self._proxy = ReverseProxy(
            [ProxiedEngine(engine.name, engine.url) for engine in engines],
            EngineLookup(models=directory.served_by, healthy=meter.is_up),
            measuring=self._measuring(settings.name, meter),
            clocks=Clocks(now, time.monotonic),
            limits=_limits(proxy),
            on_failure=meter.proxy_failed,
        )
        self._served = [ServedModels(engine.name, engine.url, open_session()) for engine in engines]
        self._directory = directory
        self._server: AsgiServer | None = None
        meter.gauge(m.PROXY_OPEN, lambda: self._proxy.live)
        meter.gauge(m.PROXY_WAITING, lambda: self._intake.waiting)

    def _measuring(self, agent: str, meter: Meter) -> RequestMeasuring:
        options = MeasuringOptions(
            tenant_header=self._settings.tenant_header,
            count_tokens=self._settings.count_tokens,
            continuous_usage=self._settings.continuous_usage,
            return_request_id=self._settings.return_request_id,
        )
        return RequestMeasuring(agent, self._tracing, self._take, meter.proxy_failed, options)

    def _take(self, record: RequestRecord) -> None:
        self._intake.take(self._labels.labelled(record))

    def start(self, doors: Doors) -> None:
        """Start listening. Raises SettingsInvalid for a taken port."""
        assert self._settings.listen is not None, "there is a proxy only with an address"
        host, port = host_and_port(self._settings.listen)
        self._intake.start()
        self._server = doors.open(PROXY, self._proxy, host, port, make=proxy_server)

    def in_words(self) -> str:
        """How it is: streams pass whatever the store does."""
        waiting = self._intake.waiting
        return f"streams pass; {waiting} requests wait for the store" if waiting else "ok"

    def schedule(self, jobs: Jobs) -> None:
        """Schedule the polls of the engines' models."""
        for served in self._served:
            jobs.every(
                MODELS_POLL_S,
                f"models of {served.name}",
                partial(self._learn_served, served),
                at_once=True,
            )

    def _learn_served(self, served: ServedModels, _now: float) -> None:
        self._directory.learn_served(served.name, served.read())

    async def drain(self) -> None:
        """Refuse new requests, and let open streams end within `proxy.drain`."""
        cut = await self._proxy.drain(self._settings.drain)
        if cut:
            _LOG.warning("%d streams were cut after %g s of draining", cut, self._settings.drain)
        await self._proxy.close()

    async def stop(self) -> None:
        """Close the clients' connections."""
        if self._server is not None:
            await self._server.stop()

    async def close(self, within_s: float) -> None:
        """Store the waiting records, as far as that takes no longer, and export queued spans."""
        await self._intake.close(within_s)
        self._tracing.close()


def _tracing(
    settings: Settings,
    export: Callable[[bytes], None] | None,
    slow: Callable[[RequestRecord], bool],
) -> ProxyTracing:
    return ProxyTracing(
        export,
        service=settings.name,
        ratio=settings.proxy.trace_ratio,
        client_sampling=settings.proxy.client_sampling,
        keep=slow,
    )


def _limits(settings: ProxySettings) -> ProxyLimits:
    return ProxyLimits(
        connect_s=settings.connect_timeout,
        answer_s=settings.answer_timeout,
        gap_s=settings.gap_timeout,
    )
