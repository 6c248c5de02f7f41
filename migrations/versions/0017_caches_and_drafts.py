"""Adds an engine's counts of drafts and of its prefix cache to its minutes."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

_ADDED = ("drafts", "prefix_query_tokens", "prefix_hit_tokens")


def upgrade() -> None:
    """Add the columns; they are unknown of earlier minutes."""
    for name in _ADDED:
        op.add_column("engine_windows", sa.Column(name, sa.Float))


def downgrade() -> None:
    """Drop the columns."""
    for name in _ADDED:
        op.drop_column("engine_windows", name)
