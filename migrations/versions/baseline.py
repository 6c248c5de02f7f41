"""Creates all tables of the first release.

PostgreSQL partitions requests and samples by day, so that a day is dropped and not deleted. The
keys of a partitioned table include its time, so one span at two times would be two rows: see
`agent.store.publishing.postgres`. Both databases have all tables; only an agent's file has rows in
`publishing`, `deleted_requests` and `rollup_changes`, only a shared database in `published_files`.
"""

import logging
import secrets
from collections.abc import Iterable
from datetime import UTC, datetime, time, timedelta
from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy import Connection, text
from sqlalchemy.exc import ProgrammingError

revision = "first"
down_revision = None
branch_labels = None
depends_on = None

_LOG = logging.getLogger("agent.store.migrating")

# SQLite numbers rows itself only for an INTEGER primary key.
_ROW_NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_TIMESTAMP = sa.DateTime(timezone=True)

# The tables that PostgreSQL partitions, each with the column of its time.
_PARTITIONED = {"requests": "started_at", "engine_samples": "at", "gpu_samples": "at"}
_DAYS_AHEAD = 3

_TABLES = (
    *("requests", "engine_samples", "gpu_samples", "engine_minutes", "engine_counts", "events"),
    "objectives",
    *("agents", "publishing", "published_files", "deleted_requests"),
    *("rollup_series", "rollups", "cause_rollups", "rollup_changes"),
)

_ROLE = "goodput_reader"
_READABLE = ", ".join((*_TABLES, "alembic_version"))
_SCHEMA = text("SELECT quote_ident(current_schema())")
_EXISTS = text("SELECT count(*) FROM pg_roles WHERE rolname = :role")
# PostgreSQL, "Error Codes".
_INSUFFICIENT_PRIVILEGE = "42501"


def upgrade() -> None:
    """Create the tables; on PostgreSQL also the partitions of the next days and the reader role."""
    _create_requests()
    _create_samples()
    _create_minutes()
    _create_counts()
    _create_events_and_objectives()
    _create_agents()
    _create_publishing()
    _create_rollups()
    if _is_postgres():
        _grant_to_readers(op.get_bind())
        _create_partitions(op.get_bind())


def downgrade() -> None:
    """Drop all tables with their data. Other databases of the server may use the role."""
    for table in _TABLES:
        op.drop_table(table)
    connection = op.get_bind()
    if _is_postgres() and connection.scalar(_EXISTS, {"role": _ROLE}):
        schema = connection.scalar(_SCHEMA)
        op.execute(
            f"ALTER DEFAULT PRIVILEGES IN SCHEMA {schema} REVOKE SELECT ON TABLES FROM {_ROLE}"
        )


def _is_postgres() -> bool:
    return op.get_bind().dialect.name == "postgresql"


def _key(table: str, *columns: str) -> tuple[str, ...]:
    """The columns of a key; on PostgreSQL those of a partitioned table include its time."""
    return (*columns, _PARTITIONED[table]) if _is_postgres() else columns


def _by_day(table: str) -> dict[str, Any]:
    return {"postgresql_partition_by": f"RANGE ({_PARTITIONED[table]})"}


def _id() -> sa.Column[Any]:
    return sa.Column("id", _ROW_NUMBER, autoincrement=True, nullable=False)


def _columns(kind: Any, *names: str) -> Iterable[sa.Column[Any]]:
    """Columns of one type that may be null."""
    return (sa.Column(name, kind) for name in names)


def _required(kind: Any, *names: str) -> Iterable[sa.Column[Any]]:
    return (sa.Column(name, kind, nullable=False) for name in names)


def _changed() -> sa.Column[Any]:
    return sa.Column("changed", sa.BigInteger, nullable=False)


def _create_partial_index(
    name: str, table: str, columns: list[str], condition: str, *, unique: bool = False
) -> None:
    """Create an index of the rows that meet a condition."""
    op.create_index(
        name,
        table,
        columns,
        unique=unique,
        sqlite_where=text(condition),
        postgresql_where=text(condition),
    )


