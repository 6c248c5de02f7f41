"""Adds the proxy's view to requests, and the state of joining."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_COLUMNS = {
    "parent_span_id": sa.String(16),
    "proxy_span_id": sa.String(16),
    "first_byte_s": sa.Float(),
    "first_visible_s": sa.Float(),
    "gaps": sa.Text(),
    "gap_tokens": sa.BigInteger(),
    "input_bytes": sa.BigInteger(),
    "output_bytes": sa.BigInteger(),
    "error": sa.String(64),
    "choices": sa.BigInteger(),
    "streamed": sa.Boolean(),
    "ttft_limit_s": sa.Float(),
    "tpot_limit_s": sa.Float(),
    "engine_request_id": sa.String(256),
    "engine_status": sa.String(10),
    "engine_ttft_s": sa.Float(),
    "engine_tpot_s": sa.Float(),
    "engine_e2e_s": sa.Float(),
    "holdback_s": sa.Float(),
    "settles_at": sa.DateTime(timezone=True),
}

# Each index has only the rows in which its last column is not null.
_INDEXES = {
    "uq_requests_trace_id_proxy_span_id": ("trace_id", "proxy_span_id"),
    "ix_requests_trace_id_parent_span_id": ("trace_id", "parent_span_id"),
    "ix_requests_engine_request_id": ("engine_request_id",),
    "ix_requests_settles_at": ("settles_at",),
}


def upgrade() -> None:
    """Add the proxy's columns, and the columns about joining and counting."""
    for column, kind in _COLUMNS.items():
        op.add_column("requests", sa.Column(column, kind))
    # Earlier rows were counted when they were stored.
    counted = sa.Column("counted", sa.Boolean, nullable=False, server_default=sa.true())
    op.add_column("requests", counted)
    for name, columns in _INDEXES.items():
        known = sa.text(f"{columns[-1]} IS NOT NULL")
        op.create_index(
            name,
            "requests",
            list(columns),
            unique=name.startswith("uq_"),
            sqlite_where=known,
            postgresql_where=known,
        )


def downgrade() -> None:
    """Drop the columns; joined requests lose the engine's view."""
    for name in _INDEXES:
        op.drop_index(name, "requests")
    for column in ("counted", *_COLUMNS):
        op.drop_column("requests", column)
