"""The tables as this version expects them; migrations create and change them."""

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    UniqueConstraint,
    select,
    text,
    true,
)

from agent.store.columns import minute_columns, record_columns
from agent.store.utc_timestamp import UtcTimestamp

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)


# SQLite numbers rows itself only for an INTEGER primary key.
_RowNumber = BigInteger().with_variant(Integer, "sqlite")


# The one row of an agent's file. `last` is the number of its newest transaction, which each writing
# transaction raises first (agent.store.sqlite_connection). The shared database has all rows up to
# the number `published`; `complete_at` is when it last had everything (agent.store.publishing).
# `last_at_start` is what `last` was at the agent's start, until it has reached the shared database.
publishing = Table(
    "publishing",
    metadata,
    Column("file", String(32), primary_key=True),
    Column("last", BigInteger, nullable=False),
    Column("published", BigInteger, nullable=False),
    Column("complete_at", UtcTimestamp, nullable=False),
    Column("last_at_start", BigInteger),
)
# For statements that SQLAlchemy does not make.
CHANGED = "(SELECT last FROM publishing)"
_CHANGED = select(publishing.c.last).scalar_subquery()


def _changed() -> Column[Any]:
    """The number of the transaction that last changed the row."""
    return Column("changed", BigInteger, nullable=False, default=_CHANGED, onupdate=_CHANGED)


def _where_known(column: str) -> dict[str, Any]:
    """Options of an index without the rows that have no value; most rows have none."""
    condition = text(f"{column} IS NOT NULL")
    return {"sqlite_where": condition, "postgresql_where": condition}


# Both databases use the index on these rows only for a query with the same words.
UNEXPLAINED = "verdict = 'missed' AND cause IS NULL"

# `priced_at` is when the request got its share of all minutes that it ran in.
#
# On PostgreSQL, which partitions by `started_at`, its unique keys have that column as well.
#
# A row with `settles_at` waits for the other view of its request and is not counted yet, or it is
# counted and its verdict is not final. A row that neither waits nor is counted is a part of the
# request of another row.
#
# `cause` and `explanation` of a missed request are set together. `explained_at` is when that was
# first: it stays when a join takes them away.
requests = Table(
    "requests",
    metadata,
    Column("id", _RowNumber, primary_key=True),
    *record_columns(),
    Column("verdict", String(12), nullable=False),
    Column("verdicts", Text, nullable=False),
    Column("settles_at", UtcTimestamp),
    Column("counted", Boolean, nullable=False, server_default=true()),
    Column("prefill_flops", Float),
    Column("prefill_kv_bytes", Float),
    Column("decode_flops", Float),
    Column("decode_kv_bytes", Float),
    Column("priced_at", UtcTimestamp),
    Column("gpu_hours", Float),
    Column("explanation", Text),
    Column("explained_at", UtcTimestamp),
    _changed(),
    UniqueConstraint("trace_id", "span_id"),
    # A list of days that is sorted by one of these reads the index alone, not every row.
    Index(
        "ix_requests_started_at_id",
        *("started_at", "id", "ttft_s", "tpot_s", "e2e_s", "queue_s"),
        *("input_tokens", "output_tokens", "verdict"),
    ),
    Index("ix_requests_ended_at", "ended_at"),
    Index(
        "ix_requests_engine_ended_at",
        "engine",
        "ended_at",
        sqlite_where=text("priced_at IS NULL"),
        postgresql_where=text("priced_at IS NULL"),
    ),
    Index("ix_requests_request_id", "request_id"),
    Index(
        "uq_requests_trace_id_proxy_span_id",
        "trace_id",
        "proxy_span_id",
        unique=True,
        **_where_known("proxy_span_id"),
    ),
    Index(
        "ix_requests_trace_id_parent_span_id",
        "trace_id",
        "parent_span_id",
        **_where_known("parent_span_id"),
    ),
    Index(
        "ix_requests_engine_request_id", "engine_request_id", **_where_known("engine_request_id")
    ),
    Index("ix_requests_response_id", "response_id", **_where_known("response_id")),
    Index("ix_requests_settles_at", "settles_at", **_where_known("settles_at")),
    # Both databases use an index without the unknown for a query that says so.
    Index("ix_requests_session_started_at", "session", "started_at", **_where_known("session")),
    Index("ix_requests_started_at", "started_at", **_where_known("session")),
    Index(
        "ix_requests_agent_ended_at",
        "agent",
        "ended_at",
        sqlite_where=text(UNEXPLAINED),
        postgresql_where=text(UNEXPLAINED),
    ),
)

