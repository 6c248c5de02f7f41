"""What the last writes to the database did, in memory: /readyz asks no database."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from math import inf

from agent.errors import StoreUnavailable

# A commit of requests takes milliseconds, as does what it waits for.
SLOW_S = 5.0
# Senders and the proxy send again within this time. A small write may succeed on a disk that is
# too full for theirs.
SENT_AGAIN_WITHIN_S = 15.0


class StoreHealth:
    """Collects the results of writes from any thread, and says in words what is wrong."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._numbers = count()
        self._running: dict[int, tuple[float, str]] = {}
        self._problem: str | None = None
        self._problem_since = 0.0
        self._refused_at: float | None = None

    @contextmanager
    def write(self, what: str, *, probe: bool = False) -> Iterator[None]:
        """Note one write by its duration and its StoreUnavailable.

        `what` names it, as in "a write of requests". A `probe` is a small write of the agent's own:
        its success does not outweigh a later failure of requests.
        """
        number = next(self._numbers)
        with self._lock:
            self._running[number] = (self._monotonic(), what)
        try:
            yield
        except StoreUnavailable as error:
            self._failed(error.public, probe=probe)
            raise
        else:
            self._succeeded(probe=probe)
        finally:
            with self._lock:
                del self._running[number]

    def _failed(self, problem: str, *, probe: bool) -> None:
        now = self._monotonic()
        with self._lock:
            if not probe:
                self._refused_at = now
            if self._problem is None:
                self._problem_since = now
            self._problem = problem

    def _succeeded(self, *, probe: bool) -> None:
        with self._lock:
            refused_at = -inf if self._refused_at is None else self._refused_at
            if probe and self._monotonic() - refused_at < SENT_AGAIN_WITHIN_S:
                return
            self._problem = self._refused_at = None

    def closed(self, problem: str) -> None:
        """Note that no write can succeed until the database is opened again."""
        self._failed(problem, probe=False)

    def opened(self) -> None:
        """Forget the failures before the database was opened."""
        with self._lock:
            self._problem = self._refused_at = None

    def problem(self) -> str | None:
        """What is wrong with the database and since when, in words; None where writes succeed."""
        with self._lock:
            now = self._monotonic()
            began_at, what = min(self._running.values(), default=(now, ""))
            if now - began_at > SLOW_S:
                return f"{what} waits for the database since {now - began_at:.0f} s"
            if self._problem is None:
                return None
            return f"{self._problem} (since {now - self._problem_since:.0f} s)"
