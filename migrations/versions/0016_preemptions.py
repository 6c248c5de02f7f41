"""Adds how often a request was preempted."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; it is unknown of earlier rows."""
    op.add_column("requests", sa.Column("preemptions", sa.Integer()))


def downgrade() -> None:
    """Drop the column."""
    op.drop_column("requests", "preemptions")
