"""Adds an engine's counts beyond its rows, and the bytes that both phases share."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_ALWAYS = ("counted_output_tokens", "cache_full_s")
_WHERE_KNOWN = ("shared_bytes", "preemptions", "draft_tokens", "accepted_draft_tokens")


def upgrade() -> None:
    """Add the columns; earlier windows take the totals of their rows."""
    for name in _ALWAYS:
        kept = sa.Column(name, sa.Float, nullable=False, server_default=sa.text("0"))
        op.add_column("engine_windows", kept)
    for name in _WHERE_KNOWN:
        op.add_column("engine_windows", sa.Column(name, sa.Float))
    op.execute("UPDATE engine_windows SET counted_output_tokens = output_tokens")
    # Earlier, a cache that was full at any time counted as full for all busy time.
    op.execute("UPDATE engine_windows SET cache_full_s = busy_s WHERE cache_full")


def downgrade() -> None:
    """Drop the columns; whether the cache was full at any time is kept."""
    for name in (*_ALWAYS, *_WHERE_KNOWN):
        op.drop_column("engine_windows", name)
