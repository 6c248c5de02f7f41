"""The store of a running agent: its file, what is published of it, and the jobs on old rows."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Self, TypeVar

from sqlalchemy import Engine

from agent.analysis.verdicts import Judge
from agent.app.jobs import Jobs
from agent.catalog import metrics as m
from agent.catalog.own_health import OK
from agent.catalog.reasons import LostRows, StoreWrite
from agent.errors import QueryTooSlow, StoreUnavailable
from agent.outputs.api.api_context import Answer, ApiQueries
from agent.outputs.prometheus.meter import Meter
from agent.pipeline.ended_requests import EndedRequests, EndedRows
from agent.pipeline.request_pipeline import ClientLabels, OnCounted
from agent.records.held_rate import HeldRates
from agent.records.objective import JudgedRequest, Objective, WriteResult
from agent.settings import Settings
from agent.settings.settings_model import StorageSettings
from agent.store.claim import AgentState, NameClaim, no_lag, own_instance
from agent.store.connection import (
    for_writing,
    in_transaction,
    open_engine,
    without_number,
)
from agent.store.explanations import ExplanationStore
from agent.store.folding import RollupStore
from agent.store.health import StoreHealth
from agent.store.keeping import StoreKeeper
from agent.store.minute_sums import merge_minutes
from agent.store.minutes import MinuteStore
from agent.store.objectives import ObjectiveStore
from agent.store.observations import ObservationStore
from agent.store.publishing.bounds import FileBounds
from agent.store.publishing.changes import Lag, lag_of, prepare_file
from agent.store.publishing.destination import SharedDatabase
from agent.store.publishing.publisher import Publisher, upkeep_of
from agent.store.retention import Retention
from agent.store.sqlite_connection import checkpoints, empty_log
from agent.store.stored_queries import database_bytes, stored_queries
from agent.store.time_limits import open_query_engine
from agent.store.transactions import Joining, request_amend, request_settle, request_write
from agent.store.writing import RequestWriter

GIVES_WAY_S = 0.05


class Precedence:
    """Knows whether an export is being read or stored: its sender waits for that.

    Each export is taken inside this context manager, several at a time. Jobs call `give_way`
    between the slices of their work, because threads share Python's lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entered = 0
        self._none_waits = threading.Event()
        self._none_waits.set()

    def __enter__(self) -> Self:
        with self._lock:
            self._entered += 1
            self._none_waits.clear()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._entered -= 1
            if not self._entered:
                self._none_waits.set()

    def give_way(self) -> None:
        """Return when no export is being taken, after GIVES_WAY_S at the latest."""
        self._none_waits.wait(GIVES_WAY_S)


_LOG = logging.getLogger(__name__)

KEEP_ROOM_EVERY_S = 1.0
# Old rows are deleted at the start and then each hour; some agents live for less. A stop waits no
# longer than this.
_CAUGHT_UP_WITHIN_S = 5.0


def read_from(work: Callable[[ApiQueries], Answer], shared: ApiQueries, own: ApiQueries) -> Answer:
    """What `work` returns of the shared database or, if that goes away meanwhile, of the file."""
    try:
        return work(shared)
    except QueryTooSlow:
        raise
    except StoreUnavailable:
        return work(own)


