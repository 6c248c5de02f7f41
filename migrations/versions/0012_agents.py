"""Adds the agents that write to the database: one row a name."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "agents",
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("instance", sa.String(320), nullable=False),
        sa.Column("beats", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_agents"),
    )


def downgrade() -> None:
    """Drop the table."""
    op.drop_table("agents")
