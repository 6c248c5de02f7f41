"""What a running agent reports with each beat: columns of its row in the table `agents`."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection

from agent import __version__
from agent.store.facts import json_value
from agent.store.publishing.changes import Lag

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