class Publishing:
    """What an agent whose file is published has beside its store."""

    def __init__(
        self,
        settings: StorageSettings,
        shared: SharedDatabase,
        own: Engine,
        own_queries: ApiQueries,
        meter: Meter,
        *,
        before_batch: Callable[[], None],
    ) -> None:
        """`own` is the agent's file. `before_batch` is called before each batch is published."""
        self._meter = meter
        self._own_queries = own_queries
        self.bounds = FileBounds(
            own,
            max_bytes=settings.max_bytes,
            max_age_s=settings.kept_in_file_s,
            on_dropped=self._dropped,
        )
        self.on_damage: Callable[[Exception], None] | None = None
        self.publisher = Publisher(
            own,
            shared,
            on_published=lambda rows: meter.count(m.PUBLISHED_ROWS, by=rows),
            on_refused=lambda rows: self._dropped(LostRows.REFUSED, rows),
            on_file_failed=self._failed,
            before_batch=before_batch,
        )
        self._shared = open_query_engine(shared.url, settings.query_timeout)
        self._shared_queries = stored_queries(self._shared)
        self._upkeep = upkeep_of(
            shared.url,
            shared.agent,
            keep_requests_s=settings.keep_requests,
            keep_rollups_s=settings.keep_rollups,
        )
        self._show()

    def _show(self) -> None:
        for reason in LostRows:
            self._dropped(reason, 0)
        self._meter.count(m.PUBLISHED_ROWS, by=0)
        self._meter.gauge(m.UNPUBLISHED_ROWS, lambda: self.bounds.lag.rows)
        self._meter.gauge(m.PUBLISH_LAG, lambda: self.bounds.lag.seconds)
        self._meter.gauge(m.FILE_BYTES, lambda: self.bounds.used_bytes)

    def _dropped(self, reason: LostRows, rows: int) -> None:
        self._meter.count(m.LOST_ROWS, reason, by=rows)

    def read(self, work: Callable[[ApiQueries], Answer]) -> Answer:
        """What `work` returns of the shared database or, while it is away, of the agent's file.

        The file has the rows of its own agent only, and keeps published rows for a shorter time.
        """
        if self.is_there():
            return read_from(work, self._shared_queries, self._own_queries)
        return work(self._own_queries)

    def is_there(self) -> bool:
        """Whether the shared database could be reached lately."""
        return self.publisher.problem() is None

    def shared_bytes(self) -> int | None:
        """The size of the shared database. Raises StoreUnavailable."""
        return database_bytes(self._shared)

    def status_text(self) -> str:
        """The status of publishing, for /readyz."""
        return publishing_status(self.publisher.problem(), self.bounds.lag)

    def start(self, jobs: Jobs) -> None:
        """Begin to publish, and schedule the keeping of the bounds."""
        self.publisher.start()
        jobs.every(KEEP_ROOM_EVERY_S, "keep the file's bounds", self._keep_bounds)

    def _keep_bounds(self, now: float) -> None:
        try:
            self.bounds.keep(now)
        except StoreUnavailable as error:
            _LOG.warning("the agent's file is not measured: %s", error)
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        if self.on_damage is not None:
            self.on_damage(error)

    def expire(self, now: float) -> int:
        """Delete old requests and samples of the file, and old rows of the shared database.

        That only while it has everything: a minute that still waits would be summed twice there.
        Returns how many rows of the file were deleted.
        """
        gone = self.bounds.expire(now)
        if self.publisher.is_complete(_CAUGHT_UP_WITHIN_S):
            self._upkeep.expire(now)
        return gone

    def close(self, within_s: float) -> None:
        """End publishing, and close the connections."""
        self.publisher.close(within_s)
        self._shared.dispose()
        self._upkeep.close()


_BEHIND_S = 60.0


def publishing_status(problem: str | None, lag: Lag) -> str:
    """How publishing is: what keeps it up, or that it falls behind by itself."""
    if problem is not None:
        return f"{problem}; {lag.rows} rows wait"
    if lag.seconds > _BEHIND_S:
        return f"the shared database is {lag.seconds:.0f} s behind; {lag.rows} rows wait"
    return OK


EXPIRE_EVERY_S = 3600
FOLD_EVERY_S = 30.0
HELD_RATES_EVERY_S = 30.0
MEASURE_EVERY_S = 60.0

# A database that does not answer delays the listeners no longer than this.
OPEN_WITHIN_S = 5.0
# What waits at the end is published after the next start.
PUBLISHED_WITHIN_S = 2.0

Given = TypeVar("Given")
Result = TypeVar("Result")


class _HeldRates:
    """Stores what was learnt of the rates that engines hold, for the next run of the agent."""

    def __init__(self, engine: Engine, agent: str, meter: Meter) -> None:
        self._store = ObjectiveStore(engine, agent)
        self._meter = meter
        self._kept: Mapping[tuple[str, str, float], float] = {}

    def keep(self, _now: float = 0.0) -> None:
        """Store what was learnt since the last time."""
        learnt = self._meter.held_rates()
        newest = _newest_minutes(learnt)
        if newest == self._kept:
            return
        try:
            self._store.write_held_rates(learnt)
        except StoreUnavailable as error:
            _LOG.warning("the rates that engines hold are stored later: %s", error)
            self._meter.store_failed(StoreWrite.HELD_RATES)
        else:
            self._kept = newest


def _newest_minutes(held_rates: HeldRates) -> Mapping[tuple[str, str, float], float]:
    """The end of the newest minute by objective, engine and rate: decay does not change it."""
    return {
        (objective, engine, each.per_s): each.seen_at
        for objective, by_engine in held_rates.items()
        for engine, evidence in by_engine.items()
        for each in evidence
    }


