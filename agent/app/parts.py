"""Builds the parts of an agent, each after those that it uses."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import agent
from agent.analysis.verdicts import Judge
from agent.app.engine_setup import EngineSetups, SeenViews
from agent.app.engines import (
    STALE_INTERVALS,
    EfficiencyJobs,
    EngineMonitors,
    GpuJobs,
    GpuSource,
    SourcesOf,
    engine_row,
    live_sources,
)
from agent.app.jobs import Jobs
from agent.app.listeners import ConnectionLimits, Listeners, raise_descriptors
from agent.app.own_health import OwnHealth, Readiness, count_misses
from agent.app.plugins import EnginePlugins
from agent.app.proxy_rotation import EngineNews
from agent.app.proxying import Proxying
from agent.app.pushing import Pushing, counts_bins, counts_by_convention
from agent.app.storing import AgentStore
from agent.catalog import metrics as m
from agent.catalog.engine_states import ProbedState
from agent.catalog.own_health import NOT_CONFIGURED
from agent.catalog.start_phases import START_PHASES
from agent.outputs.otlp_forwarder import Forwarder, destination
from agent.outputs.prometheus.agent_exposition import AgentExposition, HostBoard
from agent.outputs.prometheus.meter import Meter
from agent.pipeline.ended_requests import EndedRows
from agent.pipeline.engine_starts import EngineStarts
from agent.pipeline.explaining import MissedRequests
from agent.pipeline.monitors import EngineMonitor, UnclaimedGpuMonitor
from agent.pipeline.request_pipeline import ClientLabels, OnCounted, RequestPipeline, TenantLabels
from agent.records.engine import EngineStatus
from agent.records.gpu import Facts
from agent.records.objective import JudgedRequest
from agent.settings import Settings
from agent.sources.engines.directory import EngineDirectory
from agent.sources.otlp.payload import Body
from agent.sources.otlp.receiver import Receiver
from agent.sources.otlp.span_reader import SpanReader
from agent.sources.proxy.handover.messages import HandoverAddress
from agent.sources.routers import RouterSource
from agent.store.claim import AgentState
from agent.store.writing import RequestWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseParts:
    """What all other parts use; `now` gives Unix time."""

    settings: Settings
    simulated: bool
    now: Callable[[], float]
    directory: EngineDirectory
    meter: Meter
    engine_rows: "EngineRows"
    store: AgentStore


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """The readers of engines and GPUs, and the users of their samples."""

    gpus: GpuJobs
    efficiency: EfficiencyJobs
    missed: MissedRequests
    hosts: HostBoard
    news: EngineNews
    starts: EngineStarts
    builder: EngineMonitors
    monitors: Sequence[EngineMonitor]
    unclaimed: UnclaimedGpuMonitor
    routers: Sequence[RouterSource]

    def publish(self, meter: Meter) -> None:
        """Publish the state and the last start of each engine."""
        for monitor in self.monitors:
            for state in ProbedState:
                value = partial(_has_state, monitor, state)
                meter.gauge(m.ENGINE_STATE, value, monitor.engine, state)
            for phase in START_PHASES:
                spent = partial(_start_phase_s, self.starts, monitor.engine, phase)
                meter.gauge(m.ENGINE_START, spent, monitor.engine, phase)

    def states(self) -> Mapping[str, EngineStatus]:
        """The state of each engine that was polled."""
        found = ((monitor.engine, monitor.status) for monitor in self.monitors)
        return {engine: status for engine, status in found if status is not None}


def _has_state(monitor: EngineMonitor, state: ProbedState) -> float | None:
    status = monitor.status
    return 1.0 if status is not None and status.state is state else None


def _start_phase_s(starts: EngineStarts, engine: str, phase: str) -> float | None:
    return starts.last_s(engine).get(phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeParts:
    """The receivers of requests, from spans, the proxy and engines' plugins, and their writer."""

    writer: RequestWriter
    pipeline: RequestPipeline
    ended_rows: EndedRows
    receiver: Receiver
    forwarder: Forwarder | None
    proxying: Proxying | None
    plugins: EnginePlugins
    views: SeenViews


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputParts:
    """What the agent publishes of itself and of the others."""

    exposition: AgentExposition
    pushing: Pushing | None
    own_health: OwnHealth
    readiness: Readiness
    setups: EngineSetups


