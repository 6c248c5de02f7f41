"""Hours of one GPU by request, whatever these cost, and tokens by the objective that was met."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns; what was counted before tells neither."""
    op.add_column("requests", sa.Column("gpu_hours", sa.Float()))
    op.add_column("engine_windows", sa.Column("good_tokens_by_objective", sa.Text()))


def downgrade() -> None:
    """Drop them."""
    op.drop_column("engine_windows", "good_tokens_by_objective")
    op.drop_column("requests", "gpu_hours")
