"""Name claims: of two agents with one name, only one writes to a database; what each reports."""

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, func, insert, select, update

from agent import __version__
from agent.errors import StoreUnavailable
from agent.store.connection import for_polling, for_writing, in_transaction, without_number
from agent.store.facts import json_value
from agent.store.publishing.changes import Lag
from agent.store.tables import agents

Engines = Callable[[], Sequence[Mapping[str, Any]]]


def no_engines() -> Sequence[Mapping[str, Any]]:
    """The engines of an agent without any."""
    return ()


def no_lag(_connection: Connection) -> Lag | None:
    """The lag of an agent whose file is not published."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentState:
    """An agent's version, start in Unix seconds, and its engines as the API shows them now."""

    engines: Engines = no_engines
    simulated: bool = False
    version: str = __version__
    started_at: float = field(default_factory=time.time)

    def at_start(self) -> dict[str, Any]:
        """The columns of an agent that takes its name; what it did not read yet is unknown."""
        return {
            "version": self.version,
            "simulated": self.simulated,
            "started_at": self.started_at,
            "stopped_at": None,
            "waiting_rows": None,
            "lag_s": None,
            "engines": None,
        }

    def now(self, lag: Lag | None) -> dict[str, Any]:
        """The columns that change with each beat; without a shared database there is no lag."""
        shown = [{name: json_value(value) for name, value in row.items()} for row in self.engines()]
        return {
            "waiting_rows": None if lag is None else lag.rows,
            "lag_s": None if lag is None else lag.seconds,
            "engines": json.dumps(shown),
        }


BEAT_EVERY_S = 5.0
# An agent without a beat for this long is dead. A beat of a living agent may wait for a lock.
DEAD_AFTER_S = 20.0


class NameTaken(StoreUnavailable):
    """Another agent with the same name writes to the database."""


def own_instance() -> str:
    """This run of the agent: its host, its process, and a random part."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"


class NameClaim:
    """The name claim of one agent: its row in the table `agents`, updated every BEAT_EVERY_S.

    Clocks of two agents are not compared: an agent is dead if the other one has seen no new beat
    for DEAD_AFTER_S by its own clock. On the same host, the end of its process shows it at once.

    Each beat also writes the state of the agent (see AgentState).
    """

    def __init__(
        self,
        agent: str,
        instance: str,
        monotonic: Callable[[], float] = time.monotonic,
        *,
        state: AgentState | None = None,
        lag: Callable[[Connection], Lag | None] = no_lag,
    ) -> None:
        """`lag` returns what waits to be published; it gets the connection of the beat."""
        self._agent = agent
        self._instance = instance
        self._monotonic = monotonic
        self._state = state or AgentState()
        self._lag = lag
        self._seen: tuple[str, int] | None = None
        self._seen_since = 0.0

    def take(self, engine: Engine) -> None:
        """Take the name. Raises NameTaken while another agent with this name lives."""
        in_transaction(without_number(for_writing(engine)), self._take)

    def beat(self, engine: Engine) -> None:
        """Renew the claim. Raises NameTaken if another agent took the name."""
        in_transaction(without_number(for_polling(engine)), self._beat)

    def release(self, engine: Engine) -> None:
        """Give the name back, so that the next agent need not wait; the row stays."""
        stopped = update(agents).where(*self._own_row()).values(stopped_at=func.now())
        in_transaction(
            without_number(for_polling(engine)), lambda connection: connection.execute(stopped)
        )

    def _own_row(self) -> tuple[ColumnElement[bool], ...]:
        return agents.c.name == self._agent, agents.c.instance == self._instance

    def _take(self, connection: Connection) -> None:
        query = select(agents.c.instance, agents.c.beats, agents.c.stopped_at)
        row = connection.execute(
            query.where(agents.c.name == self._agent).with_for_update()
        ).one_or_none()
        own = {"instance": self._instance, "seen_at": func.now(), **self._state.at_start()}
        if row is None:
            connection.execute(insert(agents).values(name=self._agent, beats=0, **own))
        else:
            self._require_free(row)
            taken = update(agents).where(agents.c.name == self._agent)
            connection.execute(taken.values(beats=row.beats + 1, **own))

    def _require_free(self, row: Any) -> None:
        if not self._is_free(row):
            raise NameTaken(
                f"another agent of the name {self._agent!r} writes to this database; stop it, or "
                "give each agent a `name` of its own",
                f"it runs as {row.instance}",
            )

    def _taken_over(self) -> NameTaken:
        return NameTaken(
            f"another agent of the name {self._agent!r} took over this database; give each "
            "agent a `name` of its own"
        )

    def _is_free(self, row: Any) -> bool:
        """Whether the row is of this agent, or of one that stopped or is dead."""
        if row.stopped_at is not None or row.instance == self._instance:
            return True
        return self._is_dead(row.instance, row.beats)

    def _is_dead(self, instance: str, beats: int) -> bool:
        if _ended_here(instance):
            return True
        if self._seen != (instance, beats):
            self._seen, self._seen_since = (instance, beats), self._monotonic()
        return self._monotonic() - self._seen_since >= DEAD_AFTER_S

    def _beat(self, connection: Connection) -> None:
        reported = self._state.now(self._lag(connection))
        counted = connection.execute(
            update(agents)
            .where(*self._own_row())
            .values(beats=agents.c.beats + 1, seen_at=func.now(), **reported)
        )
        if counted.rowcount == 0:
            raise self._taken_over()


def _ended_here(instance: str) -> bool:
    """Whether the instance ran on this host and its process has ended."""
    host, _, process = instance.partition(":")
    number = process.partition(":")[0]
    if host != socket.gethostname() or not number.isdecimal():
        return False
    if int(number) == os.getpid():
        # Not this agent: an earlier process had the same number, or this process an earlier agent.
        return True
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
