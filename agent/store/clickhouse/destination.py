"""A shared ClickHouse: rows that may come again, and sums whose block is sent until it is there."""

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
from agent.store.journal.destination import (
    STATEMENT_S,
    BatchSize,
    Forwarded,
    JournalFile,
    SharedDatabase,
    log_refusal,
)
from agent.store.journal.waiting import NotedRows, Run, batch_after, batch_until

_LOG = logging.getLogger(__name__)

# The server knows a token for 100,000 batches of all agents. After this time the block itself is
# looked for, and views that failed with it are not filled any more.
_TOKEN_TRUSTED_S = 900.0

_SENT = "SELECT run, last, at, version FROM journal_sent"
_SET_SENT = text(
    "INSERT OR REPLACE INTO journal_sent (one, run, last, at, version) "
    "VALUES (1, :run, :last, :at, :version)"
)
_REFUSED = "the database did not take the write"
_MAYBE_MISSING = (
    "ClickHouse has the block of note %d of run %s, which was sent long ago; if a view failed with "
    "it, sums of that batch are missing in the view's table"
)


class _Sent(NamedTuple):
    """The last batch of sums that was sent."""

    run: str
    last: int
    at: float
    version: int

    def is_after(self, mark: int, run: Run) -> bool:
        """Whether it is of this run, and more than the server is known to have."""
        return self.run == run.id and self.last > mark


class ClickHouseDestination:
    """A shared ClickHouse; see BatchDestination.

    The rows of a batch are written first: they replace each other, so that they may come again.
    Then its last number is noted in the journal, and its sums are sent as one block until the
    server answers, with the same number and so the same token, also by a later run of the agent.
    """

    # Each batch makes a part in each table, and the server merges them.
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
        """Show that the agent lives."""
        self._claim.beat(self._shared)

    def release(self) -> None:
        """Give the agent's name back."""
        self._claim.release(self._shared)

    def forward(self, journal: JournalFile, run: Run, size: BatchSize) -> Forwarded:
        """Write the next batch of a run; without notes where the run was written already."""
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
        """The number up to which the server is known to have a run."""
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
        """Send the sums of a batch, which is noted as sent, and its mark.

        A block that the driver cannot write is nowhere: it may come again in smaller ones. One that
        the server refuses may be in some of the tables, and is sent as it is until it is in all.
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
        """Whether its driver raised an error."""
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
    """A version above those before, also after the clock was set back."""
    now_us = time.time_ns() // 1000
    return now_us if sent is None else max(now_us, sent.version + 1)
