"""PostgreSQL's partitions by day: made ahead, and dropped when all their rows are old."""

import logging
from collections.abc import Mapping
from datetime import UTC, date, datetime, time, timedelta
from functools import partial

from sqlalchemy import Connection, Engine, TableClause, column, table, text

from agent.store.connection import in_transaction
from agent.store.tables import engine_samples, gpu_samples, requests

_LOG = logging.getLogger(__name__)

# Tables that PostgreSQL partitions, and the columns with their times.
PARTITIONED: Mapping[str, str] = {
    requests.name: requests.c.started_at.name,
    engine_samples.name: engine_samples.c.at.name,
    gpu_samples.name: gpu_samples.c.at.name,
}
# An agent may be away for a weekend; later rows go to the partition of other days first.
DAYS_AHEAD = 3
# An arbitrary number that all agents share.
_LOCK = 730_111_948
# A long query of an operator keeps a partition; all others would wait behind us.
_WAITS = text("SET LOCAL lock_timeout = '2s'")
# A lock for each table: an agent at work on one must not make others leave out the rest.
_TAKE_TURN = text("SELECT pg_try_advisory_xact_lock(:lock, hashtext(:table))")
_PARTITIONS = text(
    "SELECT inhrelid::regclass::text FROM pg_inherits "
    "WHERE inhparent = to_regclass(:table) ORDER BY 1"
)


def other_days(name: str) -> TableClause:
    """The partition for rows of the days that have none, such as those of a wrong clock."""
    return table(f"{name}_other_days", column("id"), column(PARTITIONED[name]))


def keep_partitions(engine: Engine, before: float, now: float) -> None:
    """Make the partitions of the next days, and drop those whose rows are all before a Unix time.

    Agents take turns at each table: one that finds another at it leaves it the work. Raises
    StoreUnavailable if a query of somebody else holds a table for too long.
    """
    for name in PARTITIONED:
        in_transaction(engine, partial(_make_ahead, name=name, today=_day(now)))
        in_transaction(engine, partial(_drop_old, name=name, before=before))


def _make_ahead(connection: Connection, name: str, today: date) -> None:
    if not _has_turn(connection, name):
        return
    there = _days(connection, name)
    wanted = (today + timedelta(days=days) for days in range(DAYS_AHEAD + 1))
    missing = [day for day in wanted if day not in there]
    if missing:
        # Else a row could enter the table between the check and the end of the attachment.
        connection.execute(text(f"LOCK TABLE {name}_other_days IN ACCESS EXCLUSIVE MODE"))
    for day in missing:
        _make(connection, name, day)


def _make(connection: Connection, name: str, day: date) -> None:
    """Make a partition beside the table and attach it, for which nobody must stop writing."""
    start, new, at = _starts_at(day), f"{name}_{day:%Y%m%d}", PARTITIONED[name]
    first, end = start.isoformat(), (start + timedelta(days=1)).isoformat()
    for statement in (
        f"CREATE TABLE {new} (LIKE {name} INCLUDING DEFAULTS)",
        f"WITH moved AS (DELETE FROM {name}_other_days WHERE {at} >= '{first}' AND {at} < '{end}' "
        f"RETURNING *) INSERT INTO {new} SELECT * FROM moved",
        f"ALTER TABLE {name} ATTACH PARTITION {new} FOR VALUES FROM ('{first}') TO ('{end}')",
    ):
        connection.execute(text(statement))


def _drop_old(connection: Connection, name: str, before: float) -> None:
    if not _has_turn(connection, name):
        return
    for day, partition in _days(connection, name).items():
        if _starts_at(day).timestamp() + 86400 <= before:
            connection.execute(text(f"DROP TABLE {partition}"))
            _LOG.info("%s was dropped: all its rows were old", partition)


def _has_turn(connection: Connection, name: str) -> bool:
    connection.execute(_WAITS)
    return bool(connection.execute(_TAKE_TURN, {"lock": _LOCK, "table": name}).scalar_one())


def _days(connection: Connection, name: str) -> dict[date, str]:
    """The partitions of a table by their day."""
    found = connection.execute(_PARTITIONS, {"table": name}).scalars()
    named = ((each, each.rpartition("_")[2]) for each in found)
    return {
        datetime.strptime(word, "%Y%m%d").date(): each for each, word in named if word.isdecimal()
    }


def _day(at: float) -> date:
    return datetime.fromtimestamp(at, UTC).date()


def _starts_at(day: date) -> datetime:
    return datetime.combine(day, time(), UTC)
