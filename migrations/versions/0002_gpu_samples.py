"""Creates GPU samples."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table, and its indexes by GPU and by age."""
    op.create_table(
        "gpu_samples",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("agent", sa.String(100), nullable=False),
        sa.Column("gpu", sa.String(100), nullable=False),
        sa.Column("gpu_index", sa.Integer, nullable=False),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("problem", sa.String(64)),
        sa.Column("facts", sa.Text, nullable=False),
        sa.Column("processes", sa.Text),
        sa.Column("mig_instances", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_gpu_samples"),
    )
    op.create_index("ix_gpu_samples_gpu_at_id", "gpu_samples", ["gpu", "at", "id"])
    op.create_index("ix_gpu_samples_at", "gpu_samples", ["at"])


def downgrade() -> None:
    """Drop the table with its data."""
    op.drop_table("gpu_samples")
