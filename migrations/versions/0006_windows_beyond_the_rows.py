"""What an engine counted in a minute beyond its rows, and what its two phases shared."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_ALWAYS = ("counted_output_tokens", "cache_full_s")
_WHERE_KNOWN = ("shared_bytes", "preemptions", "draft_tokens", "accepted_draft_tokens")


def upgrade() -> None:
    """Add the columns; of windows before that, what their rows told is taken for all."""
    for name in _ALWAYS:
        kept = sa.Column(name, sa.Float, nullable=False, server_default=sa.text("0"))
        op.add_column("engine_windows", kept)
    for name in _WHERE_KNOWN:
        op.add_column("engine_windows", sa.Column(name, sa.Float))
    op.execute("UPDATE engine_windows SET counted_output_tokens = output_tokens")
    # That the cache was full at any moment was taken for all the time that an engine worked.
    op.execute("UPDATE engine_windows SET cache_full_s = busy_s WHERE cache_full")


def downgrade() -> None:
    """Drop the columns; whether a cache was full at any moment stays."""
    for name in (*_ALWAYS, *_WHERE_KNOWN):
        op.drop_column("engine_windows", name)
