"""The store of a running agent: its database, its journal, and the jobs on old rows."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self, TypeVar, cast

from sqlalchemy import Engine

from agent.analysis.verdicts import Judge
from agent.app.jobs import Jobs
from agent.catalog import metrics as m
from agent.catalog.own_health import BEHIND_S, OK, Stage
from agent.catalog.reasons import JournalDropped, StoreWrite
from agent.errors import StoreUnavailable
from agent.outputs.api.api_context import ApiQueries
from agent.outputs.prometheus.meter import Meter
from agent.pipeline.ended_requests import EndedRequests, EndedRows
from agent.pipeline.request_pipeline import OnCounted
from agent.records.objective import Objective
from agent.settings import Settings
from agent.store.agent_state import AgentState, no_journal
from agent.store.amending import request_amend
from agent.store.claim import NameClaim, own_instance
from agent.store.connection import for_writing, in_transaction, open_engine
from agent.store.database_size import database_bytes
from agent.store.explanations import ExplanationStore
from agent.store.health import StoreHealth
from agent.store.journal.backlog import Lag, lag_of
from agent.store.journal.destination import SharedDatabase
from agent.store.journal.destinations import upkeep_of
from agent.store.journal.either_database import EitherDatabase
from agent.store.journal.file_lock import JournalLock
from agent.store.journal.forwarder import JournalForwarder
from agent.store.journal.noting import begin_run
from agent.store.journal.room import JournalRoom
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
from agent.store.time_limits import UPKEEP_S, limit_waits
from agent.store.transactions import Joining, request_settle, request_write
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


class Journaling:
    """What an agent with a journal has beside its store, whose engine is the journal."""

    def __init__(
        self,
        settings: Settings,
        shared_url: str,
        engines: tuple[Engine, Engine],
        objectives: Sequence[Objective],
        meter: Meter,
        *,
        state: AgentState,
        give_way: Callable[[], None],
    ) -> None:
        """`engines` are the journal's, for writing and for queries.

        `give_way` is called before each batch that is forwarded.
        """
        self._settings = settings
        self._shared_url = shared_url
        self._meter = meter
        self._state = state
        self._own, self._own_queries = engines
        storage = settings.storage
        self._lock = JournalLock(Path(storage.file))
        self.room = JournalRoom(
            self._own,
            max_bytes=storage.max_bytes,
            max_age_s=min(storage.kept_in_file_s, storage.keep_rollups),
            on_dropped=self._dropped,
        )
        self.on_damage: Callable[[Exception], None] | None = None
        self.forwarder = self._make_forwarder(objectives, give_way)
        self._queries = open_query_engine(shared_url, storage.query_timeout)
        self._upkeep = upkeep_of(
            shared_url,
            settings.name,
            keep_requests_s=storage.keep_requests,
            keep_rollups_s=storage.keep_rollups,
            max_series=storage.max_series,
        )
        self._show()

    def _make_forwarder(
        self, objectives: Sequence[Objective], give_way: Callable[[], None]
    ) -> JournalForwarder:
        storage, name = self._settings.storage, self._settings.name
        shared = SharedDatabase(
            url=self._shared_url,
            agent=name,
            instance=own_instance(),
            objectives=objectives,
            max_series=storage.max_series,
            state=self._state,
        )
        return JournalForwarder(
            self._own,
            shared,
            on_forwarded=lambda rows: self._meter.count(m.JOURNAL_FORWARDED, by=rows),
            on_refused=lambda rows: self._dropped(JournalDropped.REFUSED, rows),
            on_journal_failed=self._failed,
            give_way=give_way,
        )

    def _show(self) -> None:
        for reason in JournalDropped:
            self._dropped(reason, 0)
        self._meter.count(m.JOURNAL_FORWARDED, by=0)
        self._meter.gauge(m.JOURNAL_WAITING, lambda: self.room.lag.rows)
        self._meter.gauge(m.JOURNAL_LAG, lambda: self.room.lag.seconds)
        self._meter.gauge(m.JOURNAL_BYTES, lambda: self.room.used_bytes)

    def _dropped(self, reason: JournalDropped, rows: int) -> None:
        self._meter.count(m.JOURNAL_DROPPED, reason, by=rows)

    def begin_run(self, engine: Engine) -> None:
        """Note the changes of a journal that was just opened.

        Raises StoreUnavailable while another agent writes to it.
        """
        self._lock.take()
        in_transaction(for_writing(engine), begin_run)

    def either(self) -> tuple[ApiQueries, MinuteQueries]:
        """The queries of the API, and those of minutes."""
        queries, minutes = (
            EitherDatabase(there, own, self._is_there)
            for there, own in zip(
                stored_queries(self._queries), stored_queries(self._own_queries), strict=True
            )
        )
        return cast(ApiQueries, queries), cast(MinuteQueries, minutes)

    def _is_there(self) -> bool:
        return self.forwarder.problem() is None

    def shared_bytes(self) -> int | None:
        """The size of the shared database. Raises StoreUnavailable."""
        return database_bytes(self._queries)

    def status_text(self) -> str:
        """The status of forwarding, for /readyz."""
        return forwarding_status(self.forwarder.problem(), self.room.lag)

    def start(self, jobs: Jobs) -> None:
        """Begin to forward, and schedule the keeping of the bounds."""
        self.forwarder.start()
        jobs.every(KEEP_ROOM_EVERY_S, "keep the journal's bounds", self._keep_room)

    def _keep_room(self, now: float) -> None:
        try:
            self.room.keep(now)
        except StoreUnavailable as error:
            _LOG.warning("the journal is not measured: %s", error)
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        if self.on_damage is not None:
            self.on_damage(error)

    def settle_by(self, joining: Joining) -> None:
        """Settle the rows of this agent that wait in the shared database, by the next fold."""
        self._upkeep.settle_by(joining)

    def fold_shared(self, now: float) -> None:
        """Bring the rollups of the shared database up to date."""
        if self.forwarder.problem() is None:
            self._upkeep.fold(now)

    def expire(self, now: float) -> int:
        """Delete old rows of both databases, and merge old minutes of the shared one.

        Of the journal, minutes are not merged: the shared database has each of them. And there only
        while it has everything: a minute that still waits would be summed twice. Returns how many
        rows of the journal were deleted.
        """
        kept_s = self.room.max_age_s
        gone = self.room.expire(now) + Retention(self._own).expire(0.0, now - kept_s, now)
        gone += MinuteStore(self._own, self._settings.name).expire(now - kept_s)
        if self.forwarder.has_caught_up(_CAUGHT_UP_WITHIN_S):
            self._upkeep.expire(now)
        return gone

    def close(self, within_s: float) -> None:
        """End forwarding, and close the connections."""
        self.forwarder.close(within_s)
        self._queries.dispose()
        self._upkeep.close()

    def release(self) -> None:
        """Let another agent write to the journal, which is closed."""
        self._lock.release()


def forwarding_status(problem: str | None, lag: Lag) -> str:
    """How forwarding is: what keeps it up, or that it falls behind by itself."""
    if problem is not None:
        return f"{problem}; {lag.rows} changes wait"
    if lag.seconds > BEHIND_S[Stage.FORWARD]:
        return f"the journal is {lag.seconds:.0f} s behind; {lag.rows} changes wait"
    return OK


EXPIRE_EVERY_S = 3600
FOLD_EVERY_S = 30.0
MEASURE_EVERY_S = 60.0

# A database that does not answer delays the listeners no longer than this.
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
        meter: Meter,
        now: Callable[[], float],
        state: AgentState,
    ) -> None:
        """`state` is what the agent reports of itself.

        Raises SettingsInvalid for a kind of database that is not supported.
        """
        storage, objectives = settings.storage, settings.all_objectives()
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
        return open_engine(self._settings.storage.own_url, pool_pre_ping=False)

    def _open_upkeep(self) -> Engine:
        """The engine of the jobs on many rows: on PostgreSQL their statements have no limit."""
        if self.database.dialect.name != "postgresql":
            return self.database
        engine = open_engine(self._settings.storage.own_url, pool_pre_ping=False)
        limit_waits(engine, UPKEEP_S)
        return engine

    def _make_journaling(self, objectives: Sequence[Objective]) -> Journaling | None:
        shared_url = self._settings.storage.publish_to
        if shared_url is None:
            return None
        engines = (self.database, self._query_database)
        return Journaling(
            self._settings,
            shared_url,
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

    def statuses(self) -> Mapping[str, Callable[[], str]]:
        """The status of the shared database for /readyz; spans do not wait for it."""
        return {} if self.journaling is None else {"shared database": self.journaling.status_text}

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
