"""Builds, starts and stops one agent."""

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import agent
from agent.analysis.verdicts import Judge
from agent.app.connection_limits import API, ConnectionLimits, raise_descriptors
from agent.app.doors import Doors
from agent.app.efficiency_jobs import EfficiencyJobs
from agent.app.engines import EngineMonitors, engine_row
from agent.app.gpu_jobs import GpuJobs, GpuSource
from agent.app.jobs import Jobs
from agent.app.missed_requests import EXPLAIN_EVERY_S, missed_requests
from agent.app.own_health import OwnHealth, count_misses
from agent.app.plugins import EnginePlugins
from agent.app.proxy_rotation import EngineNews
from agent.app.proxying import Proxying
from agent.app.pushing import Pushing, counts_bins
from agent.app.readiness import Readiness, not_configured
from agent.app.stopping import EXIT_WITHIN_S, STOP_WITHIN_S, within
from agent.app.storing import AgentStore
from agent.outputs.api.api_context import ApiContext
from agent.outputs.api.live_routes import LiveFigures
from agent.outputs.api.routes import live_figures, make_api
from agent.outputs.otlp_forwarder import Forwarder, destination
from agent.outputs.prometheus.agent_exposition import AgentExposition
from agent.outputs.prometheus.boards import HostBoard
from agent.outputs.prometheus.meter import Meter
from agent.outputs.web import documentation_page, runbooks
from agent.pipeline.request_pipeline import RequestPipeline
from agent.records.objective import Objective
from agent.settings import Settings
from agent.sources.engines.directory import EngineDirectory
from agent.sources.otlp.body import Body
from agent.sources.otlp.receiver import Receiver
from agent.sources.otlp.span_reader import SpanReader
from agent.sources.proxy.handover.place import HandoverPlace
from agent.store.agent_state import AgentState
from agent.store.observations import ObservationStore

_LOG = logging.getLogger(__name__)

# Of the time to stop: an open call gets half of it, its server a little more, closing a second.
_GRACE_SHARE = 0.5
_DOORS_SHARE = 0.55
_CLOSING_S = 1.0
SETTLE_EVERY_S = 1.0
UNCLAIMED_EVERY_S = 5.0

# Batches of requests are hundreds of small objects that live for milliseconds. The collector's
# default of 700 allocations would walk them many times. A search stops all threads, a millisecond
# for each 1,000 objects, so a first begins after 2,000; a third, of all objects, is rare.
GC_THRESHOLDS = 2_000, 3, 50


