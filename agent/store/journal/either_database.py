"""Runs queries on the shared database, or on the journal while the shared database is away."""

from collections.abc import Callable
from functools import partial
from typing import Any

from agent.errors import QueryTooSlow, StoreUnavailable


class EitherDatabase:
    """The queries of the API on two databases: it has every method that both objects have.

    The journal has the rows of its own agent only, and keeps forwarded rows for a shorter time.
    """

    def __init__(self, shared: Any, journal: Any, shared_is_there: Callable[[], bool]) -> None:
        self._shared = shared
        self._journal = journal
        self._shared_is_there = shared_is_there

    def __getattr__(self, name: str) -> Any:
        return partial(self._query, name)

    def _query(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self._shared_is_there():
            try:
                return getattr(self._shared, method)(*args, **kwargs)
            except QueryTooSlow:
                raise
            except StoreUnavailable:
                # The shared database went away since the forwarder last reached it.
                pass
        return getattr(self._journal, method)(*args, **kwargs)
