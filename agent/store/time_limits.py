"""Limits of time on PostgreSQL: a server that hangs holds no thread of the agent for long."""

from functools import partial
from typing import Any

from sqlalchemy import Engine, event
from sqlalchemy.exc import DisconnectionError

from agent.store.journal.cutting_off import cut_off_after

# A server that works ends a statement at its limit; one that hangs is cut off this much later.
CUT_OFF_LATER_S = 5.0
# The upkeep of old rows, and a migration, of large tables.
UPKEEP_S = 600.0
MIGRATION_S = 3600.0


def limit_waits(engine: Engine, cut_off_s: float, *, statement_s: float | None = None) -> None:
    """Limit how long each use of a connection may take, of PostgreSQL alone.

    The server cancels a statement after `statement_s`. A connection that is used for longer than
    `cut_off_s` is cut off, whatever the server does. The engine must be opened with
    `pool_pre_ping=False`, which would ask a server that hangs before that time begins.
    """
    if engine.dialect.name != "postgresql":
        return
    if statement_s is not None:
        event.listen(engine, "connect", partial(_limit_statements, limit_s=statement_s))
    cut_off_after(engine, cut_off_s)
    event.listen(engine, "checkout", partial(_ping, engine))


def _limit_statements(connection: Any, _record: object, *, limit_s: float) -> None:
    connection.execute(f"SET statement_timeout = {max(round(limit_s * 1000), 1)}")
    connection.commit()


def _ping(engine: Engine, connection: Any, _record: object, _fairy: object) -> None:
    """Let the pool connect anew where a connection was lost since its last use."""
    driver: Any = engine.dialect.dbapi
    try:
        engine.dialect.do_ping(connection)
    except driver.Error as error:
        raise DisconnectionError(str(error)) from error