def _create_requests() -> None:
    span_key = _key("requests", "trace_id", "span_id")
    op.create_table(
        "requests",
        _id(),
        sa.Column("trace_id", sa.String(32), nullable=False),
        sa.Column("span_id", sa.String(16), nullable=False),
        *_required(sa.String(10), "vantage", "status"),
        *_required(_TIMESTAMP, "started_at", "ended_at", "received_at"),
        sa.Column("request_id", sa.String(256)),
        *_columns(sa.String(100), "agent", "engine"),
        *_columns(sa.String(256), "model", "service_name", "tenant", "route"),
        *_columns(sa.Float, "ttft_s", "tpot_s", "e2e_s", "queue_s", "prefill_s", "decode_s"),
        sa.Column("max_gap_s", sa.Float),
        *_columns(sa.BigInteger, "input_tokens", "cached_tokens"),
        *_columns(sa.BigInteger, "output_tokens", "reasoning_tokens"),
        sa.Column("finish_reason", sa.String(64)),
        sa.Column("http_status", sa.Integer),
        sa.Column("clock_skew_s", sa.Float),
        sa.Column("cause", sa.String(64)),
        sa.Column("cost_usd", sa.Float),
        *_columns(sa.String(16), "parent_span_id", "proxy_span_id"),
        sa.Column("preemptions", sa.Integer),
        sa.Column("hop", sa.Boolean),
        sa.Column("prefill_engine", sa.String(100)),
        *_columns(sa.Float, "prefill_hop_s", "prefill_queue_s", "prefill_gap_s"),
        sa.Column("router_wait_s", sa.Float),
        *_columns(sa.Float, "first_byte_s", "first_visible_s"),
        sa.Column("gaps", sa.Text),
        *_columns(sa.BigInteger, "gap_tokens", "input_bytes", "output_bytes"),
        sa.Column("error", sa.String(64)),
        sa.Column("choices", sa.BigInteger),
        sa.Column("streamed", sa.Boolean),
        *_columns(sa.Float, "ttft_limit_s", "tpot_limit_s"),
        *_columns(sa.String(256), "requested_model", "requested_tenant"),
        sa.Column("response_id", sa.String(320)),
        sa.Column("reasoning_s", sa.Float),
        *_columns(sa.BigInteger, "media_parts", "media_bytes"),
        sa.Column("priority", sa.Integer),
        *_columns(sa.String(256), "end_user", "workload", "session"),
        sa.Column("engine_request_id", sa.String(256)),
        sa.Column("engine_status", sa.String(10)),
        *_columns(sa.Float, "engine_ttft_s", "engine_tpot_s", "engine_e2e_s", "holdback_s"),
        sa.Column("verdict", sa.String(12), nullable=False),
        sa.Column("verdicts", sa.Text, nullable=False),
        sa.Column("settles_at", _TIMESTAMP),
        sa.Column("counted", sa.Boolean, nullable=False, server_default=sa.true()),
        *_columns(sa.Float, "prefill_flops", "prefill_kv_bytes"),
        *_columns(sa.Float, "decode_flops", "decode_kv_bytes"),
        sa.Column("priced_at", _TIMESTAMP),
        sa.Column("gpu_hours", sa.Float),
        sa.Column("explanation", sa.Text),
        sa.Column("explained_at", _TIMESTAMP),
        _changed(),
        sa.PrimaryKeyConstraint(*_key("requests", "id"), name="pk_requests"),
        sa.UniqueConstraint(*span_key, name="uq_requests_" + "_".join(span_key)),
        **_by_day("requests"),
    )
    _create_indexes_of_requests()


def _create_indexes_of_requests() -> None:
    sorted_by = ("ttft_s", "tpot_s", "e2e_s", "queue_s", "input_tokens", "output_tokens")
    columns = ["started_at", "id", *sorted_by, "verdict"]
    op.create_index("ix_requests_started_at_id", "requests", columns)
    op.create_index("ix_requests_ended_at", "requests", ["ended_at"])
    op.create_index("ix_requests_request_id", "requests", ["request_id"])
    proxy_key = _key("requests", "trace_id", "proxy_span_id")
    _create_partial_index(
        "uq_requests_" + "_".join(proxy_key),
        "requests",
        [*proxy_key],
        "proxy_span_id IS NOT NULL",
        unique=True,
    )
    for columns, condition in (
        (["trace_id", "parent_span_id"], "parent_span_id IS NOT NULL"),
        (["engine_request_id"], "engine_request_id IS NOT NULL"),
        (["response_id"], "response_id IS NOT NULL"),
        (["settles_at"], "settles_at IS NOT NULL"),
        (["session", "started_at"], "session IS NOT NULL"),
        (["started_at"], "session IS NOT NULL"),
        (["engine", "ended_at"], "priced_at IS NULL"),
        (["agent", "ended_at"], "verdict = 'missed' AND cause IS NULL"),
    ):
        _create_partial_index("ix_requests_" + "_".join(columns), "requests", columns, condition)


