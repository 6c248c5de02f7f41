"""Makes a role of PostgreSQL whose members read the tables, as Grafana does, and write nothing."""

import logging

from alembic import op
from sqlalchemy import Connection, text
from sqlalchemy.exc import ProgrammingError

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

_LOG = logging.getLogger("agent.store.migrating")

_ROLE = "goodput_reader"
_TABLES = (
    "requests, engine_samples, gpu_samples, engine_windows, events, objectives, agents, journals, "
    "rollup_series, rollups, cause_rollups, rollup_changes, alembic_version"
)
_SCHEMA = text("SELECT quote_ident(current_schema())")
_EXISTS = text("SELECT count(*) FROM pg_roles WHERE rolname = :role")
# PostgreSQL, "Error Codes".
_INSUFFICIENT_PRIVILEGE = "42501"


def upgrade() -> None:
    """Make the role, unless the database's user may not, and grant it every table."""
    connection = op.get_bind()
    if connection.dialect.name != "postgresql":
        return
    schema = connection.scalar(_SCHEMA)
    grants = (
        f"GRANT USAGE ON SCHEMA {schema} TO {_ROLE}",
        f"GRANT SELECT ON {_TABLES} TO {_ROLE}",
        # Also to the tables that this user creates later, as partitions.
        f"ALTER DEFAULT PRIVILEGES IN SCHEMA {schema} GRANT SELECT ON TABLES TO {_ROLE}",
    )
    if _is_made(connection):
        for grant in grants:
            connection.execute(text(grant))
    else:
        _LOG.warning(
            "the database's user may create no roles, so there is no role %s for Grafana; "
            "whoever may runs CREATE ROLE %s; then this user runs %s",
            *(_ROLE, _ROLE, "; ".join(grants)),
        )


def _is_made(connection: Connection) -> bool:
    """Whether the role exists now. All databases of a server have the same roles."""
    if connection.scalar(_EXISTS, {"role": _ROLE}):
        return True
    try:
        with connection.begin_nested():
            connection.execute(text(f"CREATE ROLE {_ROLE} NOLOGIN"))
    except ProgrammingError as error:
        if getattr(error.orig, "sqlstate", None) == _INSUFFICIENT_PRIVILEGE:
            return False
        # Another database of the server made it at this moment.
        if not connection.scalar(_EXISTS, {"role": _ROLE}):
            raise
    return True


def downgrade() -> None:
    """Take the tables away from the role, which other databases of the server may have too."""
    connection = op.get_bind()
    if connection.dialect.name != "postgresql":
        return
    if connection.scalar(_EXISTS, {"role": _ROLE}):
        schema = connection.scalar(_SCHEMA)
        connection.execute(text(f"REVOKE SELECT ON {_TABLES} FROM {_ROLE}"))
        connection.execute(
            text(
                f"ALTER DEFAULT PRIVILEGES IN SCHEMA {schema} REVOKE SELECT ON TABLES FROM {_ROLE}"
            )
        )
