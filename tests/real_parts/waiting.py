"""Waits with a deadline for an effect of another process."""

import time
from collections.abc import Callable
from typing import TypeVar

POLL_S = 0.1

Value = TypeVar("Value")


def eventually(read: Callable[[], Value], *, within_s: float, what: str) -> Value:
    """The first true value that `read` returns; AssertionError naming `what` after the deadline."""
    deadline = time.monotonic() + within_s
    while not (value := read()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {within_s} s; last value: {value!r}")
        time.sleep(POLL_S)
    return value
