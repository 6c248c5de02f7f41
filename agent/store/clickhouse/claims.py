"""An agent's name and objectives in ClickHouse, which has no transactions."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Engine, Table

from agent.records.objective import Objective
from agent.store.claim import AgentState, NameClaim
from agent.store.clickhouse.connecting import insert_rows, using
from agent.store.clickhouse.schema import ROW_VERSION, types_of
from agent.store.objectives import objective_json
from agent.store.publishing.changes import Lag
from agent.store.tables import agents, objectives

_REFUSED = "the database did not take the write"
_CLAIMED = "SELECT instance, beats, stopped_at, row_version FROM agents WHERE name = {name:String}"
_CLOCK = "SELECT toUnixTimestamp64Micro(now64(6))"
_IN_FORCE = (
    "SELECT name, definition, toUnixTimestamp64Micro(in_force_from), row_version FROM objectives "
    "WHERE agent = {agent:String} AND in_force_until IS NULL"
)


def server_now_us(client: Any) -> int:
    """The server's clock, in microseconds."""
    return int(client.query(_CLOCK).first_row[0])


def _write_versions(
    client: Any, table: Table, rows: Sequence[dict[str, Any]], version: int
) -> None:
    """Write rows of a table in one block; timestamps are in microseconds.

    Each replaces the row with its key and a lower version.
    """
    if not rows:
        return
    types = {**types_of(table), **ROW_VERSION}
    names = [*(name for name in rows[0] if name in types), *ROW_VERSION]
    values = [[(row | {"row_version": version})[name] for name in names] for row in rows]
    insert_rows(client, table.name, names, [types[name] for name in names], values)


class _Claimed(NamedTuple):
    instance: str
    beats: int
    stopped_at: Any
    version: int

    def above(self, now_us: int) -> int:
        """A version above this one, also where the server's clock was set back to `now_us`."""
        return max(now_us, self.version + 1)


class ClickHouseClaim(NameClaim):
    """The name claim of an agent in ClickHouse, which has no locks.

    Two agents may take a free name in the same moment. Then the later one keeps it, and the other
    one learns so at its next beat. Until then both write: their rows have different keys.
    """

    def __init__(
        self,
        agent: str,
        instance: str,
        monotonic: Callable[[], float] = time.monotonic,
        *,
        state: AgentState,
        lag: Callable[[], Lag],
    ) -> None:
        super().__init__(agent, instance, monotonic, state=state)
        self._file_lag = lag
        self._started: dict[str, Any] = {}

    def take(self, engine: Engine) -> None:
        """Take the name. Raises NameTaken while another agent with this name lives."""
        with using(engine, _REFUSED) as client:
            row = self._claimed(client)
            if row is not None:
                self._require_free(row)
            state = self._state.at_start()
            self._started = state | {"started_at": round(state["started_at"] * 1e6)}
            self._write(client, row, self._started)

    def beat(self, engine: Engine) -> None:
        """Renew the claim. Raises NameTaken if another agent took the name."""
        with using(engine, _REFUSED) as client:
            row = self._claimed(client)
            if row is None or row.instance != self._instance:
                raise self._taken_over()
            self._write(client, row, self._started | self._state.now(self._file_lag()))

    def release(self, engine: Engine) -> None:
        """Give the name back, so that the next agent need not wait; the row stays."""
        with using(engine, _REFUSED) as client:
            row = self._claimed(client)
            if row is not None and row.instance == self._instance:
                state = self._started | self._state.now(self._file_lag())
                self._write(client, row, state, stopped=True)

    def _claimed(self, client: Any) -> _Claimed | None:
        rows = client.query(_CLAIMED, {"name": self._agent}).result_rows
        return _Claimed(*rows[0]) if rows else None

    def _write(
        self, client: Any, row: _Claimed | None, state: Mapping[str, Any], *, stopped: bool = False
    ) -> None:
        """Write the agent's row with its state; `row` is the one that is there."""
        now_us = server_now_us(client)
        beats, version = (0, now_us) if row is None else (row.beats + 1, row.above(now_us))
        claim = {"name": self._agent, "instance": self._instance, "beats": beats, "seen_at": now_us}
        stopped_at = {"stopped_at": now_us if stopped else None}
        _write_versions(client, agents, [{**state, **claim, **stopped_at}], version)


def write_in_force(client: Any, agent: str, configured: Sequence[Objective]) -> None:
    """Record the objectives that an agent judges by from now on; unchanged ones stay."""
    wanted = {objective.name: objective_json(objective) for objective in configured}
    now_us = server_now_us(client)
    found = client.query(_IN_FORCE, {"agent": agent}).result_rows
    stored = {name: definition for name, definition, *_ in found}
    changed = {name for name in stored | wanted if stored.get(name) != wanted.get(name)}
    ended = [
        {"name": name, "definition": definition, "in_force_from": since, "in_force_until": now_us}
        for name, definition, since, _ in found
        if name in changed
    ]
    begun = [
        {"name": name, "definition": wanted[name], "in_force_from": now_us, "in_force_until": None}
        for name in sorted(changed & wanted.keys())
    ]
    rows = [{"id": 0, "agent": agent, **row} for row in (*ended, *begun)]
    version = max((now_us, *(before + 1 for *_, before in found)))
    _write_versions(client, objectives, rows, version)
