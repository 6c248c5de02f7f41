"""Adds what the journals of agents have forwarded: one row a run of an agent."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "journals",
        sa.Column("run", sa.String(32), nullable=False),
        sa.Column("agent", sa.String(100), nullable=False),
        sa.Column("forwarded", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("run", name="pk_journals"),
    )
    op.create_index("ix_journals_agent", "journals", ["agent"])


def downgrade() -> None:
    """Drop the table."""
    op.drop_table("journals")