class AgentStore:
    """Opens the database now or, while it is away, later; until then its callers get refusals."""

    def __init__(
        self, settings: Settings, meter: Meter, now: Callable[[], float], state: AgentState
    ) -> None:
        """`state` is what the agent reports of itself.

        Raises SettingsInvalid for a kind of database that is not supported.
        """
        storage, objectives = settings.storage, settings.all_objectives()
        self._settings = settings
        self._meter = meter
        self._state = state
        # A found plugin is known by its first request.
        self._with_plugin = {each.name for each in settings.engines if each.plugin_socket}
        self._prefilling = {each.name for each in settings.engines if each.role == "prefill"}
        self.precedence = Precedence()
        self.folded_at = now()
        self.size_bytes: float | None = None
        self.health = StoreHealth()
        self.database = open_engine(storage.own_url, pool_pre_ping=False)
        self._query_database = open_query_engine(storage.own_url, storage.query_timeout)
        self._queries = stored_queries(self._query_database)
        self.publishing = self._make_publishing(objectives)
        self.minutes = MinuteStore(self.database, settings.name)
        self.explanations = ExplanationStore(
            self.database, settings.name, storage.max_series, self._set_aside
        )
        self._rollups = RollupStore(
            self.database,
            settings.name,
            storage.max_series,
            lambda requests: meter.label_replaced("series", requests),
            self.precedence.give_way,
        )
        self._retention = Retention(self.database)
        self._held_rates = _HeldRates(self.database, settings.name, meter)
        self._keeper = self._make_keeper(objectives, now)
        self._keeper.start(wait_s=OPEN_WITHIN_S)

    def _make_publishing(self, objectives: Sequence[Objective]) -> Publishing | None:
        storage = self._settings.storage
        if storage.publish_to is None:
            return None
        shared = SharedDatabase(
            url=storage.publish_to,
            agent=self._settings.name,
            instance=own_instance(),
            objectives=objectives,
            state=self._state,
        )
        return Publishing(
            *(storage, shared, self.database, self._queries, self._meter),
            before_batch=self._fold_to_publish,
        )

    def _make_keeper(
        self, objectives: Sequence[Objective], now: Callable[[], float]
    ) -> StoreKeeper:
        storage, name, publishing = self._settings.storage, self._settings.name, self.publishing

        def prepare(engine: Engine) -> None:
            stored = ObjectiveStore(engine, name)
            stored.write_in_force(objectives, now())
            self._meter.remember(stored.held_rates())
            if publishing is not None:
                in_transaction(without_number(for_writing(engine)), prepare_file)

        keeper = StoreKeeper(
            Path(storage.file),
            [self.database, self._query_database],
            claim=NameClaim(
                name,
                own_instance(),
                state=self._state,
                lag=no_lag if publishing is None else lag_of,
            ),
            prepare=prepare,
            health=self.health,
            sets_aside=publishing is not None or storage.on_corrupt == "set_aside",
            on_set_aside=self._file_set_aside,
        )
        if publishing is not None:
            publishing.on_damage = keeper.failed
        return keeper

    def _file_set_aside(self) -> None:
        self._meter.store_failed(StoreWrite.FILE_SET_ASIDE)
        if self.publishing is not None:
            self.publishing.bounds.lost()

    def statuses(self) -> Mapping[str, Callable[[], str]]:
        """The status of the shared database for /readyz; spans do not wait for it."""
        return {} if self.publishing is None else {"shared database": self.publishing.status_text}

    def read(self, work: Callable[[ApiQueries], Answer]) -> Answer:
        """What `work` returns of this store's queries. Raises StoreUnavailable."""
        if self.publishing is not None:
            return self.publishing.read(work)
        return work(self._queries)

    def observations(self) -> ObservationStore:
        """The store of samples and events."""
        room = () if self.publishing is None else (self.publishing.bounds.require_for_sample,)
        return ObservationStore(self.database, self._settings.name, *room)

    def writer(self, judge: Judge) -> RequestWriter:
        """The writer of requests."""
        wait_s, with_plugin = self._settings.proxy.join_wait, self._with_plugin
        joining = Joining(
            judge=judge, wait_s=wait_s, with_plugin=with_plugin, prefilling=self._prefilling
        )
        hops = replace(joining, wait_s=None)
        joined = request_write(self.database, joining, self._keeper.verify)
        alone = request_write(self.database, hops, self._keeper.verify)

        def write(judged: Sequence[JudgedRequest]) -> WriteResult:
            joins = self._settings.proxy.listen is not None or self._with_plugin
            return (joined if joins else alone)(judged)

        settle = request_settle(self.database, joining, self._set_aside)
        noted = self._noted("a write of requests", write)
        return RequestWriter(noted, settle, checkpoints(self.database))

    def ended_rows(
        self,
        judge: Judge,
        writer: RequestWriter,
        model_of: Callable[[str], str | None],
        *,
        on_counted: OnCounted,
        labels: ClientLabels,
        now: Callable[[], float],
    ) -> EndedRows:
        """What stores the figures of engines' plugins."""
        amend = request_amend(self.database, judge)
        return EndedRows(
            EndedRequests(
                self._with_plugin,
                self._meter.plugin_dropped,
                has_proxy=self._settings.proxy.listen is not None,
            ),
            self._meter,
            agent=self._settings.name,
            judge=judge,
            writer=writer,
            amend=amend,
            model_of=model_of,
            on_counted=on_counted,
            labels=labels,
            now=now,
        )

    def _set_aside(self, _row: int) -> None:
        self._meter.store_failed(StoreWrite.ROW_SET_ASIDE)

    def _noted(self, what: str, work: Callable[[Given], Result]) -> Callable[[Given], Result]:
        def noted(given: Given) -> Result:
            try:
                with self.health.write(what):
                    if self.publishing is not None:
                        self.publishing.bounds.require()
                    return work(given)
            except StoreUnavailable as error:
                self._keeper.failed(error)
                raise

        return noted

    def schedule(self, jobs: Jobs) -> None:
        """Schedule the jobs on stored rows."""
        jobs.every(FOLD_EVERY_S, "fold rollups", self._fold, first_in_s=0.0)
        jobs.every(HELD_RATES_EVERY_S, "keep the rates that are held", self._held_rates.keep)
        jobs.every(EXPIRE_EVERY_S, "expire", self._expire, first_in_s=0.0)
        jobs.every(MEASURE_EVERY_S, "measure the database", self._measure, first_in_s=0.0)
        if self.publishing is not None:
            self.publishing.start(jobs)

    def _fold(self, now: float) -> None:
        try:
            self._rollups.fold()
        except StoreUnavailable as error:
            _LOG.warning("changes of requests are folded into rollups later: %s", error)
            self._meter.store_failed(StoreWrite.FOLD)
        else:
            self.folded_at = now

    def _fold_to_publish(self) -> None:
        """Fold: queries of the file add what is not folded yet; a shared database has no more."""
        self.precedence.give_way()
        # The job that folds says why: rows are published also if the file takes no write.
        with suppress(StoreUnavailable):
            self._rollups.fold()

    def _measure(self, _now: float) -> None:
        try:
            self.size_bytes = (
                database_bytes(self._query_database)
                if self.publishing is None
                else self.publishing.shared_bytes()
            )
        except (StoreUnavailable, OSError) as error:
            _LOG.warning("the size of the database is not known: %s", error)
            self.size_bytes = None

    def _expire(self, now: float) -> None:
        try:
            gone = self._expired(now)
        except StoreUnavailable as error:
            _LOG.warning("old rows stay for now: %s", error)
            self._meter.store_failed(StoreWrite.EXPIRE)
        else:
            _LOG.info("%d old rows were deleted", gone)

    def _expired(self, now: float) -> int:
        """Delete old rows; a published file keeps its minutes and rollups as long as others.

        Old minutes are merged in the shared database, if there is one.
        """
        storage, name = self._settings.storage, self._settings.name
        rollups_before = now - storage.keep_rollups
        gone = 0 if self.publishing is None else self.publishing.expire(now)
        gone += self._retention.expire(now - storage.keep_requests, rollups_before, now)
        gone += MinuteStore(self.database, name).expire(rollups_before)
        if self.publishing is None:
            merge_minutes(self.database, name, now)
        return gone

    def close(self) -> None:
        """Store what was learnt, give the agent's name back, and close the connections."""
        self._held_rates.keep()
        if self.publishing is not None:
            self.publishing.close(PUBLISHED_WITHIN_S)
        self._keeper.close()
        self._query_database.dispose()
        # So that a copy of the file alone has the rows, and no log stays beside it.
        empty_log(self.database)
        self.database.dispose()
        self._keeper.release()
