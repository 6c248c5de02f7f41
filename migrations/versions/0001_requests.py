"""Creates requests, engine samples, events, objectives and rollups."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_row_number = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_moment = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Create the first tables."""
    _make_requests()
    _make_engine_samples()
    _make_events()
    _make_objectives()
    _make_rollups()


def _make_requests() -> None:
    op.create_table(
        "requests",
        sa.Column("id", _row_number, nullable=False),
        sa.Column("trace_id", sa.String(32), nullable=False),
        sa.Column("span_id", sa.String(16), nullable=False),
        sa.Column("request_id", sa.String(256)),
        sa.Column("agent", sa.String(100)),
        sa.Column("engine", sa.String(100)),
        sa.Column("model", sa.String(256)),
        sa.Column("service_name", sa.String(256)),
        sa.Column("tenant", sa.String(256)),
        sa.Column("route", sa.String(256)),
        sa.Column("vantage", sa.String(10), nullable=False),
        sa.Column("status", sa.String(10), nullable=False),
        sa.Column("started_at", _moment, nullable=False),
        sa.Column("ended_at", _moment, nullable=False),
        sa.Column("received_at", _moment, nullable=False),
        sa.Column("clock_skew_s", sa.Float),
        sa.Column("ttft_s", sa.Float),
        sa.Column("tpot_s", sa.Float),
        sa.Column("e2e_s", sa.Float),
        sa.Column("queue_s", sa.Float),
        sa.Column("prefill_s", sa.Float),
        sa.Column("decode_s", sa.Float),
        sa.Column("max_gap_s", sa.Float),
        sa.Column("input_tokens", sa.BigInteger),
        sa.Column("cached_tokens", sa.BigInteger),
        sa.Column("output_tokens", sa.BigInteger),
        sa.Column("reasoning_tokens", sa.BigInteger),
        sa.Column("finish_reason", sa.String(64)),
        sa.Column("http_status", sa.Integer),
        sa.Column("verdict", sa.String(12), nullable=False),
        sa.Column("verdicts", sa.Text, nullable=False),
        sa.Column("cause", sa.String(64)),
        sa.Column("cost_usd", sa.Float),
        sa.PrimaryKeyConstraint("id", name="pk_requests"),
        sa.UniqueConstraint("trace_id", "span_id", name="uq_requests_trace_id_span_id"),
    )
    op.create_index("ix_requests_started_at_id", "requests", ["started_at", "id"])
    op.create_index("ix_requests_request_id", "requests", ["request_id"])


def _make_engine_samples() -> None:
    op.create_table(
        "engine_samples",
        sa.Column("id", _row_number, nullable=False),
        sa.Column("at", _moment, nullable=False),
        sa.Column("agent", sa.String(100), nullable=False),
        sa.Column("engine", sa.String(100), nullable=False),
        sa.Column("model", sa.String(256)),
        sa.Column("dialect", sa.String(32), nullable=False),
        sa.Column("facts", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_engine_samples"),
    )
    op.create_index("ix_engine_samples_engine_at", "engine_samples", ["engine", "at"])
    op.create_index("ix_engine_samples_at", "engine_samples", ["at"])


def _make_events() -> None:
    op.create_table(
        "events",
        sa.Column("id", _row_number, nullable=False),
        sa.Column("at", _moment, nullable=False),
        sa.Column("agent", sa.String(100), nullable=False),
        sa.Column("engine", sa.String(100)),
        sa.Column("gpu", sa.String(100)),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("confidence", sa.String(10), nullable=False),
        sa.Column("evidence", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_events"),
    )
    op.create_index("ix_events_at_id", "events", ["at", "id"])


def _make_objectives() -> None:
    op.create_table(
        "objectives",
        sa.Column("id", _row_number, nullable=False),
        sa.Column("agent", sa.String(100), nullable=False),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("definition", sa.Text, nullable=False),
        sa.Column("in_force_from", _moment, nullable=False),
        sa.Column("in_force_until", _moment),
        sa.PrimaryKeyConstraint("id", name="pk_objectives"),
    )
    op.create_index("ix_objectives_agent_name", "objectives", ["agent", "name"])


def _make_rollups() -> None:
    key = ("width_s", "starts_at", "agent", "engine", "model", "tenant", "objectives")
    op.create_table(
        "rollups",
        sa.Column("width_s", sa.Integer, nullable=False),
        sa.Column("starts_at", sa.BigInteger, nullable=False),
        sa.Column("agent", sa.String(100), nullable=False),
        sa.Column("engine", sa.String(100), nullable=False),
        sa.Column("model", sa.String(256), nullable=False),
        sa.Column("tenant", sa.String(256), nullable=False),
        sa.Column("objectives", sa.String(1000), nullable=False),
        sa.Column("tally", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint(*key, name="pk_rollups"),
    )


def downgrade() -> None:
    """Drop all tables with their data."""
    for table in ("rollups", "objectives", "events", "engine_samples", "requests"):
        op.drop_table(table)
