"""Partitions PostgreSQL's requests and samples by day, so that a day is dropped and not deleted.

The key of a partitioned table includes the time, so that one span at two times would be two rows:
see `agent.store.inserting` and `agent.store.journal.shared_rows`.
"""

from collections.abc import Iterable
from datetime import UTC, date, datetime, time, timedelta

import sqlalchemy as sa
from alembic import op
from sqlalchemy import Connection, text

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

# Each table with the column of its time.
_TABLES = {
    "requests": "started_at",
    "engine_samples": "at",
    "gpu_samples": "at",
}
# The unique keys of requests, without and with the time.
_KEYS = (
    ("uq_requests_trace_id_span_id", "uq_requests_trace_id_proxy_span_id", ()),
    (
        "uq_requests_trace_id_span_id_started_at",
        "uq_requests_trace_id_proxy_span_id_started_at",
        ("started_at",),
    ),
)
_BLOCK_RANGES = {"engine_samples": "ix_engine_samples_at", "gpu_samples": "ix_gpu_samples_at"}
_DAYS_AHEAD = 3
# Rows of a wrong clock make no partitions.
_DAYS_BACK = 400


def upgrade() -> None:
    """Copy the rows of each table into partitions."""
    connection = op.get_bind()
    if connection.dialect.name != "postgresql":
        return
    for table, column in _TABLES.items():
        indexes = _indexes_taken(connection, table)
        connection.execute(text(f"ALTER TABLE {table} RENAME TO {table}_whole"))
        connection.execute(
            text(
                f"CREATE TABLE {table} (LIKE {table}_whole INCLUDING DEFAULTS) "
                f"PARTITION BY RANGE ({column})"
            )
        )
        _make_partitions(connection, table, column)
        _replace_whole(connection, table)
        op.create_primary_key(f"pk_{table}", table, ["id", column])
        _make_indexes(connection, table, indexes)
    _make_keys(*_KEYS[1])


def downgrade() -> None:
    """Copy the rows of each table back into one."""
    connection = op.get_bind()
    if connection.dialect.name != "postgresql":
        return
    for table in _TABLES:
        indexes = _indexes_taken(connection, table)
        connection.execute(text(f"ALTER TABLE {table} RENAME TO {table}_whole"))
        connection.execute(text(f"CREATE TABLE {table} (LIKE {table}_whole INCLUDING DEFAULTS)"))
        _replace_whole(connection, table)
        op.create_primary_key(f"pk_{table}", table, ["id"])
        _make_indexes(connection, table, indexes, back=True)
    _make_keys(*_KEYS[0])


def _indexes_taken(connection: Connection, table: str) -> list[str]:
    """Take the indexes and keys from a table; returns statements that make the plain indexes."""
    found = connection.execute(
        text(
            "SELECT indexname, indexdef FROM pg_indexes "
            "WHERE schemaname = current_schema() AND tablename = :table ORDER BY indexname"
        ),
        {"table": table},
    ).all()
    constraints = {f"pk_{table}", *(span for span, _, _ in _KEYS)}
    for name, _ in found:
        if name in constraints:
            connection.execute(text(f"ALTER TABLE {table} DROP CONSTRAINT {name}"))
        else:
            connection.execute(text(f"DROP INDEX {name}"))
    keys = {*constraints, *(proxy_span for _, proxy_span, _ in _KEYS)}
    return [
        definition.replace(" ON ONLY ", " ON ") for name, definition in found if name not in keys
    ]


def _make_partitions(connection: Connection, table: str, column: str) -> None:
    connection.execute(text(f"CREATE TABLE {table}_other_days PARTITION OF {table} DEFAULT"))
    today = connection.execute(text("SELECT (now() AT TIME ZONE 'UTC')::date")).scalar_one()
    stored = connection.execute(
        text(f"SELECT DISTINCT ({column} AT TIME ZONE 'UTC')::date FROM {table}_whole")
    ).scalars()
    for day in sorted({*_known(stored, today), *_ahead(today)}):
        start = datetime.combine(day, time(), UTC)
        connection.execute(
            text(
                f"CREATE TABLE {table}_{day:%Y%m%d} PARTITION OF {table} "
                f"FOR VALUES FROM ('{start.isoformat()}') "
                f"TO ('{(start + timedelta(days=1)).isoformat()}')"
            )
        )


def _known(days: Iterable[date], today: date) -> Iterable[date]:
    earliest, latest = today - timedelta(days=_DAYS_BACK), today + timedelta(days=_DAYS_AHEAD)
    return (day for day in days if earliest <= day <= latest)


def _ahead(today: date) -> Iterable[date]:
    return (today + timedelta(days=days) for days in range(_DAYS_AHEAD + 1))


def _replace_whole(connection: Connection, table: str) -> None:
    """Copy the rows of the former table, let the new one number its rows, and drop the former."""
    connection.execute(text(f"INSERT INTO {table} SELECT * FROM {table}_whole"))
    connection.execute(text(f"ALTER SEQUENCE {table}_id_seq OWNED BY {table}.id"))
    connection.execute(text(f"DROP TABLE {table}_whole"))


def _make_indexes(
    connection: Connection, table: str, definitions: Iterable[str], *, back: bool = False
) -> None:
    of_time = _BLOCK_RANGES.get(table)
    for definition in definitions:
        if of_time is None or f" {of_time} " not in definition:
            connection.execute(text(definition))
    if of_time is not None:
        op.create_index(of_time, table, ["at"], postgresql_using="btree" if back else "brin")


def _make_keys(span: str, proxy_span: str, more: tuple[str, ...]) -> None:
    op.create_unique_constraint(span, "requests", ["trace_id", "span_id", *more])
    op.create_index(
        proxy_span,
        "requests",
        ["trace_id", "proxy_span_id", *more],
        unique=True,
        postgresql_where=sa.text("proxy_span_id IS NOT NULL"),
    )
