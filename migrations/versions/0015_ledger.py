"""Adds what an engine counted in a minute beside what the rows of its requests say."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

_FIGURES = (
    *("input_tokens", "output_tokens", "requests", "finished", "refused", "died"),
    *("row_input_tokens", "row_output_tokens", "row_requests", "row_finished", "row_refused"),
    "untold_rows",
)


def upgrade() -> None:
    """Add the columns; they are unknown of earlier minutes."""
    for name in _FIGURES:
        op.add_column("engine_windows", sa.Column(f"ledger_{name}", sa.Float()))
    op.add_column("engine_windows", sa.Column("ledger_closed", sa.Boolean()))
    op.add_column("engine_windows", sa.Column("unmatched", sa.Float()))


def downgrade() -> None:
    """Drop the columns."""
    for name in (*(f"ledger_{name}" for name in _FIGURES), "ledger_closed", "unmatched"):
        op.drop_column("engine_windows", name)