engine_samples = Table(
    "engine_samples",
    metadata,
    Column("id", _RowNumber, primary_key=True),
    Column("at", UtcTimestamp, nullable=False),
    Column("agent", String(100), nullable=False),
    Column("engine", String(100), nullable=False),
    Column("model", String(256)),
    Column("dialect", String(32), nullable=False),
    Column("facts", Text, nullable=False),
    _changed(),
    Index("ix_engine_samples_engine_at", "engine", "at"),
    Index("ix_engine_samples_at", "at", postgresql_using="brin"),
)

gpu_samples = Table(
    "gpu_samples",
    metadata,
    Column("id", _RowNumber, primary_key=True),
    Column("at", UtcTimestamp, nullable=False),
    Column("agent", String(100), nullable=False),
    Column("gpu", String(100), nullable=False),
    Column("gpu_index", Integer, nullable=False),
    Column("name", String(100), nullable=False),
    Column("problem", String(64)),
    Column("facts", Text, nullable=False),
    Column("processes", Text),
    Column("mig_instances", Text, nullable=False),
    _changed(),
    Index("ix_gpu_samples_gpu_at_id", "gpu", "at", "id"),
    Index("ix_gpu_samples_at", "at", postgresql_using="brin"),
)


engine_minutes = Table(
    "engine_minutes",
    metadata,
    Column("agent", String(100), nullable=False),
    *minute_columns(),
    Column("cache_full", Boolean, nullable=False),
    _changed(),
    PrimaryKeyConstraint("agent", "engine", "starts_at"),
    Index("ix_engine_minutes_starts_at", "starts_at"),
)

# A row of each width is written anew at every poll: it has what came since the width began.
engine_counts = Table(
    "engine_counts",
    metadata,
    Column("agent", String(100), nullable=False),
    Column("engine", String(100), nullable=False),
    Column("width_s", Integer, nullable=False),
    Column("starts_at", BigInteger, nullable=False),
    Column("model", String(256)),
    Column("until", UtcTimestamp, nullable=False),
    Column("covered_s", Float, nullable=False),
    Column("counters", Text, nullable=False),
    Column("gauges", Text, nullable=False),
    Column("histograms", Text, nullable=False),
    _changed(),
    PrimaryKeyConstraint("agent", "engine", "width_s", "starts_at"),
    Index("ix_engine_counts_width_s_starts_at", "width_s", "starts_at"),
)

events = Table(
    "events",
    metadata,
    Column("id", _RowNumber, primary_key=True),
    Column("at", UtcTimestamp, nullable=False),
    Column("agent", String(100), nullable=False),
    Column("engine", String(100)),
    Column("gpu", String(100)),
    Column("kind", String(32), nullable=False),
    Column("confidence", String(10), nullable=False),
    Column("evidence", Text, nullable=False),
    _changed(),
    Index("ix_events_at_id", "at", "id"),
)

# `held_rates` is kept in the agent's own file: a HeldRates of the objective alone.
objectives = Table(
    "objectives",
    metadata,
    Column("id", _RowNumber, primary_key=True),
    Column("agent", String(100), nullable=False),
    Column("name", String(100), nullable=False),
    Column("definition", Text, nullable=False),
    Column("in_force_from", UtcTimestamp, nullable=False),
    Column("in_force_until", UtcTimestamp),
    Column("held_rates", Text),
    Index("ix_objectives_agent_name", "agent", "name"),
)