def _create_samples() -> None:
    op.create_table(
        "engine_samples",
        _id(),
        sa.Column("at", _TIMESTAMP, nullable=False),
        *_required(sa.String(100), "agent", "engine"),
        sa.Column("model", sa.String(256)),
        sa.Column("dialect", sa.String(32), nullable=False),
        sa.Column("facts", sa.Text, nullable=False),
        _changed(),
        sa.PrimaryKeyConstraint(*_key("engine_samples", "id"), name="pk_engine_samples"),
        **_by_day("engine_samples"),
    )
    op.create_index("ix_engine_samples_engine_at", "engine_samples", ["engine", "at"])
    op.create_index("ix_engine_samples_at", "engine_samples", ["at"], postgresql_using="brin")
    op.create_table(
        "gpu_samples",
        _id(),
        sa.Column("at", _TIMESTAMP, nullable=False),
        *_required(sa.String(100), "agent", "gpu"),
        sa.Column("gpu_index", sa.Integer, nullable=False),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("problem", sa.String(64)),
        sa.Column("facts", sa.Text, nullable=False),
        sa.Column("processes", sa.Text),
        sa.Column("mig_instances", sa.Text, nullable=False),
        _changed(),
        sa.PrimaryKeyConstraint(*_key("gpu_samples", "id"), name="pk_gpu_samples"),
        **_by_day("gpu_samples"),
    )
    op.create_index("ix_gpu_samples_gpu_at_id", "gpu_samples", ["gpu", "at", "id"])
    op.create_index("ix_gpu_samples_at", "gpu_samples", ["at"], postgresql_using="brin")


def _create_minutes() -> None:
    op.create_table(
        "engine_minutes",
        *_required(sa.String(100), "agent", "engine"),
        sa.Column("model", sa.String(256)),
        sa.Column("starts_at", sa.BigInteger, nullable=False),
        *_required(_TIMESTAMP, "from_at", "until"),
        sa.Column("gpus", sa.Integer),
        sa.Column("requests", sa.Integer, nullable=False),
        sa.Column("good_tokens", sa.Float, nullable=False),
        sa.Column("method", sa.String(10), nullable=False),
        *_required(sa.Float, "busy_s", "idle_s", "unknown_s"),
        *_required(sa.Float, "computed_tokens", "cached_tokens", "output_tokens"),
        *_required(sa.Float, "counted_output_tokens", "cache_full_s"),
        *_columns(sa.Float, "prefill_s", "prefill_flops", "prefill_bytes"),
        *_columns(sa.Float, "decode_s", "decode_flops", "decode_bytes", "shared_bytes"),
        *_columns(sa.Float, "preemptions", "draft_tokens", "accepted_draft_tokens", "drafts"),
        *_columns(sa.Float, "prefix_query_tokens", "prefix_hit_tokens"),
        *_columns(sa.Float, "running_request_s", "place_s"),
        *_columns(sa.Float, "limited_step_tokens", "step_room_tokens"),
        *_columns(sa.Float, "idle_usd", "unknown_usd", "unseen_usd", "aborted_usd"),
        *_columns(sa.Float, "aborted_prefill_usd", "computed_usd", "cached_usd", "decode_usd"),
        sa.Column("steps", sa.String(10)),
        *_columns(sa.Float, "peak_flops_per_s", "peak_bytes_per_s"),
        *_columns(sa.Float, "counters_mfu", "counters_mbu"),
        *_columns(sa.Float, "engine_mfu", "engine_mbu", "hardware_mfu", "hardware_mbu"),
        *_columns(sa.Float, "joules", "gpus_usd", "electricity_usd"),
        sa.Column("good_tokens_by_objective", sa.Text),
        sa.Column("disagreements", sa.Text, nullable=False),
        *_columns(sa.Float, "ledger_input_tokens", "ledger_output_tokens", "ledger_requests"),
        *_columns(sa.Float, "ledger_finished", "ledger_refused", "ledger_died"),
        *_columns(sa.Float, "ledger_row_input_tokens", "ledger_row_output_tokens"),
        *_columns(sa.Float, "ledger_row_requests", "ledger_row_finished", "ledger_row_refused"),
        sa.Column("ledger_rows_without_tokens", sa.Float),
        sa.Column("ledger_closed", sa.Boolean),
        sa.Column("unmatched", sa.Float),
        sa.Column("cache_full", sa.Boolean, nullable=False),
        _changed(),
        sa.PrimaryKeyConstraint("agent", "engine", "starts_at", name="pk_engine_minutes"),
    )
    op.create_index("ix_engine_minutes_starts_at", "engine_minutes", ["starts_at"])


