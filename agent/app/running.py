"""Builds, starts and stops one agent."""

import asyncio
import gc
import logging
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import Engine

import agent
from agent.analysis.verdicts import Judge
from agent.app.doors import Doors
from agent.app.efficiency_jobs import EfficiencyJobs
from agent.app.engines import EngineMonitors
from agent.app.gpu_jobs import GpuJobs
from agent.app.jobs import Jobs
from agent.app.proxying import Proxying
from agent.catalog import metrics as m
from agent.catalog.reasons import StoreWrite
from agent.errors import StoreUnavailable
from agent.outputs.api.routes import ApiContext, make_api
from agent.outputs.otlp_forwarder import Forwarder, destination
from agent.outputs.prometheus.agent_exposition import AgentExposition
from agent.outputs.prometheus.hosts import HostBoard
from agent.outputs.prometheus.meter import Meter
from agent.outputs.web import documentation_page, first_page, runbooks
from agent.pipeline.request_pipeline import RequestPipeline
from agent.settings import Settings
from agent.sources.engines.directory import EngineDirectory
from agent.sources.otlp.body import Body
from agent.sources.otlp.freed_memory import give_back_large_blocks
from agent.sources.otlp.receiver import Receiver
from agent.sources.otlp.span_reader import SpanReader
from agent.store.connection import open_engine
from agent.store.migrating import upgrade
from agent.store.minute_sums import MinuteQueries, merge_minutes
from agent.store.minutes import MinuteStore
from agent.store.objectives import ObjectiveStore
from agent.store.observations import ObservationStore
from agent.store.query_limits import open_query_engine
from agent.store.retention import Retention
from agent.store.rollup_store import RollupStore
from agent.store.store_queries import StoreQueries
from agent.store.transactions import Joining, request_settle, request_write
from agent.store.writing import MAX_WAITING_ROWS, RequestWriter

_LOG = logging.getLogger(__name__)

STOP_GRACE_S = 5.0
EXPIRE_EVERY_S = 3600
SETTLE_EVERY_S = 1.0
FOLD_EVERY_S = 30.0
UNCLAIMED_EVERY_S = 5.0

# A thread that parses an exposition delays a token of a proxied stream by as long as this; users
# would notice Python's own 5 ms.
SWITCH_INTERVAL_S = 0.0002

# Batches of requests are hundreds of small objects that live for milliseconds. The collector's
# default of 700 allocations would walk them many times.
GC_THRESHOLD = 50_000


