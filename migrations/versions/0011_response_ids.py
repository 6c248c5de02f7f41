"""Adds the id in the response of a request."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_INDEX = "ix_requests_response_id"


def upgrade() -> None:
    """Add the column, and an index of the rows that have a value."""
    op.add_column("requests", sa.Column("response_id", sa.String(320)))
    known = sa.text("response_id IS NOT NULL")
    op.create_index(_INDEX, "requests", ["response_id"], sqlite_where=known, postgresql_where=known)


def downgrade() -> None:
    """Drop the column."""
    op.drop_index(_INDEX, "requests")
    op.drop_column("requests", "response_id")
