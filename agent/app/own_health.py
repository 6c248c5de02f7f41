"""The agent's own health: what `/readyz` says of each part, and what is late, full or behind."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from agent.app.engines import EngineMonitors, GpuJobs
from agent.app.jobs import Jobs
from agent.app.proxying import Proxying
from agent.app.storing import AgentStore
from agent.catalog import metrics as m
from agent.catalog import own_health as own
from agent.catalog.own_health import BEHIND_S, NEARLY_FULL, OK, JobMiss, Queue, Stage
from agent.outputs.otlp_forwarder import Forwarder
from agent.outputs.prometheus.agent_exposition import EfficiencyBoard
from agent.outputs.prometheus.meter import Meter
from agent.pipeline.explaining import MissedRequests
from agent.sources.otlp.receiver import Receiver
from agent.store.health import StoreHealth
from agent.store.tables import engine_minutes, engine_samples, gpu_samples, requests
from agent.store.unreadable import TABLES, UNREADABLE
from agent.store.writing import MAX_WAITING_ROWS, RequestWriter


class Readiness:
    """Reads what the parts know. A problem of an engine is not one of the agent."""

    def __init__(
        self,
        health: StoreHealth,
        writer: RequestWriter,
        engines: Mapping[str, Callable[[], bool]],
        others: Mapping[str, Callable[[], str]],
    ) -> None:
        """`engines` says of each whether it answers, and `others` how further parts are."""
        self._health = health
        self._writer = writer
        self._engines = engines
        self._others = dict(others)

    def add(self, part: str, status: Callable[[], str]) -> None:
        """Add a part to the response; call it before the first query."""
        self._others[part] = status

    def problems(self) -> Sequence[str]:
        """Why spans cannot be stored now."""
        found = (self._health.problem(), self._backlog())
        return [problem for problem in found if problem is not None]

    def parts(self) -> Mapping[str, str]:
        """Each part in words."""
        store = self._health.problem()
        return {
            "store": store or UNREADABLE.status() or OK,
            "receivers": self._receivers(refused=store is not None),
            "engines": self._answering(),
            **{part: status() for part, status in self._others.items()},
        }

    def _backlog(self) -> str | None:
        waiting = self._writer.waiting_rows
        full = waiting > 0.8 * MAX_WAITING_ROWS
        return f"{waiting} requests wait for the database" if full else None

    def _receivers(self, *, refused: bool) -> str:
        return (
            "exports are refused until the store takes them" if refused else self._backlog() or OK
        )

    def _answering(self) -> str:
        up = sum(answers() for answers in self._engines.values())
        return OK if up == len(self._engines) else f"{up} of {len(self._engines)} answer"


# A job of a second is late on any machine that is busy for a moment.
_LATE_S = 30.0

Read = Callable[[], float | None]


class OwnHealth:
    """Publishes what the parts know of themselves, and says in words what is wrong.

    It reads them at every scrape and never waits. An unknown value has no series.
    """

    def __init__(self, meter: Meter, now: Callable[[], float]) -> None:
        """`now` gives Unix time."""
        self._meter = meter
        self._now = now
        self._lags: dict[Stage, Read] = {}
        self._fills: dict[Queue, Read] = {}
        self._jobs: Jobs | None = None

    def of_store(self, store: AgentStore, writer: RequestWriter) -> None:
        """Publish how commits, folding and the database are."""
        self._meter.gauge(m.STORE_WAITING, lambda: writer.waiting_rows)
        self._meter.gauge(own.DATABASE_SIZE, lambda: store.size_bytes)
        for table in TABLES:
            self._meter.gauge(own.UNREADABLE_ROWS, partial(UNREADABLE.count, table), table)
        self._stage(Stage.COMMIT, lambda: writer.lag_s)
        self._stage(Stage.FOLD, lambda: self._since(store.folded_at))
        self._queue(Queue.COMMIT, lambda: writer.waiting_rows / MAX_WAITING_ROWS)
        self._rows(requests.name, lambda: writer.newest_at)

    def of_engines(
        self,
        monitors: EngineMonitors,
        gpus: GpuJobs,
        board: EfficiencyBoard,
        missed: MissedRequests,
    ) -> None:
        """Publish how samples, minutes and explanations are."""
        self._rows(engine_samples.name, monitors.stored_at)
        self._rows(gpu_samples.name, lambda: gpus.stored_at)
        self._rows(engine_minutes.name, lambda: max(board.stored_until(), default=None))
        self._stage(Stage.MINUTES, lambda: self._since(min(board.stored_until(), default=None)))
        self._stage(Stage.EXPLAIN, lambda: missed.lag_s(self._now()))
        self._queue(Queue.EXPLAIN, lambda: missed.fill)
        self._queue(Queue.EVENTS, monitors.fill)

    def of_receivers(
        self, receiver: Receiver, forwarder: Forwarder | None, proxying: Proxying | None
    ) -> None:
        """Publish how exports, forwarding and the proxy's records are."""
        self._queue(Queue.EXPORTS, lambda: receiver.fill)
        if proxying is not None:
            self._queue(Queue.PROXY, proxying.fill)
        if forwarder is not None:
            self._meter.gauge(m.FORWARD_QUEUE, lambda: forwarder.queued_bytes)
            self._sending(forwarder, Queue.FORWARD, Stage.FORWARD)

    def of_push(self, forwarder: Forwarder) -> None:
        """Publish how the push of metrics is."""
        self._sending(forwarder, Queue.PUSH, Stage.PUSH)

    def _sending(self, forwarder: Forwarder, queue: Queue, stage: Stage) -> None:
        self._queue(queue, lambda: forwarder.fill)
        self._stage(stage, lambda: forwarder.lag_s)

    def of_jobs(self, jobs: Jobs) -> None:
        """Publish how late the scheduled jobs are."""
        self._jobs = jobs
        for name in jobs.late_s():
            self._meter.gauge(own.JOB_LATE, partial(_late_s, jobs, name), name)

    def _since(self, at: float | None) -> float | None:
        return None if at is None else max(self._now() - at, 0.0)

    def _stage(self, stage: Stage, lag_s: Read) -> None:
        self._lags[stage] = lag_s
        self._meter.gauge(own.STAGE_LAG, lag_s, stage)

    def _queue(self, queue: Queue, fill: Read) -> None:
        self._fills[queue] = fill
        self._meter.gauge(own.QUEUE_FILL, fill, queue)

    def _rows(self, table: str, newest_at: Read) -> None:
        self._meter.gauge(own.NEWEST_ROW, newest_at, table)

    def statuses(self) -> Mapping[str, Callable[[], str]]:
        """The statuses of stages, queues and jobs, each computed when it is called."""
        return {"stages": self._behind, "queues": self._full, "jobs": self._late}

    def _behind(self) -> str:
        return _joined(
            f"{stage} is {lag_s:.0f} s behind"
            for stage, lag_s in _known(self._lags)
            if lag_s > BEHIND_S[stage]
        )

    def _full(self) -> str:
        fills = _known(self._fills)
        return _joined(f"{queue} is {fill:.0%} full" for queue, fill in fills if fill > NEARLY_FULL)

    def _late(self) -> str:
        late = {} if self._jobs is None else self._jobs.late_s()
        return _joined(
            f"{name} is {by_s:.0f} s late" for name, by_s in late.items() if by_s > _LATE_S
        )


def count_misses(meter: Meter, job: str, reason: JobMiss, runs: int) -> None:
    """Count runs of a job that did nothing; 0 exposes the series."""
    meter.count(own.JOB_MISSES, job, reason, by=runs)


def _late_s(jobs: Jobs, name: str) -> float:
    return jobs.late_s()[name]


def _joined(problems: Iterable[str]) -> str:
    return "; ".join(problems) or OK


def _known(readers: Mapping[Any, Read]) -> list[tuple[Any, float]]:
    found = [(name, read()) for name, read in readers.items()]
    return [(name, value) for name, value in found if value is not None]