class Agent:
    """One agent with all its parts."""

    _live: LiveFigures | None = None
    # The store may ask for the engines before all is built.
    _proxying: Proxying | None = None

    def __init__(
        self,
        settings: Settings,
        *,
        simulated: bool,
        now: Callable[[], float],
        handover: HandoverPlace | None = None,
        gpus: GpuSource | None = None,
    ) -> None:
        """Build it; `handover` is where it meets the workers of its proxy. `gpus` replaces NVML.

        Its store may open later. Raises SettingsInvalid.
        """
        limits = ConnectionLimits(raise_descriptors(), lambda *cut: self._meter.client_cut(*cut))
        self._doors = Doors(settings, limits)
        self._settings, self._now, self._simulated = settings, now, simulated
        objectives, engines = settings.all_objectives(), [e.name for e in settings.engines]
        self._directory = _directory(settings)
        bins = counts_bins(settings)
        self._meter = Meter(objectives, engines, self._directory.is_served, with_bins=bins)
        self._store = store = self._make_store(objectives)
        observations = store.observations()
        self._judge = Judge(objectives)
        self._writer = store.writer(self._judge)
        self._hosts = HostBoard()
        self._gpus = GpuJobs(settings, observations, self._meter, gpus)
        self._efficiency = EfficiencyJobs(settings, store.minutes, self._gpus, self._meter)
        self._missed = missed_requests(settings, objectives, store, self._gpus, self._meter)
        self._make_monitors(observations)
        self._jobs = Jobs(now, partial(count_misses, self._meter))
        self._forwarder = self._make_forwarder()
        self._make_pipeline()
        self._receiver = self._make_receiver()
        self._proxying = None if handover is None else self._make_proxying(handover)
        # Each consumer gets every step and every ended request.
        consumers = (self._missed, self._ended_rows.ended)
        self._plugins = EnginePlugins(settings, self._meter, consumers, now)
        self._exposition = self._make_exposition()
        self._own = self._make_own_health()
        self._readiness = self._make_readiness(engines)

    def _make_store(self, objectives: Sequence[Objective]) -> AgentStore:
        state = AgentState(engines=self._engines, simulated=self._simulated)
        return AgentStore(self._settings, objectives, self._meter, self._now, state=state)

    def _make_pipeline(self) -> None:
        judge, writer, on_counted = self._judge, self._writer, self._missed.counted
        model_of = self._directory.model_of
        self._ended_rows = rows = self._store.ended_rows(judge, writer, model_of, on_counted)
        complete = rows.ended.with_figures
        self._pipeline = RequestPipeline(judge, writer, self._meter, on_counted, complete=complete)

    def _make_monitors(self, observations: ObservationStore) -> None:
        self._engine_monitors = monitors = self._monitors_over(observations)
        self._monitors = [monitors.of_engine(e, self._directory) for e in self._settings.engines]
        self._unclaimed = monitors.of_unclaimed_gpus()

    def _monitors_over(self, observations: ObservationStore) -> EngineMonitors:
        self._news = EngineNews(self._now)
        store, meter, gpus, hosts = self._store.minutes, self._meter, self._gpus, self._hosts
        make = partial(EngineMonitors, missed=self._missed, ca=self._settings.tls.ca)
        return make(observations, store, meter, gpus, hosts, news=self._news)

    def _make_readiness(self, engines: Sequence[str]) -> Readiness:
        up = {engine: partial(self._meter.is_up, engine) for engine in engines}
        proxy = not_configured if self._proxying is None else self._proxying.in_words
        words = {"proxy": proxy, "plugins": self._plugins.in_words, **self._own.words()}
        words |= self._store.words()
        return Readiness(self._store.health, self._writer, up, words)

    def tells(self, part: str, in_words: Callable[[], str]) -> None:
        """Let `/readyz` say how a further part is."""
        self._readiness.add(part, in_words)

    def publishes(self, publish: Callable[[Meter], None]) -> None:
        """Let `/metrics` show what a further part knows."""
        publish(self._meter)

    def _make_own_health(self) -> OwnHealth:
        own = OwnHealth(self._meter, self._now)
        own.of_store(self._store, self._writer)
        own.of_engines(self._engine_monitors, self._gpus, self._efficiency.board, self._missed)
        own.of_receivers(self._receiver, self._forwarder, self._proxying)
        self._pushing = self._make_pushing()
        if self._pushing is not None:
            own.of_push(self._pushing.forwarder)
        return own

    def _make_exposition(self) -> AgentExposition:
        info = (self._settings.name, agent.__version__, "true" if self._simulated else "false")
        gpus, board = self._gpus.inventory.newest, self._efficiency.board
        return AgentExposition(self._meter, info, gpus, self._hosts, board)

    def _make_pushing(self) -> Pushing | None:
        endpoint = self._settings.otlp_metrics.endpoint
        if endpoint is None:
            return None
        return Pushing(self._settings, endpoint, self._meter, self._exposition, self._now())

    def _make_forwarder(self) -> Forwarder | None:
        to, proxy = self._settings.otlp.forward_to, self._settings.http_proxy
        if to is None:
            return None
        return Forwarder(destination(to, proxy, self._settings.tls.ca), self._meter)

    def _make_receiver(self) -> Receiver:
        reader = SpanReader(self._directory.identify, self._settings.name)
        forward = None if self._forwarder is None else self._forwarder.forward
        accept, sampling = self._pipeline.accept, self._settings.proxy.client_sampling
        make = partial(Receiver, client_sampling=sampling, precedence=self._store.precedence)
        return make(reader, accept, forward, self._meter, self._now)

    def _make_proxying(self, place: HandoverPlace) -> Proxying:
        forwarder = self._forwarder
        return Proxying(
            self._settings,
            place,
            pipeline=self._pipeline,
            events=self._engine_monitors.pipeline(),
            meter=self._meter,
            directory=self._directory,
            now=self._now,
            export=None if forwarder is None else lambda body: forwarder.forward(Body(body)),
            news=self._news,
        )

    async def start(self) -> None:
        """Poll every engine once, then listen on all ports.

        Raises SettingsInvalid for a taken port.
        """
        await asyncio.to_thread(self._gpus.read_first, self._now())
        await asyncio.gather(
            *(asyncio.to_thread(monitor.poll, self._now()) for monitor in self._monitors)
        )
        self._plugins.start()
        await self._doors.receive(self._receiver)
        if self._proxying is not None:
            await self._proxying.start()
        listen = self._settings.listen
        context = self._api_context()
        self._live = live_figures(context)
        self._doors.serve(API, make_api(context, self._live), listen.host, listen.port)
        self._schedule()
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)

    def _api_context(self) -> ApiContext:
        queries, minutes = self._store.queries()
        return ApiContext(
            queries=queries,
            minutes=minutes.minutes,
            now=self._now,
            longest_window_s=self._settings.storage.keep_rollups,
            rows_kept_s=self._settings.storage.keep_requests,
            query_limit_s=self._settings.storage.query_timeout,
            metrics=self._exposition.render,
            engines=self._engines,
            problems=self._readiness.problems,
            parts=self._readiness.parts,
            door=self._doors.read,
            documentation=documentation_page(),
            runbooks=runbooks(),
            version=agent.__version__,
            simulated=self._simulated,
        )

    def _engines(self) -> Sequence[Mapping[str, Any]]:
        samples = self._meter.samples()
        agent_name = self._settings.name
        return [
            {
                "agent": agent_name,
                **engine_row(name, sample, self._directory),
                "ejected": None if self._proxying is None else self._proxying.why_out(name),
            }
            for name, sample in samples.items()
        ]

    def _schedule(self) -> None:
        for settings, monitor in zip(self._settings.engines, self._monitors, strict=True):
            self._jobs.every(settings.scrape_interval, f"poll {monitor.engine}", monitor.poll)
        self._gpus.schedule(self._jobs)
        self._efficiency.schedule(self._jobs)
        if self._proxying is not None:
            self._proxying.schedule(self._jobs)
        self._jobs.every(UNCLAIMED_EVERY_S, "poll GPUs of no engine", self._unclaimed.poll)
        self._jobs.every(SETTLE_EVERY_S, "settle requests", self._pipeline.settle)
        self._jobs.every(EXPLAIN_EVERY_S, "explain missed requests", self._missed.run)
        self._jobs.every(SETTLE_EVERY_S, "rows of ended requests", self._ended_rows.store)
        self._store.schedule(self._jobs)
        if self._pushing is not None:
            self._pushing.schedule(self._jobs)
        self._own.of_jobs(self._jobs)
        self._jobs.start()

    async def stop(self, within_s: float = STOP_WITHIN_S) -> None:
        """Take no more requests, finish the accepted ones, and close everything.

        It takes at most `within_s`. What hangs is left.
        """
        deadline = time.monotonic() + within_s - 2 * EXIT_WITHIN_S
        grace_s = _GRACE_SHARE * within_s
        self._receiver.stop()
        if self._live is not None:
            self._live.stop()
        await asyncio.to_thread(self._plugins.close)
        # Jobs may wait for the database, and the doors do not wait for jobs.
        jobs = asyncio.create_task(self._jobs.stop())
        await within(_DOORS_SHARE * within_s, "open calls", self._doors.stop(grace_s))
        await self._store_accepted(deadline - _CLOSING_S)
        left_s = max(deadline - time.monotonic(), 0.0)
        closing = [self._close_sources(jobs), asyncio.to_thread(self._store.close)]
        if self._forwarder is not None:
            closing.append(asyncio.to_thread(self._forwarder.close, min(left_s, grace_s)))
        if self._pushing is not None:
            last = self._pushing.close
            closing.append(asyncio.to_thread(last, self._now(), min(left_s, grace_s)))
        await within(left_s, "the closing of sources and store", *closing)

    async def _store_accepted(self, deadline: float) -> None:
        works = [self._receiver.close()]
        if self._proxying is not None:
            works.append(self._proxying.close())
        await within(deadline - time.monotonic(), "the writing of requests", *works)
        last = asyncio.to_thread(self._ended_rows.store_last, self._now())
        await within(deadline - time.monotonic(), "the writing of ended requests", last)
        left_s = max(deadline - time.monotonic(), 0.0)
        await asyncio.to_thread(self._writer.close, left_s)

    async def _close_sources(self, jobs: "asyncio.Task[None]") -> None:
        await jobs
        await asyncio.to_thread(self._gpus.close)
        for monitor in self._monitors:
            monitor.close()


def _directory(settings: Settings) -> EngineDirectory:
    engines = ((engine.name, engine.url) for engine in settings.engines)
    return EngineDirectory(engines, complete=settings.engines_from.kubernetes is None)
