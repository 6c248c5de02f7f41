"""Joins the engine's figures of a request with its HTTP request, in the process that has both."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# An HTTP request that ended waits this long for figures of the engine; mostly they come first.
WAIT_S = 1.0
# Figures without an HTTP request, as those of other routes, are sent by themselves after this.
HELD_S = 2.0
MAX_HELD = 16_384


@dataclass(eq=False)
class Waiting:
    """An ended HTTP request that waits for the figures of its choices; `request` is its own."""

    engine_id: str
    choices: int
    until_s: float
    request: Any
    figures: list[bytes] = field(default_factory=list)


class HeldFigures:
    """Figures of ended requests by the engine's id, until their HTTP request ends.

    Clients repeat ids, so an id may have several; the oldest are of the request that ended first.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, deque[bytes]] = {}
        # In the order of arrival, with those that were taken since.
        self._held: deque[tuple[float, str, bytes]] = deque()
        self._waiting: deque[Waiting] = deque()

    @property
    def waits(self) -> bool:
        """Whether anything waits for a time."""
        return bool(self._waiting or self._by_id)

    def hold(self, engine_id: str, figures: bytes, now_s: float) -> None:
        """Keep the figures of a choice that ended."""
        self._by_id.setdefault(engine_id, deque()).append(figures)
        self._held.append((now_s + HELD_S, engine_id, figures))

    def take(self, engine_id: str, choices: int) -> list[bytes]:
        """Take the figures of the choices of a request, as far as they have come.

        vLLM numbers the prompts of a completion, `cmpl-x-0`, and the turns of a response,
        `resp_x_0`.
        """
        found = self._taken(engine_id, choices)
        for joint in "-_":
            number = 0
            while len(found) < choices:
                more = self._taken(f"{engine_id}{joint}{number}", choices - len(found))
                if not more:
                    break
                found += more
                number += 1
        return found

    def _taken(self, engine_id: str, most: int) -> list[bytes]:
        held = self._by_id.get(engine_id, deque())
        found = [held.popleft() for _ in range(min(most, len(held)))]
        if found and not held:
            del self._by_id[engine_id]
        return found

    def wait(self, waiting: Waiting) -> None:
        """Let an ended HTTP request wait for its figures."""
        self._waiting.append(waiting)

    def due(self, now_s: float) -> list[Waiting]:
        """HTTP requests whose figures have come, or that have waited for long enough."""
        found: list[Waiting] = []
        for _ in range(len(self._waiting)):
            waiting = self._waiting.popleft()
            waiting.figures += self.take(waiting.engine_id, waiting.choices - len(waiting.figures))
            ends = len(waiting.figures) >= waiting.choices or now_s >= waiting.until_s
            (found if ends else self._waiting).append(waiting)
        return found

    def overdue(self, now_s: float, is_open: Callable[[str], bool]) -> list[bytes]:
        """Figures to be sent by themselves, unless the HTTP request of their id is open."""
        found: list[bytes] = []
        for _ in range(len(self._held)):
            until_s, engine_id, figures = self._held[0]
            if now_s < until_s and len(self._held) <= MAX_HELD:
                break
            self._held.popleft()
            held = self._by_id.get(engine_id, ())
            if not any(each is figures for each in held):
                continue
            if len(self._held) < MAX_HELD and is_open(engine_id):
                self._held.append((now_s + HELD_S, engine_id, figures))
            else:
                found += self._taken(engine_id, 1)
        return found
