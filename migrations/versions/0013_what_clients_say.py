"""Adds who a request was for, its priority, its media, and the time of its reasoning."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

_NAMES = ("end_user", "workload", "session")


def upgrade() -> None:
    """Add the columns; they are unknown of earlier rows."""
    for name in _NAMES:
        op.add_column("requests", sa.Column(name, sa.String(256)))
    op.add_column("requests", sa.Column("priority", sa.Integer()))
    op.add_column("requests", sa.Column("reasoning_s", sa.Float()))
    for name in ("media_parts", "media_bytes"):
        op.add_column("requests", sa.Column(name, sa.BigInteger()))


def downgrade() -> None:
    """Drop the columns."""
    for name in (*_NAMES, "priority", "reasoning_s", "media_parts", "media_bytes"):
        op.drop_column("requests", name)