class EngineRows:
    """The API's rows of engines. The store may ask for them before the other parts are built."""

    def __init__(self, settings: Settings, meter: Meter, directory: EngineDirectory) -> None:
        self.proxying: Proxying | None = None
        self.monitors: EngineMonitors | None = None
        self.states: Callable[[], Mapping[str, EngineStatus]] = dict
        self._agent_name = settings.name
        self._stale_after_s = {
            engine.name: STALE_INTERVALS * engine.scrape_interval for engine in settings.engines
        }
        self._roles = {engine.name: engine.role for engine in settings.engines}
        self._meter = meter
        self._directory = directory

    def read(self) -> Sequence[Mapping[str, Any]]:
        """The rows as known now."""
        proxying, monitors, states = self.proxying, self.monitors, self.states()
        return [
            {
                "agent": self._agent_name,
                **engine_row(
                    name,
                    sample,
                    self._directory,
                    None if monitors is None else monitors.problem_of(name),
                ),
                "role": self._roles[name],
                "rank_skew": self._meter.rank_skew(name),
                "stale_after_s": self._stale_after_s[name],
                "ejected": None if proxying is None else proxying.why_out(name),
                **_state_of(states.get(name)),
            }
            for name, sample in self._meter.samples().items()
        ]


def _state_of(status: EngineStatus | None) -> Mapping[str, Any]:
    if status is None:
        return {}
    return {"state": status.state, "state_since": status.since, "state_why": status.why}


@dataclass(frozen=True, slots=True)
class AgentParts:
    """All parts of one agent."""

    listeners: Listeners
    base: BaseParts
    engines: EngineParts
    requests: IntakeParts
    outputs: OutputParts
    jobs: Jobs


def build_parts(
    settings: Settings,
    *,
    simulated: bool,
    now: Callable[[], float],
    handover: HandoverAddress | None = None,
    gpus: GpuSource | None = None,
    sources: SourcesOf | None = None,
) -> AgentParts:
    """Build an agent's parts, each after those that it uses. Of these, only the store starts.

    `handover` is the address at which the proxy's workers find the agent. `gpus` replaces the
    configured source of GPUs, `sources` the readers of engines. Raises SettingsInvalid.
    """
    directory = _directory(settings)
    meter = _meter(settings, directory, now)
    limits = ConnectionLimits(raise_descriptors(), meter.client_cut)
    listeners = Listeners(settings, limits)
    rows = EngineRows(settings, meter, directory)
    base = BaseParts(
        settings=settings,
        simulated=simulated,
        now=now,
        directory=directory,
        meter=meter,
        engine_rows=rows,
        store=AgentStore(settings, meter, now, AgentState(engines=rows.read, simulated=simulated)),
    )
    engines = _engine_parts(base, gpus, sources or partial(live_sources, settings.tls.ca))
    requests = _intake_parts(base, engines, handover)
    rows.proxying, rows.monitors = requests.proxying, engines.builder
    rows.states = engines.states
    outputs = _output_parts(base, engines, requests)
    jobs = Jobs(now, partial(count_misses, meter))
    return AgentParts(listeners, base, engines, requests, outputs, jobs)


def _directory(settings: Settings) -> EngineDirectory:
    engines = ((engine.name, engine.url) for engine in settings.engines)
    return EngineDirectory(engines, complete=settings.engines_from.kubernetes is None)


