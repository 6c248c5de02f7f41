"""Waits with a deadline for an effect of another process."""

import time
from collections.abc import Callable
from typing import TypeVar

# A long wait reads less often: what is waited for needs the processors.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _LONGER = 0.05, 0.4, 1.3

Value = TypeVar("Value")


def eventually(read: Callable[[], Value], *, within_s: float, what: str) -> Value:
    """The first true value that `read` returns; AssertionError naming `what` after the deadline.

    A read that raises found nothing yet: a row, a metric or a field that is to come.
    """
    deadline = time.monotonic() + within_s
    pause_s = _FIRST_PAUSE_S
    while True:
        began = time.monotonic()
        missing: Exception | None = None
        try:
            if value := read():
                return value
            last = repr(value)
        except Exception as error:
            missing, last = error, repr(error)
        now = time.monotonic()
        if now > deadline:
            raise AssertionError(f"{what}: not within {within_s} s; last: {last}") from missing
        time.sleep(max(pause_s, now - began))
        pause_s = min(pause_s * _LONGER, _LONGEST_PAUSE_S)
