"""Publishes an agent's file to ClickHouse: the rows of a batch first, then its number.

Each row replaces the one with its key and a lower number, so a batch may be written again: after a
lost response, after a kill, or in part.
"""

import zlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Table, func, select, text

from agent.errors import StoreUnavailable
from agent.store.clickhouse.claims import ClickHouseClaim, write_in_force
from agent.store.clickhouse.connecting import (
    client_of,
    insert_rows,
    is_of_database,
    refuses_content,
    using,
)
from agent.store.clickhouse.schema import DELETED, types_of, upgrade_clickhouse
from agent.store.connection import open_engine
from agent.store.publishing.changes import (
    COLUMNS,
    ChangedRows,
    FileState,
    Row,
    batch_after,
    file_state,
)
from agent.store.publishing.destination import (
    STATEMENT_S,
    AgentFile,
    BatchSize,
    Published,
    SharedDatabase,
    shared_ids,
    with_shared_series,
    write_all_but_refused,
)
from agent.store.publishing.restoring import restore
from agent.store.rollups import Series
from agent.store.tables import (
    cause_rollups,
    engine_counts,
    engine_minutes,
    engine_samples,
    events,
    gpu_samples,
    published_files,
    requests,
    rollup_series,
    rollups,
)
from agent.store.utc_timestamp import UtcTimestamp

# The `id` of a row is its number in the file, followed by bits that differ between agents.
_AGENT_BITS = 20

_OF_ROWS = (requests, engine_samples, gpu_samples, events, engine_minutes, engine_counts)
_OF_SERIES = (rollups, cause_rollups)
_GONE_TYPES = {
    **{name: types_of(requests)[name] for name in ("trace_id", "span_id", "started_at", "changed")},
    **DELETED,
}
_SERIES_TYPES = {name: types_of(rollup_series)[name] for name in ("id", *Series._fields, "file")}
_REFUSED = "the database did not take the write"
# The server's clock says when.
_SET_NUMBER = (
    "INSERT INTO published_files (agent, file, last, at) "
    "SELECT {agent:String}, {file:String}, {last:Int64}, now64(6)"
)
_SKIP_TO = text("UPDATE publishing SET last = max(last, :number)")


class ClickHouseDestination:
    """A shared ClickHouse; see SharedDestination."""

    # Each batch makes a part in each table, and the server must merge the parts.
    idle_s = 2.0

    def __init__(self, shared: SharedDatabase, file: AgentFile) -> None:
        self._to = shared
        self._shared = open_engine(shared.url, statement_s=STATEMENT_S)
        self._claim = ClickHouseClaim(
            shared.agent, shared.instance, state=shared.state, lag=file.lag
        )
        # Up to which number the database has which file.
        self._known: tuple[str, int] | None = None

    def prepare(self, file: AgentFile) -> None:
        """Migrate it, take the agent's name, store its objectives; see SharedDestination."""
        upgrade_clickhouse(self._shared)
        self._claim.take(self._shared)
        with using(self._shared, _REFUSED) as client:
            write_in_force(client, self._to.agent, self._to.objectives)
        with file.reading() as own:
            state = file_state(own)
        with self._shared.connect() as shared:
            number = self._number(shared, state.file)
            if number is None or state.last_at_start is not None:
                self._go_on(shared, file, state, number)
        self._known = (state.file, number or 0)

    def _number(self, shared: Connection, file: str) -> int | None:
        """The number up to which the database has a file; None if it has nothing of it."""
        of_file = (published_files.c.agent == self._to.agent, published_files.c.file == file)
        return shared.execute(select(published_files.c.last).where(*of_file)).scalar()

    def _go_on(
        self, shared: Connection, file: AgentFile, state: FileState, number: int | None
    ) -> None:
        """Let the numbers of a new or a restored file go on after those of the agent's rows there.

        Else later rows would not replace them. Of a batch that was written in part, there are rows
        with higher numbers than that of the file.
        """
        newest = max(number or 0, *(_newest(shared, table, self._to.agent) for table in _VERSIONED))
        if number is not None and state.lacks(newest):
            restore(shared, file, self._to.agent, state, newest)
        elif newest > state.last:
            file.write(lambda own: own.execute(_SKIP_TO, {"number": newest}))

    def beat(self) -> None:
        """Update the agent's row in `agents`, so that no other agent takes its name."""
        self._claim.beat(self._shared)

    def release(self) -> None:
        """Give the agent's name back."""
        self._claim.release(self._shared)

    def publish(self, file: AgentFile, size: BatchSize) -> Published:
        """Write the next batch, if the database does not have everything."""
        with file.reading() as own:
            known, number = self._known or ("", 0)
            if known != file_state(own).file:
                raise StoreUnavailable("the agent's file is another one now")
            batch = batch_after(own, number, size.most)
            if batch is None:
                return Published(number, is_newest=True, rows=0, refused=0)
            try:
                with self._shared.connect() as shared:
                    rows, refused = _Rows(client_of(shared), self._to.agent).write(batch)
            except Exception:
                size.failed()
                raise
        self._known = (batch.file, batch.last)
        return Published(batch.last, batch.is_newest, rows, refused)

    def is_error(self, error: Exception) -> bool:
        """Whether SQLAlchemy or the driver raised the error."""
        return is_of_database(error)

    def disconnect(self) -> None:
        """Close the connections; the next use connects anew."""
        self._shared.dispose()


