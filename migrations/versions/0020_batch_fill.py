"""Adds how full batches were to the minutes of engines."""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

_ADDED = ("running_request_s", "place_s", "limited_step_tokens", "step_room_tokens")


def upgrade() -> None:
    """Add the columns; they are unknown of earlier minutes."""
    for name in _ADDED:
        op.add_column("engine_windows", sa.Column(name, sa.Float))


def downgrade() -> None:
    """Drop the columns."""
    for name in _ADDED:
        op.drop_column("engine_windows", name)
