"""The store of a running agent: its database, the writer of requests, and the jobs on old rows."""

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from agent.analysis.verdicts import Judge
from agent.app.jobs import Jobs
from agent.catalog.reasons import StoreWrite
from agent.errors import StoreUnavailable
from agent.outputs.prometheus.meter import Meter
from agent.pipeline.ended_requests import EndedRequests
from agent.pipeline.ended_rows import EndedRows
from agent.pipeline.request_pipeline import OnCounted
from agent.records.objective import Objective
from agent.settings import Settings
from agent.store.amending import request_amend
from agent.store.claim import NameClaim, own_instance
from agent.store.connection import open_engine
from agent.store.explanations import ExplanationStore
from agent.store.health import StoreHealth
from agent.store.keeping import StoreKeeper
from agent.store.minute_sums import merge_minutes
from agent.store.minutes import MinuteStore
from agent.store.objectives import ObjectiveStore
from agent.store.query_limits import open_query_engine
from agent.store.retention import Retention
from agent.store.rollup_store import RollupStore
from agent.store.transactions import Joining, request_settle, request_write
from agent.store.writing import RequestWriter

_LOG = logging.getLogger(__name__)

EXPIRE_EVERY_S = 3600
FOLD_EVERY_S = 30.0

# A database that does not answer delays the doors no longer than this.
OPEN_WITHIN_S = 5.0

Given = TypeVar("Given")
Result = TypeVar("Result")


class AgentStore:
    """Opens the database now or, while it is away, later; then whoever uses it gets refusals."""

    def __init__(
        self,
        settings: Settings,
        objectives: Sequence[Objective],
        meter: Meter,
        now: Callable[[], float],
    ) -> None:
        """Raises SettingsInvalid where the kind of database is not supported."""
        storage = settings.storage
        self._settings = settings
        self._meter = meter
        self.health = StoreHealth()
        self.database = open_engine(storage.url)
        self.query_database = open_query_engine(storage.url, storage.query_timeout)
        self.minutes = MinuteStore(self.database, settings.name)
        self.explanations = ExplanationStore(
            self.database, settings.name, storage.max_series, self._set_aside
        )
        self._rollups = RollupStore(
            self.database,
            settings.name,
            storage.max_series,
            lambda requests: meter.label_replaced("series", requests),
        )
        self._retention = Retention(self.database)
        self._keeper = StoreKeeper(
            storage.url,
            [self.database, self.query_database],
            claim=NameClaim(settings.name, own_instance()),
            prepare=lambda engine: ObjectiveStore(engine, settings.name).write_in_force(
                objectives, now()
            ),
            health=self.health,
            sets_aside=storage.on_corrupt == "set_aside",
        )
        self._keeper.start(wait_s=OPEN_WITHIN_S)

    def writer(self, judge: Judge) -> RequestWriter:
        """The writer of requests."""
        proxy = self._settings.proxy
        joining = Joining(
            agent=self._settings.name,
            judge=judge,
            wait_s=None if proxy.listen is None else proxy.join_wait,
        )
        write = request_write(self.database, joining, self._keeper.verify)
        settle = request_settle(self.database, joining, self._set_aside)
        return RequestWriter(self._noted("a write of requests", write), settle)

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
            with self.health.write(what):
                return work(given)

        return noted

    def schedule(self, jobs: Jobs) -> None:
        """Schedule the jobs on stored rows."""
        jobs.every(FOLD_EVERY_S, "fold rollups", self._fold, at_once=True)
        jobs.every(EXPIRE_EVERY_S, "expire", self._expire, at_once=True)

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
            gone += self.minutes.expire(now - storage.keep_rollups)
            merge_minutes(self.database, self._settings.name, now)
        except StoreUnavailable as error:
            _LOG.warning("old rows stay for now: %s", error)
            self._meter.store_failed(StoreWrite.EXPIRE)
        else:
            _LOG.info("%d old rows were deleted", gone)

    def close(self) -> None:
        """Give the agent's name back, and close the connections."""
        self._keeper.close()
        self.query_database.dispose()
        self.database.dispose()
