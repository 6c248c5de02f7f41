"""Whether the agent is ready, in words and by part, from memory alone."""

from collections.abc import Callable, Mapping, Sequence

from agent.store.health import StoreHealth
from agent.store.unreadable import UNREADABLE
from agent.store.writing import MAX_WAITING_ROWS, RequestWriter

OK = "ok"


def not_configured() -> str:
    """The state, in words, of a part that the settings leave out."""
    return "not configured"


class Readiness:
    """Reads what the parts know. An engine that is down is no problem of the agent."""

    def __init__(
        self,
        health: StoreHealth,
        writer: RequestWriter,
        engines: Mapping[str, Callable[[], bool]],
        others: Mapping[str, Callable[[], str]],
    ) -> None:
        """`engines` says of each whether it answers, and `others` how further parts are."""
        self._health = health
        self._writer = writer
        self._engines = engines
        self._others = dict(others)

    def add(self, part: str, in_words: Callable[[], str]) -> None:
        """Add a part to the response; call it before the first query."""
        self._others[part] = in_words

    def problems(self) -> Sequence[str]:
        """Why spans cannot be stored now."""
        found = (self._health.problem(), self._backlog())
        return [problem for problem in found if problem is not None]

    def parts(self) -> Mapping[str, str]:
        """Each part in words."""
        store = self._health.problem()
        return {
            "store": store or UNREADABLE.status() or OK,
            "receivers": self._receivers(refused=store is not None),
            "engines": self._answering(),
            **{part: in_words() for part, in_words in self._others.items()},
        }

    def _backlog(self) -> str | None:
        waiting = self._writer.waiting_rows
        full = waiting > 0.8 * MAX_WAITING_ROWS
        return f"{waiting} requests wait for the database" if full else None

    def _receivers(self, *, refused: bool) -> str:
        return (
            "exports are refused until the store takes them" if refused else self._backlog() or OK
        )

    def _answering(self) -> str:
        up = sum(answers() for answers in self._engines.values())
        return OK if up == len(self._engines) else f"{up} of {len(self._engines)} answer"