def _create_counts() -> None:
    op.create_table(
        "engine_counts",
        *_required(sa.String(100), "agent", "engine"),
        sa.Column("width_s", sa.Integer, nullable=False),
        sa.Column("starts_at", sa.BigInteger, nullable=False),
        sa.Column("model", sa.String(256)),
        sa.Column("until", _TIMESTAMP, nullable=False),
        sa.Column("covered_s", sa.Float, nullable=False),
        *_required(sa.Text, "counters", "gauges", "histograms"),
        _changed(),
        sa.PrimaryKeyConstraint("agent", "engine", "width_s", "starts_at", name="pk_engine_counts"),
    )
    op.create_index("ix_engine_counts_width_s_starts_at", "engine_counts", ["width_s", "starts_at"])


def _create_events_and_objectives() -> None:
    op.create_table(
        "events",
        _id(),
        sa.Column("at", _TIMESTAMP, nullable=False),
        sa.Column("agent", sa.String(100), nullable=False),
        *_columns(sa.String(100), "engine", "gpu"),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("confidence", sa.String(10), nullable=False),
        sa.Column("evidence", sa.Text, nullable=False),
        _changed(),
        sa.PrimaryKeyConstraint("id", name="pk_events"),
    )
    op.create_index("ix_events_at_id", "events", ["at", "id"])
    op.create_table(
        "objectives",
        _id(),
        *_required(sa.String(100), "agent", "name"),
        sa.Column("definition", sa.Text, nullable=False),
        sa.Column("in_force_from", _TIMESTAMP, nullable=False),
        sa.Column("in_force_until", _TIMESTAMP),
        sa.Column("held_rates", sa.Text),
        sa.PrimaryKeyConstraint("id", name="pk_objectives"),
    )
    op.create_index("ix_objectives_agent_name", "objectives", ["agent", "name"])


def _create_agents() -> None:
    op.create_table(
        "agents",
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("instance", sa.String(320), nullable=False),
        sa.Column("beats", sa.BigInteger, nullable=False),
        sa.Column("version", sa.String(64)),
        sa.Column("simulated", sa.Boolean),
        *_columns(_TIMESTAMP, "started_at", "seen_at", "stopped_at"),
        sa.Column("waiting_rows", sa.BigInteger),
        sa.Column("lag_s", sa.Float),
        sa.Column("engines", sa.Text),
        sa.PrimaryKeyConstraint("name", name="pk_agents"),
    )


def _create_publishing() -> None:
    publishing = op.create_table(
        "publishing",
        sa.Column("file", sa.String(32), nullable=False),
        *_required(sa.BigInteger, "last", "published"),
        sa.Column("complete_at", _TIMESTAMP, nullable=False),
        sa.Column("last_at_start", sa.BigInteger),
        sa.PrimaryKeyConstraint("file", name="pk_publishing"),
    )
    if not _is_postgres():
        row = {"file": secrets.token_hex(16), "last": 0, "published": 0}
        op.bulk_insert(publishing, [row | {"complete_at": datetime.now(UTC)}])
    op.create_table(
        "published_files",
        sa.Column("agent", sa.String(100), nullable=False),
        sa.Column("file", sa.String(32), nullable=False),
        sa.Column("last", sa.BigInteger, nullable=False),
        sa.Column("at", _TIMESTAMP, nullable=False),
        sa.PrimaryKeyConstraint("agent", "file", name="pk_published_files"),
    )
    op.create_table(
        "deleted_requests",
        _id(),
        sa.Column("trace_id", sa.String(32), nullable=False),
        sa.Column("span_id", sa.String(16), nullable=False),
        sa.Column("started_at", _TIMESTAMP, nullable=False),
        _changed(),
        sa.PrimaryKeyConstraint("id", name="pk_deleted_requests"),
    )


def _series() -> Iterable[sa.Column[Any]]:
    yield from _required(sa.String(100), "agent", "engine")
    yield from _required(sa.String(256), "model", "tenant")
    yield sa.Column("input_length", sa.String(8), nullable=False)
    yield sa.Column("judged_by", sa.Text, nullable=False)


