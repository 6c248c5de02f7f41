"""The store of a running agent: its database, the writer of requests, and the jobs on old rows."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from sqlalchemy import Engine

from agent.analysis.verdicts import Judge
from agent.app.jobs import Jobs
from agent.app.journaling import Journaling
from agent.app.precedence import Precedence
from agent.catalog.reasons import StoreWrite
from agent.errors import StoreUnavailable
from agent.outputs.api.api_context import ApiQueries
from agent.outputs.prometheus.meter import Meter
from agent.pipeline.ended_requests import EndedRequests
from agent.pipeline.ended_rows import EndedRows
from agent.pipeline.request_pipeline import OnCounted
from agent.records.objective import Objective
from agent.settings import Settings
from agent.store.agent_state import AgentState, no_journal
from agent.store.amending import request_amend
from agent.store.claim import NameClaim, own_instance
from agent.store.connection import open_engine
from agent.store.database_size import database_bytes
from agent.store.explanations import ExplanationStore
from agent.store.health import StoreHealth
from agent.store.journal.backlog import lag_of
from agent.store.keeping import StoreKeeper
from agent.store.minute_sums import MinuteQueries, merge_minutes
from agent.store.minutes import MinuteStore
from agent.store.objectives import ObjectiveStore
from agent.store.observations import ObservationStore
from agent.store.query_limits import open_query_engine
from agent.store.retention import Retention
from agent.store.rollup_store import RollupStore
from agent.store.sqlite_connection import checkpoints
from agent.store.stored_queries import stored_queries
from agent.store.time_limits import CUT_OFF_LATER_S, UPKEEP_S, limit_waits
from agent.store.transactions import Joining, request_settle, request_write
from agent.store.writing import RequestWriter

_LOG = logging.getLogger(__name__)

EXPIRE_EVERY_S = 3600
FOLD_EVERY_S = 30.0
MEASURE_EVERY_S = 60.0

# A database that does not answer delays the doors no longer than this.
OPEN_WITHIN_S = 5.0
# What waits in the journal at the end is forwarded after the next start.
FORWARDED_WITHIN_S = 2.0

Given = TypeVar("Given")
Result = TypeVar("Result")


class AgentStore:
    """Opens the database now or, while it is away, later; until then its callers get refusals."""

    def __init__(
        self,
        settings: Settings,
        objectives: Sequence[Objective],
        meter: Meter,
        now: Callable[[], float],
        *,
        state: AgentState,
    ) -> None:
        """`state` is what the agent reports of itself.

        Raises SettingsInvalid for a kind of database that is not supported.
        """
        storage = settings.storage
        self._settings = settings
        self._meter = meter
        self._state = state
        self.precedence = Precedence()
        self.folded_at = now()
        self.size_bytes: float | None = None
        self.health = StoreHealth()
        self.database = self._open_for_writes()
        self._upkeep = self._open_upkeep()
        self._query_database = open_query_engine(storage.own_url, storage.query_timeout)
        self.journaling = self._make_journaling(objectives)
        self.minutes = MinuteStore(self.database, settings.name)
        self.explanations = ExplanationStore(
            self.database, settings.name, storage.max_series, self._set_aside
        )
        self._rollups = RollupStore(
            self._upkeep,
            settings.name,
            storage.max_series,
            lambda requests: meter.label_replaced("series", requests),
            self.precedence.give_way,
        )
        self._retention = Retention(self._upkeep)
        self._keeper = self._make_keeper(objectives, now)
        self._keeper.start(wait_s=OPEN_WITHIN_S)

    def _open_for_writes(self) -> Engine:
        storage = self._settings.storage
        engine, limit_s = open_engine(storage.own_url, pool_pre_ping=False), storage.write_timeout
        limit_waits(engine, limit_s + CUT_OFF_LATER_S, statement_s=limit_s)
        return engine

    def _open_upkeep(self) -> Engine:
        """The engine of the jobs on many rows: on PostgreSQL their statements have no limit."""
        if self.database.dialect.name != "postgresql":
            return self.database
        engine = open_engine(self._settings.storage.own_url, pool_pre_ping=False)
        limit_waits(engine, UPKEEP_S)
        return engine

    def _make_journaling(self, objectives: Sequence[Objective]) -> Journaling | None:
        journal = self._settings.storage.used_journal
        if journal is None:
            return None
        engines = (self.database, self._query_database)
        return Journaling(
            self._settings,
            journal,
            engines,
            objectives,
            self._meter,
            state=self._state,
            give_way=self.precedence.give_way,
        )

    def _make_keeper(
        self, objectives: Sequence[Objective], now: Callable[[], float]
    ) -> StoreKeeper:
        storage, name, journaling = self._settings.storage, self._settings.name, self.journaling

        def prepare(engine: Engine) -> None:
            ObjectiveStore(engine, name).write_in_force(objectives, now())
            if journaling is not None:
                journaling.begin_run(engine)

        keeper = StoreKeeper(
            storage.own_url,
            [self.database, self._query_database, self._upkeep],
            claim=NameClaim(
                name,
                own_instance(),
                state=self._state,
                lag=no_journal if journaling is None else lag_of,
            ),
            prepare=prepare,
            health=self.health,
            sets_aside=journaling is not None or storage.on_corrupt == "set_aside",
            on_set_aside=self._file_set_aside,
        )
        if journaling is not None:
            journaling.on_damage = keeper.failed
        return keeper

    def _file_set_aside(self) -> None:
        self._meter.store_failed(StoreWrite.FILE_SET_ASIDE)
        if self.journaling is not None:
            self.journaling.room.lost()

    def words(self) -> Mapping[str, Callable[[], str]]:
        """Further parts of /readyz: the shared database, which spans do not wait for."""
        return {} if self.journaling is None else {"shared database": self.journaling.in_words}

    def queries(self) -> tuple[ApiQueries, MinuteQueries]:
        """The queries of the API, and those of minutes."""
        if self.journaling is not None:
            return self.journaling.either()
        return stored_queries(self._query_database)

    def observations(self) -> ObservationStore:
        """The store of samples and events."""
        room = () if self.journaling is None else (self.journaling.room.require_for_sample,)
        return ObservationStore(self.database, self._settings.name, *room)

    def writer(self, judge: Judge) -> RequestWriter:
        """The writer of requests."""
        proxy = self._settings.proxy
        joining = Joining(
            agent=self._settings.name,
            judge=judge,
            wait_s=None if proxy.listen is None else proxy.join_wait,
        )
        if self.journaling is not None:
            self.journaling.settle_by(joining)
        write = request_write(self.database, joining, self._keeper.verify)
        settle = request_settle(self.database, joining, self._set_aside)
        noted = self._noted("a write of requests", write)
        return RequestWriter(noted, settle, checkpoints(self.database))

    def ended_rows(
        self,
        judge: Judge,
        writer: RequestWriter,
        model_of: Callable[[str], str | None],
        on_counted: OnCounted,
    ) -> EndedRows:
        """What stores the figures of engines' plugins."""
        amend = request_amend(self.database, judge)
        engines = [each.name for each in self._settings.engines if each.plugin_socket is not None]
        return EndedRows(
            EndedRequests(engines, self._meter.plugin_dropped),
            self._meter,
            agent=self._settings.name,
            judge=judge,
            writer=writer,
            amend=amend,
            model_of=model_of,
            on_counted=on_counted,
        )

    def _set_aside(self, _row: int) -> None:
        self._meter.store_failed(StoreWrite.ROW_SET_ASIDE)

    def _noted(self, what: str, work: Callable[[Given], Result]) -> Callable[[Given], Result]:
        def noted(given: Given) -> Result:
            try:
                with self.health.write(what):
                    if self.journaling is not None:
                        self.journaling.room.require()
                    return work(given)
            except StoreUnavailable as error:
                self._keeper.failed(error)
                raise

        return noted

    def schedule(self, jobs: Jobs) -> None:
        """Schedule the jobs on stored rows."""
        jobs.every(FOLD_EVERY_S, "fold rollups", self._fold, at_once=True)
        jobs.every(EXPIRE_EVERY_S, "expire", self._expire, at_once=True)
        jobs.every(MEASURE_EVERY_S, "measure the database", self._measure, at_once=True)
        if self.journaling is not None:
            self.journaling.start(jobs)

    def _fold(self, now: float) -> None:
        try:
            self._rollups.fold(now)
            if self.journaling is not None:
                self.journaling.fold_shared(now)
        except StoreUnavailable as error:
            _LOG.warning("changes of requests are folded into rollups later: %s", error)
            self._meter.store_failed(StoreWrite.FOLD)
        else:
            self.folded_at = now

    def _measure(self, _now: float) -> None:
        try:
            self.size_bytes = (
                database_bytes(self._query_database)
                if self.journaling is None
                else self.journaling.shared_bytes()
            )
        except (StoreUnavailable, OSError) as error:
            _LOG.warning("the size of the database is not known: %s", error)
            self.size_bytes = None

    def _expire(self, now: float) -> None:
        try:
            gone = self._expired(now) if self.journaling is None else self.journaling.expire(now)
        except StoreUnavailable as error:
            _LOG.warning("old rows stay for now: %s", error)
            self._meter.store_failed(StoreWrite.EXPIRE)
        else:
            _LOG.info("%d old rows were deleted", gone)

    def _expired(self, now: float) -> int:
        storage = self._settings.storage
        rollups_before = now - storage.keep_rollups
        gone = self._retention.expire(now - storage.keep_requests, rollups_before, now)
        gone += MinuteStore(self._upkeep, self._settings.name).expire(rollups_before)
        merge_minutes(self._upkeep, self._settings.name, now)
        return gone

    def close(self) -> None:
        """Give the agent's name back, and close the connections."""
        if self.journaling is not None:
            self.journaling.close(FORWARDED_WITHIN_S)
        self._keeper.close()
        # So that a copy of the file alone has the rows, unless a query still reads them.
        checkpoints(self.database)()
        self._query_database.dispose()
        self._upkeep.dispose()
        self.database.dispose()
        if self.journaling is not None:
            self.journaling.release()
