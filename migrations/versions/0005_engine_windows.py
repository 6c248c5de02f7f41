"""Adds use and cost of each engine's minutes, and work and cost of each request."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_OF_REQUESTS = {
    "prefill_flops": sa.Float(),
    "prefill_kv_bytes": sa.Float(),
    "decode_flops": sa.Float(),
    "decode_kv_bytes": sa.Float(),
    "priced_at": sa.DateTime(timezone=True),
}

_ALWAYS = (
    *("busy_s", "idle_s", "unknown_s"),
    *("computed_tokens", "cached_tokens", "output_tokens", "good_tokens"),
)
_WHERE_KNOWN = (
    *("prefill_s", "prefill_flops", "prefill_bytes", "decode_s", "decode_flops", "decode_bytes"),
    *("peak_flops_per_s", "peak_bytes_per_s"),
    *("engine_mfu", "engine_mbu", "hardware_mfu", "hardware_mbu"),
    *("joules", "gpus_usd", "electricity_usd", "idle_usd", "unknown_usd", "unseen_usd"),
    *("aborted_usd", "aborted_prefill_usd", "computed_usd", "cached_usd", "decode_usd"),
)


def upgrade() -> None:
    """Create the table of windows, and add work, cost and state to requests."""
    op.create_table(
        "engine_windows",
        sa.Column("agent", sa.String(100), nullable=False),
        sa.Column("engine", sa.String(100), nullable=False),
        sa.Column("starts_at", sa.BigInteger, nullable=False),
        sa.Column("from_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("until", sa.DateTime(timezone=True), nullable=False),
        sa.Column("model", sa.String(256)),
        sa.Column("gpus", sa.Integer),
        sa.Column("requests", sa.Integer, nullable=False),
        *(sa.Column(name, sa.Float, nullable=False) for name in _ALWAYS),
        sa.Column("cache_full", sa.Boolean, nullable=False),
        sa.Column("steps", sa.String(10)),
        sa.Column("method", sa.String(10), nullable=False),
        *(sa.Column(name, sa.Float) for name in _WHERE_KNOWN),
        sa.Column("disagreements", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("agent", "engine", "starts_at", name="pk_engine_windows"),
    )
    op.create_index("ix_engine_windows_starts_at", "engine_windows", ["starts_at"])
    for column, kind in _OF_REQUESTS.items():
        op.add_column("requests", sa.Column(column, kind))
    op.create_index("ix_requests_ended_at", "requests", ["ended_at"])
    waiting = sa.text("priced_at IS NULL")
    op.create_index(
        "ix_requests_engine_ended_at",
        "requests",
        ["engine", "ended_at"],
        sqlite_where=waiting,
        postgresql_where=waiting,
    )


def downgrade() -> None:
    """Drop the windows, and the work and cost of requests."""
    op.drop_index("ix_requests_engine_ended_at", "requests")
    op.drop_index("ix_requests_ended_at", "requests")
    for column in _OF_REQUESTS:
        op.drop_column("requests", column)
    op.drop_table("engine_windows")
