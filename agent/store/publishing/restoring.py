"""Gives a file that was restored from a backup back what the shared database has of it since."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, insert, select, update

from agent.store.connection import ROWS_PER_READ
from agent.store.publishing.changes import TABLES, FileState, file_state, forget_start
from agent.store.publishing.destination import AgentFile
from agent.store.rollup_queries import BINARY
from agent.store.rollups import Series, stored_ids
from agent.store.tables import (
    cause_rollups,
    deleted_requests,
    engine_counts,
    engine_minutes,
    publishing,
    requests,
    rollup_series,
    rollups,
)

_LOG = logging.getLogger(__name__)


def restore(shared: Connection, file: AgentFile, agent: str, state: FileState, stored: int) -> None:
    """Write later requests, minutes and rollups of the agent into its file; its numbers go on.

    Else a sum that goes on from the backup would replace the one that the shared database has.
    """
    _LOG.warning(
        "the agent's file is older than what was published of it: it was restored from a backup, "
        "and gets the later requests and sums back from the shared database"
    )

    def write(own: Connection) -> None:
        # What the agent wrote since its start has numbers of what was published.
        following = max(stored, file_state(own).last) + 1
        for table in (*TABLES, deleted_requests):
            written = table.c.changed > state.known
            own.execute(update(table).where(written).values(changed=following))
        for table in (requests, engine_minutes, engine_counts):
            later = (table.c.agent == agent, table.c.changed > state.known)
            for rows in _found(shared, table, later):
                own.execute(insert(table).prefix_with("OR REPLACE"), rows)
        _restore_rollups(shared, own, agent, state)
        forget_start(own)
        own.execute(publishing.update().values(last=following, published=stored))

    file.write(write)


def _restore_rollups(shared: Connection, own: Connection, agent: str, state: FileState) -> None:
    of_file = (rollup_series.c.agent == agent, rollup_series.c.file == state.file)
    names = [rollup_series.c[name] for name in Series._fields]
    found = shared.execute(select(rollup_series.c.id, *names).where(*of_file))
    series = {row_id: Series(*rest) for row_id, *rest in found}
    ids = stored_ids(own, [*series.values()])
    for table in (rollups, cause_rollups):
        of_series = table.c.series.in_(select(rollup_series.c.id).where(*of_file))
        for rows in _found(shared, table, (of_series, table.c.changed > state.known)):
            mapped = [{**row, "series": ids[series[row["series"]]]} for row in rows]
            own.execute(insert(table).prefix_with("OR REPLACE"), mapped)


def _found(
    shared: Connection, table: Table, conditions: Sequence[ColumnElement[bool]]
) -> Iterator[list[Mapping[str, Any]]]:
    query = select(*(column for column in table.c if column.name != "id")).where(*conditions)
    vectors = BINARY if table is rollups else {}
    rows = shared.execute(query, execution_options={"yield_per": ROWS_PER_READ, **vectors})
    for part in rows.mappings().partitions():
        yield [{str(name): value for name, value in row.items()} for row in part]