class Agent:
    """One agent with all its parts."""

    def __init__(self, settings: Settings, *, simulated: bool, now: Callable[[], float]) -> None:
        """Build it and migrate its database. Raises SettingsInvalid and StoreUnavailable."""
        self._settings = settings
        self._doors = Doors(settings)
        self._now = now
        self._simulated = simulated
        self._database = open_migrated(settings)
        objectives = settings.all_objectives()
        self._directory = EngineDirectory((engine.name, engine.url) for engine in settings.engines)
        engines = [engine.name for engine in settings.engines]
        self._meter = Meter(objectives, engines, self._directory.is_served)
        ObjectiveStore(self._database, settings.name).write_in_force(objectives, now())
        observations = ObservationStore(self._database, settings.name)
        self._rollups = RollupStore(self._database, settings.name, settings.storage.max_series)
        self._retention = Retention(self._database)
        storage = settings.storage
        self._query_database = open_query_engine(storage.url, storage.query_timeout)
        self._queries = StoreQueries(self._query_database)
        self._judge = Judge(objectives)
        self._writer = self._make_writer()
        self._hosts = HostBoard()
        self._gpus = GpuJobs(settings, observations, self._meter)
        self._minutes = MinuteStore(self._database, settings.name)
        self._efficiency = EfficiencyJobs(settings, self._minutes, self._gpus, self._meter)
        monitors = EngineMonitors(observations, self._minutes, self._meter, self._gpus, self._hosts)
        self._monitors = [monitors.of_engine(e, self._directory) for e in settings.engines]
        self._unclaimed = monitors.of_unclaimed_gpus()
        self._jobs = Jobs(now)
        self._forwarder = self._make_forwarder()
        self._pipeline = RequestPipeline(self._judge, self._writer, self._meter)
        self._receiver = self._make_receiver()
        self._proxying = self._make_proxying()
        self._meter.gauge(m.STORE_WAITING, lambda: self._writer.waiting_rows)

    def _make_writer(self) -> RequestWriter:
        proxy = self._settings.proxy
        joining = Joining(
            agent=self._settings.name,
            judge=self._judge,
            wait_s=None if proxy.listen is None else proxy.join_wait,
        )
        return RequestWriter(
            request_write(self._database, joining), request_settle(self._database, joining)
        )

    def _make_forwarder(self) -> Forwarder | None:
        if self._settings.otlp.forward_to is None:
            return None
        forwarder = Forwarder(destination(self._settings.otlp.forward_to), self._meter)
        self._meter.gauge(m.FORWARD_QUEUE, lambda: forwarder.queued_bytes)
        return forwarder

    def _make_receiver(self) -> Receiver:
        reader = SpanReader(self._directory.identify, self._settings.name)
        forward = None if self._forwarder is None else self._forwarder.forward
        accept, sampling = self._pipeline.accept, self._settings.proxy.client_sampling
        return Receiver(reader, accept, forward, self._meter, self._now, client_sampling=sampling)

    def _make_proxying(self) -> Proxying | None:
        if self._settings.proxy.listen is None:
            return None
        forwarder = self._forwarder
        return Proxying(
            self._settings,
            pipeline=self._pipeline,
            meter=self._meter,
            directory=self._directory,
            slow=self._judge.missed,
            export=None if forwarder is None else lambda body: forwarder.forward(Body(body)),
            now=self._now,
        )

    async def start(self) -> None:
        """Poll every engine once, then listen on all ports.

        Raises SettingsInvalid for a taken port.
        """
        await asyncio.to_thread(self._gpus.read_first, self._now())
        await asyncio.gather(
            *(asyncio.to_thread(monitor.poll, self._now()) for monitor in self._monitors)
        )
        await self._doors.receive(self._receiver)
        if self._proxying is not None:
            sys.setswitchinterval(SWITCH_INTERVAL_S)
            self._proxying.start(self._doors.server_options)
        listen = self._settings.listen
        self._doors.serve("listen", make_api(self._api_context()), listen.host, listen.port)
        self._schedule()
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)

    def _api_context(self) -> ApiContext:
        simulated = "true" if self._simulated else "false"
        info = (self._settings.name, agent.__version__, simulated)
        gpus = self._gpus.inventory.newest
        exposition = AgentExposition(self._meter, info, gpus, self._hosts, self._efficiency.board)
        return ApiContext(
            queries=self._queries,
            minutes=MinuteQueries(self._query_database).minutes,
            now=self._now,
            longest_window_s=self._settings.storage.keep_rollups,
            query_limit_s=self._settings.storage.query_timeout,
            metrics=exposition.render,
            engines=self._engines,
            problems=self._problems,
            door=self._doors.read,
            page=first_page(),
            documentation=documentation_page(),
            runbooks=runbooks(),
            version=agent.__version__,
            simulated=self._simulated,
        )

    def _engines(self) -> Sequence[Mapping[str, Any]]:
        return [
            {
                "name": name,
                "up": sample is not None,
                "model": sample.model if sample else self._directory.model_of(name),
                "dialect": sample.dialect if sample else None,
                "read_at": sample.at if sample else None,
            }
            for name, sample in self._meter.snapshot().samples.items()
        ]

    def _problems(self) -> Sequence[str]:
        problems = []
        try:
            self._queries.ping()
        except StoreUnavailable as error:
            problems.append(error.public)
        if self._writer.waiting_rows > 0.8 * MAX_WAITING_ROWS:
            problems.append(f"{self._writer.waiting_rows} requests wait for the database")
        return problems

    def _schedule(self) -> None:
        for settings, monitor in zip(self._settings.engines, self._monitors, strict=True):
            self._jobs.every(settings.scrape_interval, f"poll {monitor.engine}", monitor.poll)
        self._gpus.schedule(self._jobs)
        self._efficiency.schedule(self._jobs)
        if self._proxying is not None:
            self._proxying.schedule(self._jobs)
        self._jobs.every(UNCLAIMED_EVERY_S, "poll GPUs of no engine", self._unclaimed.poll)
        self._jobs.every(SETTLE_EVERY_S, "settle requests", self._pipeline.settle)
        self._jobs.every(FOLD_EVERY_S, "fold rollups", self._fold, at_once=True)
        self._jobs.every(EXPIRE_EVERY_S, "expire", self._expire, at_once=True)
        self._jobs.start()

    def _fold(self, now: float) -> None:
        try:
            self._rollups.fold(now)
        except StoreUnavailable as error:
            _LOG.warning("changes of requests are folded into rollups later: %s", error)
            self._meter.store_failed(StoreWrite.FOLD)

    def _expire(self, now: float) -> None:
        storage = self._settings.storage
        try:
            gone = self._retention.expire(
                now - storage.keep_requests, now - storage.keep_rollups, now
            )
            gone += self._minutes.expire(now - storage.keep_rollups)
            merge_minutes(self._database, self._settings.name, now)
        except StoreUnavailable as error:
            _LOG.warning("old rows stay for now: %s", error)
            self._meter.store_failed(StoreWrite.EXPIRE)
        else:
            _LOG.info("%d old rows were deleted", gone)

    async def stop(self) -> None:
        """Take no more requests, finish the accepted ones, and close everything."""
        self._receiver.stop()
        if self._proxying is not None:
            await self._proxying.drain()
        await self._doors.stop(STOP_GRACE_S)
        await self._jobs.stop()
        await asyncio.to_thread(self._gpus.close)
        for monitor in self._monitors:
            monitor.close()
        await self._receiver.close()
        if self._proxying is not None:
            await self._proxying.close()
        await asyncio.to_thread(self._writer.close)
        if self._forwarder is not None:
            await asyncio.to_thread(self._forwarder.close, STOP_GRACE_S)
        self._query_database.dispose()
        self._database.dispose()


def open_migrated(settings: Settings) -> Engine:
    """Open and migrate the database. Raises SettingsInvalid and StoreUnavailable."""
    engine = open_engine(settings.storage.url)
    before, after = upgrade(engine)
    if before != after:
        _LOG.info("the database was brought from revision %s to %s", before, after)
    return engine


async def run(settings: Settings, *, simulated: bool = False) -> None:
    """Run an agent until SIGTERM or SIGINT."""
    give_back_large_blocks()
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    running = Agent(settings, simulated=simulated, now=time.time)
    try:
        await running.start()
        await stopping.wait()
        _LOG.info("stopping")
    finally:
        await running.stop()