def _figures() -> Iterable[sa.Column[Any]]:
    yield sa.Column("counts", sa.LargeBinary, nullable=False)
    yield from _columns(sa.LargeBinary, "ttft_s", "tpot_s", "e2e_s", "queue_s")


def _place_of_rollup() -> Iterable[sa.Column[Any]]:
    for name, kind in (
        ("width_s", sa.Integer()),
        ("series", sa.BigInteger()),
        ("starts_at", sa.BigInteger()),
    ):
        yield sa.Column(name, kind, autoincrement=False, nullable=False)


def _create_rollups() -> None:
    series_key = [column.name for column in _series()]
    op.create_table(
        "rollup_series",
        _id(),
        *_series(),
        sa.Column("file", sa.String(32), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_rollup_series"),
        sa.UniqueConstraint(*series_key, "file", name="uq_rollup_series_key"),
    )
    op.create_table(
        "rollups",
        *_place_of_rollup(),
        *_figures(),
        _changed(),
        sa.PrimaryKeyConstraint("width_s", "series", "starts_at", name="pk_rollups"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "cause_rollups",
        *_place_of_rollup(),
        sa.Column("objective", sa.String(100), nullable=False),
        sa.Column("limit_name", sa.String(16), nullable=False),
        sa.Column("cause", sa.String(64), nullable=False),
        *_required(sa.BigInteger, "requests", "top_requests"),
        sa.Column("excess_s", sa.Float),
        _changed(),
        sa.PrimaryKeyConstraint(
            *("width_s", "series", "starts_at", "objective", "limit_name", "cause"),
            name="pk_cause_rollups",
        ),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "rollup_changes",
        _id(),
        sa.Column("starts_at", sa.BigInteger, nullable=False),
        *_series(),
        sa.Column("gone", sa.Boolean, nullable=False),
        *_figures(),
        sa.PrimaryKeyConstraint("id", name="pk_rollup_changes"),
    )


def _create_partitions(connection: Connection) -> None:
    """Create a partition for each of the next days, and one for the rows of all other days."""
    today = connection.execute(text("SELECT (now() AT TIME ZONE 'UTC')::date")).scalar_one()
    midnight = datetime.combine(today, time(), UTC)
    starts = [midnight + timedelta(days=days) for days in range(_DAYS_AHEAD + 1)]
    for table in _PARTITIONED:
        op.execute(f"CREATE TABLE {table}_other_days PARTITION OF {table} DEFAULT")
        for start in starts:
            connection.exec_driver_sql(
                f"CREATE TABLE {table}_{start:%Y%m%d} PARTITION OF {table} "
                f"FOR VALUES FROM ('{start.isoformat()}') "
                f"TO ('{(start + timedelta(days=1)).isoformat()}')"
            )


def _grant_to_readers(connection: Connection) -> None:
    """Grant every table to a role for Grafana, which the database's user may have to make first."""
    schema = connection.scalar(_SCHEMA)
    grants = (
        f"GRANT USAGE ON SCHEMA {schema} TO {_ROLE}",
        f"GRANT SELECT ON {_READABLE} TO {_ROLE}",
        # Also to the tables that this user creates later, as partitions.
        f"ALTER DEFAULT PRIVILEGES IN SCHEMA {schema} GRANT SELECT ON TABLES TO {_ROLE}",
    )
    if _has_role(connection):
        for grant in grants:
            connection.execute(text(grant))
    else:
        _LOG.warning(
            "the database's user may create no roles, so there is no role %s for Grafana; "
            "whoever may runs CREATE ROLE %s; then this user runs %s",
            *(_ROLE, _ROLE, "; ".join(grants)),
        )


def _has_role(connection: Connection) -> bool:
    """Create the role if it is absent. All databases of a server have the same roles."""
    if connection.scalar(_EXISTS, {"role": _ROLE}):
        return True
    try:
        with connection.begin_nested():
            connection.execute(text(f"CREATE ROLE {_ROLE} NOLOGIN"))
    except ProgrammingError as error:
        if getattr(error.orig, "sqlstate", None) == _INSUFFICIENT_PRIVILEGE:
            return False
        # Another database of the server made it at this moment.
        if not connection.scalar(_EXISTS, {"role": _ROLE}):
            raise
    return True
