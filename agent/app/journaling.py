"""The journal of a running agent: its bounds, its forwarding, and the shared database's upkeep."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from sqlalchemy import Engine

from agent.app.jobs import Jobs
from agent.app.readiness import OK
from agent.catalog import metrics as m
from agent.catalog.own_health import BEHIND_S, Stage
from agent.catalog.reasons import JournalDropped
from agent.errors import StoreUnavailable
from agent.outputs.api.api_context import ApiQueries
from agent.outputs.prometheus.meter import Meter
from agent.records.objective import Objective
from agent.settings import Settings
from agent.settings.settings_model import JournalSettings
from agent.store.agent_state import AgentState
from agent.store.claim import own_instance
from agent.store.connection import for_writing, in_transaction
from agent.store.database_size import database_bytes
from agent.store.journal.backlog import Lag
from agent.store.journal.destination import SharedDatabase
from agent.store.journal.destinations import upkeep_of
from agent.store.journal.either_database import EitherDatabase
from agent.store.journal.file_lock import JournalLock
from agent.store.journal.forwarder import JournalForwarder
from agent.store.journal.noting import begin_run
from agent.store.journal.room import JournalRoom
from agent.store.minute_sums import MinuteQueries
from agent.store.minutes import MinuteStore
from agent.store.query_limits import open_query_engine
from agent.store.retention import Retention
from agent.store.stored_queries import stored_queries
from agent.store.transactions import Joining

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
        journal: JournalSettings,
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
        self._meter = meter
        self._state = state
        self._own, self._own_queries = engines
        storage = settings.storage
        self._lock = JournalLock(Path(journal.path))
        self.room = JournalRoom(
            self._own,
            max_bytes=journal.max_bytes,
            max_age_s=min(journal.max_age, storage.keep_requests, storage.keep_rollups),
            on_dropped=self._dropped,
        )
        self.on_damage: Callable[[Exception], None] = _ignored
        self.forwarder = self._make_forwarder(objectives, give_way)
        self._queries = open_query_engine(storage.url, storage.query_timeout)
        self._upkeep = upkeep_of(
            storage.url,
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
            url=storage.url,
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
            on_journal_failed=lambda error: self.on_damage(error),
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

    def in_words(self) -> str:
        """How forwarding is, for /readyz."""
        return forwarding_in_words(self.forwarder.problem(), self.room.lag)

    def start(self, jobs: Jobs) -> None:
        """Begin to forward, and schedule the keeping of the bounds."""
        self.forwarder.start()
        jobs.every(KEEP_ROOM_EVERY_S, "keep the journal's bounds", self._keep_room)

    def _keep_room(self, now: float) -> None:
        try:
            self.room.keep(now)
        except StoreUnavailable as error:
            _LOG.warning("the journal is not measured: %s", error)
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


def forwarding_in_words(problem: str | None, lag: Lag) -> str:
    """How forwarding is: what keeps it up, or that it falls behind by itself."""
    if problem is not None:
        return f"{problem}; {lag.rows} changes wait"
    if lag.seconds > BEHIND_S[Stage.FORWARD]:
        return f"the journal is {lag.seconds:.0f} s behind; {lag.rows} changes wait"
    return OK


def _ignored(_error: Exception) -> None:
    """Tell nobody."""