# Agents by their names: see agent.store.claim. `seen_at` and `stopped_at` are of the database's
# clock, because agents' clocks may differ.
agents = Table(
    "agents",
    metadata,
    Column("name", String(100), primary_key=True),
    Column("instance", String(320), nullable=False),
    Column("beats", BigInteger, nullable=False),
    Column("version", String(64)),
    Column("simulated", Boolean),
    Column("started_at", UtcTimestamp),
    Column("seen_at", UtcTimestamp),
    Column("stopped_at", UtcTimestamp),
    Column("waiting_rows", BigInteger),
    Column("lag_s", Float),
    Column("engines", Text),
)

# In a shared database: up to which number it has the rows of each agent's file.
published_files = Table(
    "published_files",
    metadata,
    Column("agent", String(100), nullable=False),
    Column("file", String(32), nullable=False),
    Column("last", BigInteger, nullable=False),
    Column("at", UtcTimestamp, nullable=False),
    PrimaryKeyConstraint("agent", "file"),
)

# Requests that were deleted, or moved to another start, after they were counted: the shared
# database may have them.
deleted_requests = Table(
    "deleted_requests",
    metadata,
    Column("id", _RowNumber, primary_key=True),
    Column("trace_id", String(32), nullable=False),
    Column("span_id", String(16), nullable=False),
    Column("started_at", UtcTimestamp, nullable=False),
    _changed(),
)


def _shared() -> list[Column[Any]]:
    """What the requests of a series have in common; unknown is '', so that it can be key.

    `judged_by` is a JSON list of the names of the objectives that judged them.
    """
    return [
        Column("agent", String(100), nullable=False),
        Column("engine", String(100), nullable=False),
        Column("model", String(256), nullable=False),
        Column("tenant", String(256), nullable=False),
        Column("input_length", String(8), nullable=False),
        Column("judged_by", Text, nullable=False),
    ]


def _figures() -> list[Column[Any]]:
    """Counts and bins as `agent.store.vectors` encodes them; None where a latency is unknown."""
    return [
        Column("counts", LargeBinary, nullable=False),
        Column("ttft_s", LargeBinary),
        Column("tpot_s", LargeBinary),
        Column("e2e_s", LargeBinary),
        Column("queue_s", LargeBinary),
    ]


# Sums of requests by the time they ended. `input_length` is '*' for all lengths together. `file` is
# '' in the file itself. In a shared database a file that was lost and its successor have series of
# their own, whose sums add up.
rollup_series = Table(
    "rollup_series",
    metadata,
    Column("id", _RowNumber, primary_key=True),
    *_shared(),
    Column("file", String(32), nullable=False, default=""),
    UniqueConstraint(
        *("agent", "engine", "model", "tenant", "input_length", "judged_by", "file"),
        name="uq_rollup_series_key",
    ),
)

rollups = Table(
    "rollups",
    metadata,
    Column("width_s", Integer, primary_key=True, autoincrement=False),
    Column("series", BigInteger, primary_key=True, autoincrement=False),
    Column("starts_at", BigInteger, primary_key=True, autoincrement=False),
    *_figures(),
    _changed(),
    # Else SQLite keeps the key twice, and most rollups are hardly longer than their key.
    sqlite_with_rowid=False,
)

# Sums of missed requests by the cause of their excess over a limit of an objective; '' is the one
# of its objectives that a request exceeded most. `requests` have a share of the cause, and of
# `top_requests` it is the first cause. Without any known seconds `excess_s` is null.
cause_rollups = Table(
    "cause_rollups",
    metadata,
    Column("width_s", Integer, primary_key=True, autoincrement=False),
    Column("series", BigInteger, primary_key=True, autoincrement=False),
    Column("starts_at", BigInteger, primary_key=True, autoincrement=False),
    Column("objective", String(100), primary_key=True),
    Column("limit_name", String(16), primary_key=True),
    Column("cause", String(64), primary_key=True),
    Column("requests", BigInteger, nullable=False),
    Column("top_requests", BigInteger, nullable=False),
    Column("excess_s", Float),
    _changed(),
    sqlite_with_rowid=False,
)

# What commits added to the counts, or with `gone` subtracted, and no rollup holds yet.
rollup_changes = Table(
    "rollup_changes",
    metadata,
    Column("id", _RowNumber, primary_key=True),
    Column("starts_at", BigInteger, nullable=False),
    *_shared(),
    Column("gone", Boolean, nullable=False),
    *_figures(),
)
