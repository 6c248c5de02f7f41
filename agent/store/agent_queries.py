"""Which agents write to a database, and when each was last seen, by the database's clock alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Engine, func, select

from agent.store.connection import read_all
from agent.store.tables import agents
from agent.store.unix_seconds import UnixSeconds
from agent.store.unreadable import check_row, json_of, readable

# Six beats: a slow database delays them, and a frozen one is cut off after 30 s.
OVERDUE_AFTER_S = 30.0
# What an agent reported of its engine and stays true after its last beat.
_LASTING = {"name", "model", "dialect", "read_at"}

_COLUMNS = (column for column in agents.c if column.name not in ("instance", "beats"))
_AGENTS = select(
    *_COLUMNS, (UnixSeconds(func.now()) - UnixSeconds(agents.c.seen_at)).label("silent_s")
).order_by(agents.c.name)


def agents_of(engine: Engine) -> Sequence[Mapping[str, Any]]:
    """Every agent by name, the stopped ones included. Raises StoreUnavailable."""
    return readable(agents, read_all(engine, _AGENTS), _agent)


def engines_of(agents_seen: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The engines of all agents that did not stop, as the last beat of each has them.

    What an engine does now is unknown while its agent is overdue.
    """
    return [
        # An agent of another version may leave some out.
        {**dict.fromkeys(_LASTING), "up": None, **engine, **_of_agent(row, engine)}
        for row in agents_seen
        if row["stopped_at"] is None
        for engine in row["engines"] or ()
    ]


def _of_agent(row: Mapping[str, Any], engine: Mapping[str, Any]) -> dict[str, Any]:
    own = {"agent": row["name"]}
    if not row["overdue"]:
        return own
    unknown: dict[str, Any] = dict.fromkeys(engine.keys() - _LASTING)
    problem = f"its agent was last seen {row['silent_s']:.0f} s ago"
    return unknown | own | {"problem": problem}


def _agent(row: Mapping[str, Any]) -> Mapping[str, Any]:
    check_row(agents, row)
    silent_s = None if row["silent_s"] is None else max(row["silent_s"], 0.0)
    overdue = None if silent_s is None else silent_s > OVERDUE_AFTER_S
    engines = row["engines"]
    return dict(row) | {
        "engines": None if engines is None else json_of(agents, "engines", engines),
        "silent_s": silent_s,
        "overdue": overdue and row["stopped_at"] is None,
    }
