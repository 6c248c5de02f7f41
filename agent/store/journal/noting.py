"""Triggers that note every change of a journal's rows, whichever code makes the change.

A note has a number and names a row. The forwarder sends the row as it is when it reads the note.
Rollups and sums of causes are added to rows that are there, so the journal keeps their differences
until these are forwarded.
"""

import secrets
from typing import NamedTuple

from sqlalchemy import Connection, text
from sqlalchemy.dialects import sqlite
from sqlalchemy.schema import CreateColumn

from agent.store.cause_rollups import SUMS
from agent.store.rollups import Series
from agent.store.tables import rollup_changes

# The tables of notes and of differences that wait to be forwarded.
ROLLUP_DIFFERENCES = "journal_rollups"
CAUSE_DIFFERENCES = "journal_causes"

ROLLUP_COLUMNS = tuple(column.name for column in rollup_changes.c if column.name != "id")
CAUSE_PLACE = ("width_s", "starts_at", "objective", "limit_name", "cause")
CAUSE_COLUMNS = (*CAUSE_PLACE, *Series._fields, *SUMS)

_SERIES = ", ".join(Series._fields)


def _declared() -> str:
    dialect = sqlite.dialect()
    columns = (column for column in rollup_changes.c if column.name != "id")
    return ", ".join(str(CreateColumn(column).compile(dialect=dialect)) for column in columns)


_TABLES = (
    # AUTOINCREMENT gives no number twice: the forwarder skips notes up to the last forwarded one.
    "CREATE TABLE IF NOT EXISTS journal_notes (number INTEGER PRIMARY KEY AUTOINCREMENT, "
    "of_table TEXT NOT NULL, fresh INTEGER NOT NULL, row INTEGER, trace_id TEXT, span_id TEXT, "
    "started_at TEXT, at INTEGER NOT NULL DEFAULT (CAST(strftime('%s', 'now') AS INTEGER)))",
    "CREATE TABLE IF NOT EXISTS journal_runs (first INTEGER PRIMARY KEY, id TEXT NOT NULL)",
    # The last batch whose differences were sent to ClickHouse, acknowledged or not: see
    # agent.store.clickhouse.destination.
    "CREATE TABLE IF NOT EXISTS journal_sent (one INTEGER PRIMARY KEY, run TEXT NOT NULL, "
    "last INTEGER NOT NULL, at REAL NOT NULL, version INTEGER NOT NULL)",
    "CREATE TABLE IF NOT EXISTS journal_state (expiring INTEGER NOT NULL)",
    "INSERT INTO journal_state SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM journal_state)",
    f"CREATE TABLE IF NOT EXISTS {ROLLUP_DIFFERENCES} "
    f"(id INTEGER PRIMARY KEY AUTOINCREMENT, {_declared()})",
    f"CREATE TABLE IF NOT EXISTS {CAUSE_DIFFERENCES} "
    f"(id INTEGER PRIMARY KEY AUTOINCREMENT, {', '.join(CAUSE_COLUMNS)})",
)


class _Trigger(NamedTuple):
    """A trigger of SQLite: its name, the change that fires it, and the statement that it runs."""

    name: str
    after: str
    does: str


def _noted(table: str, change: str, condition: str = "") -> _Trigger:
    fresh = int(change == "INSERT")
    note = (
        f"INSERT INTO journal_notes (of_table, fresh, row) VALUES ('{table}', {fresh}, NEW.rowid)"
    )
    when = f" {condition}" if condition else ""
    return _Trigger(f"{table}_{change.lower()}", f"{change} ON {table}{when}", note)


# A view that waits for another view is not forwarded before it is settled.
_SETTLED = "WHEN NEW.settles_at IS NULL"


def _cause_difference(change: str, sums: str) -> _Trigger:
    place = ", ".join(f"NEW.{name}" for name in CAUSE_PLACE)
    return _Trigger(
        f"cause_rollups_{change.lower()}",
        f"{change} ON cause_rollups",
        f"INSERT INTO {CAUSE_DIFFERENCES} ({', '.join(CAUSE_COLUMNS)}) "
        f"SELECT {place}, {_SERIES}, {sums} FROM rollup_series WHERE id = NEW.series",
    )


_EXCESS = (
    "CASE WHEN NEW.excess_s IS NULL THEN NULL ELSE NEW.excess_s - coalesce(OLD.excess_s, 0) END"
)

_GONE = (
    "INSERT INTO journal_notes (of_table, fresh, trace_id, span_id, started_at) "
    "VALUES ('requests', 0, OLD.trace_id, OLD.span_id, OLD.started_at)"
)

_TRIGGERS = (
    _noted("requests", "INSERT", _SETTLED),
    _noted("requests", "UPDATE", _SETTLED),
    # Rows that expire stay in the shared database, which has a retention of its own.
    _Trigger(
        "requests_delete",
        "DELETE ON requests WHEN OLD.settles_at IS NULL "
        "AND NOT (SELECT expiring FROM journal_state)",
        _GONE,
    ),
    # The start of a request is a part of its key in the shared database, so the row under the
    # earlier start must be deleted there.
    _Trigger(
        "requests_move",
        "UPDATE ON requests WHEN OLD.settles_at IS NULL AND OLD.started_at <> NEW.started_at",
        _GONE,
    ),
    *(_noted(name, "INSERT") for name in ("engine_samples", "gpu_samples", "events")),
    _noted("engine_windows", "INSERT"),
    _noted("engine_windows", "UPDATE"),
    _noted(ROLLUP_DIFFERENCES, "INSERT"),
    _noted(CAUSE_DIFFERENCES, "INSERT"),
    _Trigger(
        "rollup_changes_insert",
        "INSERT ON rollup_changes",
        f"INSERT INTO {ROLLUP_DIFFERENCES} ({', '.join(ROLLUP_COLUMNS)}) "
        f"VALUES ({', '.join(f'NEW.{name}' for name in ROLLUP_COLUMNS)})",
    ),
    _cause_difference("INSERT", ", ".join(f"NEW.{name}" for name in SUMS)),
    _cause_difference(
        "UPDATE",
        f"NEW.requests - OLD.requests, NEW.top_requests - OLD.top_requests, {_EXCESS}",
    ),
)


def begin_run(connection: Connection) -> str:
    """Make the tables and triggers, and begin a run of the agent; returns the run's id.

    The shared database keeps the last number of each run that it has. A file that was restored
    from a backup gives numbers again, but in a run of its own.
    """
    for statement in _TABLES:
        connection.execute(text(statement))
    for name, after, does in _TRIGGERS:
        # The file may have a trigger of another release.
        connection.execute(text(f"DROP TRIGGER IF EXISTS journal_{name}"))
        connection.execute(text(f"CREATE TRIGGER journal_{name} AFTER {after} BEGIN {does}; END"))
    run = secrets.token_hex(16)
    connection.execute(
        text(
            "INSERT OR REPLACE INTO journal_runs (first, id) VALUES (1 + coalesce("
            "(SELECT seq FROM sqlite_sequence WHERE name = 'journal_notes'), 0), :run)"
        ),
        {"run": run},
    )
    return run
