"""Forwards a journal to ClickHouse: rows may be written again, sums are sent as one known block."""

import logging
import time
from functools import partial
from typing import Any, NamedTuple

from sqlalchemy import Connection, text

from agent.store.clickhouse.claims import ClickHouseClaim, write_in_force
from agent.store.clickhouse.connecting import (
    cannot_write,
    client_of,
    is_of_database,
    refuses_content,
    using,
)
from agent.store.clickhouse.forwarded_rows import (
    is_stored,
    stored_until,
    write_mark,
    write_rows,
    write_sums,
)
from agent.store.clickhouse.schema import upgrade_clickhouse
from agent.store.connection import open_engine
from agent.store.journal.backlog import NotedRows, Run, batch_after, batch_until
from agent.store.journal.destination import (
    STATEMENT_S,
    BatchSize,
    Forwarded,
    JournalFile,
    SharedDatabase,
    log_refusal,
)

_LOG = logging.getLogger(__name__)

# The server knows the tokens of the last 100,000 batches of all agents. After this time it may have
# forgotten a token, so the agent asks whether the block is there instead of sending it again.
_TOKEN_TRUSTED_S = 900.0

_SENT = "SELECT run, last, at, version FROM journal_sent"
_SET_SENT = text(
    "INSERT OR REPLACE INTO journal_sent (one, run, last, at, version) "
    "VALUES (1, :run, :last, :at, :version)"
)
_REFUSED = "the database did not take the write"
_MAYBE_MISSING = (
    "ClickHouse has the block of note %d of run %s, which was sent long ago; if a view failed for "
    "this block, its sums are missing in the view's table"
)


class _Sent(NamedTuple):
    """The last batch whose sums were sent: its run, last note, Unix time and row version."""

    run: str
    last: int
    at: float
    version: int

    def is_after(self, mark: int, run: Run) -> bool:
        """Whether the batch is of this run, and the server has no mark for it yet."""
        return self.run == run.id and self.last > mark


class ClickHouseDestination:
    """A shared ClickHouse; see BatchDestination.

    The rows of a batch are written first: a row replaces the one with its key, so rows may be
    written again. Then the journal stores the last number of the batch (`journal_sent`). Then the
    sums are sent as one block, whose token is made of the run and this number, until the server
    acknowledges it. The next run of the agent goes on with the same number.
    """

    # Each batch makes a part in each table, and the server must merge the parts.
    idle_s = 2.0

    def __init__(self, destination: SharedDatabase, journal: JournalFile) -> None:
        self._to = destination
        self._shared = open_engine(destination.url, statement_s=STATEMENT_S)
        self._claim = ClickHouseClaim(
            destination.agent, destination.instance, state=destination.state, lag=journal.lag
        )
        self._marks: dict[str, int] = {}

    def prepare(self) -> None:
        """Migrate it, take the agent's name there, and store the agent's objectives."""
        upgrade_clickhouse(self._shared)
        self._claim.take(self._shared)
        with using(self._shared, _REFUSED) as client:
            write_in_force(client, self._to.agent, self._to.objectives)

    def beat(self) -> None:
        """Update the agent's row in `agents`, so that no other agent takes its name."""
        self._claim.beat(self._shared)

    def release(self) -> None:
        """Give the agent's name back."""
        self._claim.release(self._shared)

    def forward(self, journal: JournalFile, run: Run, size: BatchSize) -> Forwarded:
        """Write the next batch of a run; a result with 0 notes where all of the run is written."""
        with self._shared.connect() as connection, journal.reading() as own:
            client = client_of(connection)
            sent = _sent(own)
            mark = self._mark(client, run)
            if sent is not None and sent.is_after(mark, run):
                batch = batch_until(own, run, mark, sent.last)
                return self._sums(client, batch, journal, sent, size)
            batch = batch_after(own, run, mark, size.most)
            if batch is None:
                return Forwarded(mark, 0)
            version = _following(sent)
            if not self._rows(client, batch, version, size):
                return Forwarded(batch.last, batch.notes, taken=False)
            noted = _Sent(run.id, batch.last, time.time(), version)
            journal.write(partial(_note, sent=noted))
            return self._sums(client, batch, journal, noted, size)

    def _mark(self, client: Any, run: Run) -> int:
        """The number up to which the server has a run, as far as this agent knows."""
        known = self._marks.get(run.id)
        if known is None:
            known = self._marks[run.id] = stored_until(client, run.id)
        return known

    def _rows(self, client: Any, batch: NotedRows, version: int, size: BatchSize) -> bool:
        """Write the rows of a batch; returns False where their content is refused."""
        try:
            write_rows(client, batch, self._to.agent, version)
        except Exception as error:
            size.failed(batch.notes)
            if not refuses_content(error):
                raise
            log_refusal(error, batch.notes)
            return False
        return True

    def _sums(
        self,
        client: Any,
        batch: NotedRows | None,
        journal: JournalFile,
        sent: _Sent,
        size: BatchSize,
    ) -> Forwarded:
        """Send the sums and the mark of a batch that the journal has as sent.

        A block that the driver cannot encode is in no table, so a smaller batch may follow. A block
        that the server refuses may be in some tables: it is sent unchanged until it is in all.
        """
        notes = 0 if batch is None else batch.notes
        try:
            is_late = time.time() - sent.at > _TOKEN_TRUSTED_S
            if is_late and is_stored(client, sent.run, sent.last):
                _LOG.warning(_MAYBE_MISSING, sent.last, sent.run)
            else:
                write_sums(client, batch, sent.run, sent.last)
            write_mark(client, sent.run, sent.last)
        except Exception as error:
            if not cannot_write(error):
                raise
            journal.write(partial(_note, sent=sent._replace(last=0)))
            size.failed(notes)
            log_refusal(error, notes)
            return Forwarded(sent.last, notes, taken=False)
        self._marks[sent.run] = sent.last
        return Forwarded(sent.last, notes)

    def is_error(self, error: Exception) -> bool:
        """Whether SQLAlchemy or the driver raised the error."""
        return is_of_database(error)

    def disconnect(self) -> None:
        """Close the connections; the next use connects anew."""
        self._shared.dispose()


def _sent(journal: Connection) -> _Sent | None:
    found = journal.exec_driver_sql(_SENT).one_or_none()
    return None if found is None else _Sent(*found)


def _note(journal: Connection, sent: _Sent) -> None:
    journal.execute(_SET_SENT, sent._asdict())


def _following(sent: _Sent | None) -> int:
    """A row version above that of the last batch, also where the clock was set back since."""
    now_us = time.time_ns() // 1000
    return now_us if sent is None else max(now_us, sent.version + 1)
