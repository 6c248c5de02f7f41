"""Adds what the client wrote where a row has another model or tenant instead."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_COLUMNS = ("requested_model", "requested_tenant")


def upgrade() -> None:
    """Add the columns; earlier rows have the client's own names."""
    for name in _COLUMNS:
        op.add_column("requests", sa.Column(name, sa.String(256)))


def downgrade() -> None:
    """Write the client's names back, and drop the columns."""
    for name in _COLUMNS:
        own = name.removeprefix("requested_")
        op.execute(f"UPDATE requests SET {own} = {name} WHERE {name} IS NOT NULL")
        op.drop_column("requests", name)