_VERSIONED = (requests, engine_minutes, engine_counts, rollups, cause_rollups)


def _newest(shared: Connection, table: Table, agent: str) -> int:
    """The highest number of an agent's rows in a table."""
    if "agent" in table.c:
        of_agent = table.c.agent == agent
    else:
        of_agent = table.c.series.in_(
            select(rollup_series.c.id).where(rollup_series.c.agent == agent)
        )
    # Replaced and deleted rows count, too.
    unmerged = {"settings": {"final": 0}}
    query = select(func.max(table.c.changed)).where(of_agent)
    return shared.execute(query, execution_options=unmerged).scalar() or 0


class _Rows:
    """Writes the rows of batches; those that the database refuses are left out and counted."""

    def __init__(self, client: Any, agent: str) -> None:
        self._client = client
        self._agent = agent
        self._bits = zlib.crc32(agent.encode()) % 2**_AGENT_BITS

    def write(self, batch: ChangedRows) -> tuple[int, int]:
        """Write a batch and its number; returns how many rows it has, and how many are left out."""
        ids = self._series(batch)
        rows_of: dict[str, Sequence[Row]] = {
            **{table.name: batch.rows(table) for table in _OF_ROWS},
            **{
                table.name: with_shared_series(table, batch.rows(table), ids)
                for table in _OF_SERIES
            },
        }
        refused = sum(self._write(_TARGETS[name], rows) for name, rows in rows_of.items())
        self._delete(batch)
        named = {"agent": self._agent, "file": batch.file, "last": batch.last}
        self._client.command(_SET_NUMBER, named)
        return sum(map(len, rows_of.values())), refused

    def _series(self, batch: ChangedRows) -> Mapping[int, int]:
        """Write the series of a batch; returns their ids there by those in the file."""
        series = batch.series()
        ids = shared_ids(batch.file, series)
        rows = [(ids[row_id], *each, batch.file) for row_id, each in series.items()]
        insert_rows(
            self._client, rollup_series.name, [*_SERIES_TYPES], [*_SERIES_TYPES.values()], rows
        )
        return ids

    def _delete(self, batch: ChangedRows) -> None:
        gone = [
            (trace, span, _microseconds(began), batch.last, 1)
            for trace, span, began in batch.deleted()
        ]
        insert_rows(self._client, requests.name, [*_GONE_TYPES], [*_GONE_TYPES.values()], gone)

    def _write(self, target: "_Target", rows: Sequence[Row]) -> int:
        """Write rows, each but those that are refused. Returns how many are."""

        def insert(part: Sequence[Row]) -> None:
            target.insert(self._client, part, self._bits)

        return len(write_all_but_refused(target.name, rows, insert, refuses_content))


class _Target:
    """A table that rows of the file are inserted into."""

    def __init__(self, table: Table) -> None:
        self.name = table.name
        self._columns = COLUMNS[table.name]
        self._types = [types_of(table)[name] for name in self._columns]
        self._times = [
            place
            for place, name in enumerate(self._columns)
            if isinstance(table.c[name].type, UtcTimestamp)
        ]
        self._is_numbered = self._columns[0] == "id"

    def insert(self, client: Any, rows: Sequence[Row], agent_bits: int) -> None:
        """Insert rows as one block."""
        made = [self._row(row, agent_bits) for row in rows]
        insert_rows(client, self.name, self._columns, self._types, made)

    def _row(self, row: Row, agent_bits: int) -> list[Any]:
        values = [*row]
        for place in self._times:
            if values[place] is not None:
                values[place] = _microseconds(values[place])
        if self._is_numbered:
            values[0] = values[0] << _AGENT_BITS | agent_bits
        return values


_TARGETS = {table.name: _Target(table) for table in (*_OF_ROWS, *_OF_SERIES)}


@lru_cache(maxsize=4096)
def _second(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()) * 1_000_000


def _microseconds(text: str) -> int:
    """Unix microseconds of a timestamp of the file, whose text has six decimal places."""
    return _second(text[:19]) + int(text[20:] or 0)
