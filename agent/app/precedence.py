"""Lets jobs that compute give way to senders, who wait until their requests are stored."""

import threading
from typing import Self

GIVES_WAY_S = 0.05


class Precedence:
    """A context manager for what senders wait for: any thread may enter it, any number of times.

    Jobs call `give_way` between the slices of their work: threads share Python's lock.
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
        """Wait until no sender waits, GIVES_WAY_S at most."""
        self._none_waits.wait(GIVES_WAY_S)
