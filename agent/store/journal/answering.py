"""Answers queries from the shared database, and from the journal while that one is away."""

from collections.abc import Callable
from functools import partial
from typing import Any

from agent.errors import QueryTooSlow, StoreUnavailable


class EitherDatabase:
    """The same queries on two databases; it has every method that both have.

    The journal knows its own agent alone, and what the shared database took goes from it sooner.
    """

    def __init__(self, shared: Any, own: Any, shared_answers: Callable[[], bool]) -> None:
        self._shared = shared
        self._own = own
        self._shared_answers = shared_answers

    def __getattr__(self, name: str) -> Any:
        return partial(self._asked, name)

    def _asked(self, name: str, *given: Any, **named: Any) -> Any:
        if self._shared_answers():
            try:
                return getattr(self._shared, name)(*given, **named)
            except QueryTooSlow:
                raise
            except StoreUnavailable:
                # It went away a moment ago.
                pass
        return getattr(self._own, name)(*given, **named)