def _meter(settings: Settings, directory: EngineDirectory, now: Callable[[], float]) -> Meter:
    names = [engine.name for engine in settings.engines]
    return Meter(
        settings.all_objectives(),
        names,
        directory.is_served,
        with_bins=counts_bins(settings),
        with_genai=counts_by_convention(settings),
        now=now,
    )


def _engine_parts(base: BaseParts, gpus: GpuSource | None, sources: SourcesOf) -> EngineParts:
    settings, store, meter = base.settings, base.store, base.meter
    observations, hosts, news = store.observations(), HostBoard(), EngineNews(base.now)
    gpu_jobs = GpuJobs(settings, observations, meter, gpus)
    missed = MissedRequests(
        settings.all_objectives(),
        [engine.name for engine in settings.engines],
        store.explanations,
        gpus=gpu_jobs.inventory.samples_of,
        on_explained=meter.explained,
        give_way=store.precedence.give_way,
    )
    starts = EngineStarts()
    make = partial(EngineMonitors, missed=missed, news=news, starts=starts, sources=sources)
    builder = make(observations, store.minutes, meter, gpu_jobs, hosts)
    return EngineParts(
        gpus=gpu_jobs,
        efficiency=EfficiencyJobs(settings, store.minutes, gpu_jobs, meter),
        missed=missed,
        hosts=hosts,
        news=news,
        starts=starts,
        builder=builder,
        monitors=[builder.of_engine(engine, base.directory) for engine in settings.engines],
        unclaimed=builder.of_unclaimed_gpus(),
        routers=[
            RouterSource(name=each.name, url=each.url, ca=settings.tls.ca)
            for each in settings.routers
        ],
    )


def _intake_parts(
    base: BaseParts, engines: EngineParts, handover: HandoverAddress | None
) -> IntakeParts:
    judge = Judge(base.settings.all_objectives())
    on_counted = _all_of(engines.missed.counted, engines.starts.counted)
    writer = base.store.writer(judge)
    labels = _labels(base)
    views = SeenViews(has_proxy=base.settings.proxy.listen is not None)
    of_plugin = _all_of(on_counted, views.counted_of_plugin)
    ended_rows = base.store.ended_rows(
        judge,
        writer,
        base.directory.model_of,
        on_counted=of_plugin,
        labels=labels,
        now=base.now,
    )
    on_viewed, ended = _all_of(on_counted, views.counted), ended_rows.ended
    meter, was_counted = base.meter, ended.was_counted
    pipeline = RequestPipeline(
        judge, writer, meter, on_viewed, complete=ended.complete, was_counted=was_counted
    )
    forwarder = _forwarder(base)
    # Each consumer gets every step and every ended request.
    consumers = (engines.missed, ended_rows.ended)
    return IntakeParts(
        writer=writer,
        pipeline=pipeline,
        ended_rows=ended_rows,
        receiver=_receiver(base, engines.starts, pipeline, forwarder),
        forwarder=forwarder,
        proxying=None
        if handover is None
        else _proxying(base, engines, pipeline, forwarder, handover, labels=labels),
        plugins=EnginePlugins(
            base.settings, base.meter, consumers, base.now, of_ended_fronts=(ended_rows,)
        ),
        views=views,
    )


def _all_of(*consumers: OnCounted) -> OnCounted:
    def on_counted(requests: Sequence[JudgedRequest]) -> None:
        for consumer in consumers:
            consumer(requests)

    return on_counted


def _labels(base: BaseParts) -> ClientLabels:
    settings, directory = base.settings, base.directory
    return ClientLabels(
        answered=directory.learn_answered,
        is_served=directory.is_served,
        tenants=TenantLabels(settings.known_tenants(), settings.proxy.max_tenants),
        on_replaced=base.meter.label_replaced,
    )


def _forwarder(base: BaseParts) -> Forwarder | None:
    to, proxy, ca = base.settings.otlp.forward_to, base.settings.http_proxy, base.settings.tls.ca
    return None if to is None else Forwarder(destination(to, proxy, ca), base.meter)


