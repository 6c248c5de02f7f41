"""Adds what each agent tells of itself with its beats: version, times, lag and engines."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

# Of an agent that still runs an earlier version they stay null.
_COLUMNS = (
    ("version", sa.String(64)),
    ("simulated", sa.Boolean()),
    ("started_at", sa.DateTime(timezone=True)),
    ("seen_at", sa.DateTime(timezone=True)),
    ("stopped_at", sa.DateTime(timezone=True)),
    ("waiting_rows", sa.BigInteger()),
    ("lag_s", sa.Float()),
    ("engines", sa.Text()),
)


def upgrade() -> None:
    """Add the columns; neither database rewrites rows for them."""
    for name, kind in _COLUMNS:
        op.add_column("agents", sa.Column(name, kind))


def downgrade() -> None:
    """Drop the columns."""
    with op.batch_alter_table("agents") as table:
        for name, _ in _COLUMNS:
            table.drop_column(name)
