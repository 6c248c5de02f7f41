"""Lets jobs that compute wait while an export is read and stored."""

import threading
from typing import Self

GIVES_WAY_S = 0.05


class Precedence:
    """Knows whether an export is being read or stored: its sender waits for that.

    Each export is taken inside this context manager, several at a time. Jobs call `give_way`
    between the slices of their work, because threads share Python's lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entered = 0
        self._none_waits = threading.Event()
        self._none_waits.set()

    def __enter__(self) -> Self:
        with self._lock:
            self._entered += 1
            self._none_waits.clear()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._entered -= 1
            if not self._entered:
                self._none_waits.set()

    def give_way(self) -> None:
        """Return when no export is being taken, after GIVES_WAY_S at the latest."""
        self._none_waits.wait(GIVES_WAY_S)