def _receiver(
    base: BaseParts,
    starts: EngineStarts,
    pipeline: RequestPipeline,
    forwarder: Forwarder | None,
) -> Receiver:
    return Receiver(
        SpanReader(base.directory.identify, base.settings.name),
        pipeline.accept,
        None if forwarder is None else forwarder.forward,
        base.meter,
        base.now,
        client_sampling=base.settings.proxy.client_sampling,
        on_loading=starts.loading,
        precedence=base.store.precedence,
    )


def _proxying(
    base: BaseParts,
    engines: EngineParts,
    pipeline: RequestPipeline,
    forwarder: Forwarder | None,
    handover: HandoverAddress,
    *,
    labels: ClientLabels,
) -> Proxying:
    return Proxying(
        base.settings,
        handover,
        pipeline=pipeline,
        events=engines.builder.pipeline(),
        meter=base.meter,
        directory=base.directory,
        now=base.now,
        export=None if forwarder is None else lambda body: forwarder.forward(Body(body)),
        news=engines.news,
        labels=labels,
    )


def _output_parts(base: BaseParts, engines: EngineParts, requests: IntakeParts) -> OutputParts:
    settings, meter = base.settings, base.meter
    info = (settings.name, agent.__version__, "true" if base.simulated else "false")
    gpus, board = engines.gpus.inventory.newest, engines.efficiency.board
    routers = partial(_router_facts, engines.routers)
    exposition = AgentExposition(meter, info, gpus, engines.hosts, board, routers=routers)
    endpoint, pushing = settings.otlp_metrics.endpoint, None
    if endpoint is not None:
        pushing = Pushing(settings, endpoint, meter, exposition, base.now())
    engines.publish(meter)
    for engine in settings.engines:
        if engine.role != "both":
            meter.gauge(m.ENGINE_ROLE, lambda: 1.0, engine.name, engine.role)
    health = OwnHealth(meter, base.now)
    health.of_store(base.store, requests.writer)
    health.of_engines(engines.builder, engines.gpus, board, engines.missed)
    health.of_receivers(requests.receiver, requests.forwarder, requests.proxying)
    if pushing is not None:
        health.of_push(pushing.forwarder)
    setups = _setups(base, engines, requests)
    readiness = _readiness(base, engines, requests, health)
    readiness.add("setup", setups.status_text)
    for router in engines.routers:
        readiness.add(f"router {router.name}", router.status_text)
    return OutputParts(
        exposition=exposition,
        pushing=pushing,
        own_health=health,
        readiness=readiness,
        setups=setups,
    )


def _router_facts(routers: Sequence[RouterSource]) -> Sequence[tuple[str, Facts]]:
    return [(router.name, router.facts) for router in routers]


def _setups(base: BaseParts, engines: EngineParts, requests: IntakeParts) -> EngineSetups:
    return EngineSetups(
        base.settings,
        views=requests.views,
        meter=base.meter,
        directory=base.directory,
        gpus=engines.gpus,
        efficiency=engines.efficiency,
        hosts=engines.hosts,
        monitors=engines.builder,
        plugins=requests.plugins,
        read=base.store.read,
        simulated=base.simulated,
    )


def _no_proxy() -> str:
    return NOT_CONFIGURED


def _readiness(
    base: BaseParts, engines: EngineParts, requests: IntakeParts, health: OwnHealth
) -> Readiness:
    up = {each.name: partial(base.meter.is_up, each.name) for each in base.settings.engines}
    proxying = requests.proxying
    statuses = {
        "gpus": engines.gpus.status_text,
        "proxy": _no_proxy if proxying is None else proxying.status_text,
        "plugins": requests.plugins.status_text,
        **health.statuses(),
        **base.store.statuses(),
    }
    return Readiness(base.store.health, requests.writer, up, statuses)
