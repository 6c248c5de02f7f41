"""Adds GPU hours to requests, and tokens by objective to windows."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns, unknown for earlier rows."""
    op.add_column("requests", sa.Column("gpu_hours", sa.Float()))
    op.add_column("engine_windows", sa.Column("good_tokens_by_objective", sa.Text()))


def downgrade() -> None:
    """Drop the columns."""
    op.drop_column("engine_windows", "good_tokens_by_objective")
    op.drop_column("requests", "gpu_hours")
