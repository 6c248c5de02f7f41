"""The agent's side of the proxy: stores the workers' records, and sends them states of engines."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from agent.app.jobs import Jobs
from agent.app.listeners import PROXY
from agent.app.proxy_rotation import EngineNews, ProxyRotation
from agent.catalog import metrics as m
from agent.outputs.prometheus.meter import Meter
from agent.pipeline.monitors import EnginePipeline
from agent.pipeline.request_pipeline import ClientLabels, RequestPipeline
from agent.records.event import Confidence, Event, EventKind
from agent.records.request import RequestRecord
from agent.settings import EngineSettings, Settings
from agent.sources.engines.directory import EngineDirectory
from agent.sources.engines.engine_source import ServedModels
from agent.sources.engines.fetch import open_session
from agent.sources.proxy.handover.messages import EngineState, HandoverAddress, Rotation, WorkerDied
from agent.sources.proxy.handover.receiving import HandoverReceiver
from agent.sources.proxy.handover.sending import MAX_WAITING_RECORDS

MODELS_POLL_S = 10.0
EVENTS_EVERY_S = 1.0
ROTATION_EVERY_S = 1.0


class Proxying:
    """What the agent does for its proxy. Made only if the proxy has workers."""

    def __init__(
        self,
        settings: Settings,
        handover: HandoverAddress,
        *,
        pipeline: RequestPipeline,
        events: EnginePipeline,
        meter: Meter,
        directory: EngineDirectory,
        now: Callable[[], float],
        export: Callable[[bytes], None] | None,
        news: EngineNews,
        labels: ClientLabels,
    ) -> None:
        """`events` takes the events of the workers and of the rotation, `export` OTLP bodies of the
        proxy's spans."""
        proxy = settings.proxy
        self._pipeline = pipeline
        self._events = events
        self._meter = meter
        self._now = now
        self._directory = directory
        self._news = news
        self._labels = labels
        engines = [e for e in settings.engines if proxy.engine in (None, e.name)]
        session = partial(open_session, settings.tls.ca)
        self._served = [ServedModels(engine.name, engine.url, session()) for engine in engines]
        self._receiver = self._make_receiver(handover, export)
        self._rotation = None if len(engines) < 2 else self._rotation_of(engines)
        meter.gauge(m.PROXY_OPEN, lambda: self._receiver.live)
        meter.gauge(m.PROXY_WAITING, lambda: self._receiver.waiting)

    def _make_receiver(
        self, handover: HandoverAddress, export: Callable[[bytes], None] | None
    ) -> HandoverReceiver:
        return HandoverReceiver(
            handover,
            accept=self._accept,
            engines=self._states,
            on_failure=self._meter.proxy_failed,
            on_cut=partial(self._meter.client_cut, PROXY),
            on_died=self._worker_died,
            on_spans=export,
            on_rotation=self._count_rotation,
        )

    async def _accept(self, records: Sequence[RequestRecord]) -> int:
        return await self._pipeline.accept([self._labels.labelled(record) for record in records])

    def _worker_died(self, died: WorkerDied) -> None:
        evidence: dict[str, str | float | None] = {
            "worker": died.worker,
            "requests_cut": died.open,
            "rows": died.rows,
            "records_lost": died.lost,
        }
        kind, certain = EventKind.PROXY_WORKER_DIED, Confidence.CERTAIN
        self._events.event(
            Event(at=self._now(), engine=None, kind=kind, confidence=certain, evidence=evidence)
        )

    def _states(self) -> Mapping[str, EngineState]:
        return {served.name: self._state(served.name) for served in self._served}

    def _state(self, engine: str) -> EngineState:
        up, models = self._meter.is_up(engine), self._directory.served_by(engine)
        return self._news.state(engine, up=up, models=models)

    def _rotation_of(self, engines: Sequence[EngineSettings]) -> ProxyRotation:
        return ProxyRotation(
            [engine.name for engine in engines],
            self._meter,
            rotations=lambda: self._receiver.rotations,
            healthy=lambda engine: self._state(engine).healthy,
            on_event=self._events.event,
        )

    def _count_rotation(self, rotation: Rotation) -> None:
        for engine, route, status_class, count in rotation.responses:
            self._meter.count(m.PROXY_RESPONSES, engine, route, f"{status_class}xx", by=count)
        if self._rotation is not None:
            self._rotation.count(rotation)

    def why_out(self, engine: str) -> str | None:
        """Why an engine gets no new requests of the proxy; None if it gets them."""
        return None if self._rotation is None else self._rotation.why_out(engine)

    def fill(self) -> float:
        """The share of the room for records in all workers that is taken."""
        return self._receiver.waiting / (MAX_WAITING_RECORDS * max(self._receiver.workers, 1))

    def status_text(self) -> str:
        """Its status: streams pass whether the store works or not."""
        if not self._receiver.workers:
            return "no worker has connected yet"
        waiting = self._receiver.waiting
        return f"streams pass; {waiting} requests wait for the store" if waiting else "ok"

    async def start(self) -> None:
        """Take records of the workers."""
        await self._receiver.start()

    def schedule(self, jobs: Jobs) -> None:
        """Schedule the polls of the engines' models, the watch over the rotation, and the storing
        of events."""
        if self._rotation is not None:
            jobs.every(ROTATION_EVERY_S, "engines in the proxy's rotation", self._rotation.watch)
        jobs.every(EVENTS_EVERY_S, "events of the proxy", lambda _: self._events.store())
        for served in self._served:
            jobs.every(
                MODELS_POLL_S,
                f"models of {served.name}",
                partial(self._learn_served, served),
                first_in_s=0.0,
            )

    def _learn_served(self, served: ServedModels, _now: float) -> None:
        self._directory.learn_served(served.name, served.read())

    async def close(self) -> None:
        """Take no more records; those that are not stored stay in the workers."""
        await self._receiver.close()
