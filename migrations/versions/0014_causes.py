"""Adds explanations of missed requests, and the rollups of their causes."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

_UNEXPLAINED = sa.text("verdict = 'missed' AND cause IS NULL")


def upgrade() -> None:
    """Add the columns, the index of what is to be explained, and the table."""
    op.add_column("requests", sa.Column("explanation", sa.Text()))
    op.add_column("requests", sa.Column("explained_at", sa.DateTime(timezone=True)))
    op.create_index(
        "ix_requests_agent_ended_at",
        "requests",
        ["agent", "ended_at"],
        sqlite_where=_UNEXPLAINED,
        postgresql_where=_UNEXPLAINED,
    )
    op.create_table(
        "cause_rollups",
        sa.Column("width_s", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("series", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("starts_at", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("objective", sa.String(100), nullable=False),
        sa.Column("limit_name", sa.String(16), nullable=False),
        sa.Column("cause", sa.String(64), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("top_requests", sa.BigInteger(), nullable=False),
        sa.Column("excess_s", sa.Float()),
        sa.PrimaryKeyConstraint(
            *("width_s", "series", "starts_at", "objective", "limit_name", "cause"),
            name="pk_cause_rollups",
        ),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    """Drop them; the first cause of each request stays."""
    op.drop_table("cause_rollups")
    op.drop_index("ix_requests_agent_ended_at", "requests")
    op.drop_column("requests", "explained_at")
    op.drop_column("requests", "explanation")
