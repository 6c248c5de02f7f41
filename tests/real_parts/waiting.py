"""Waits with a deadline for an effect of another process."""

import time
from collections.abc import Callable
from typing import TypeVar

POLL_S = 0.1

Value = TypeVar("Value")


class NotYetError(LookupError):
    """What was read for is not there, and may come: whoever waits reads again."""


def eventually(read: Callable[[], Value], *, within_s: float, what: str) -> Value:
    """The first true value that `read` returns; AssertionError naming `what` after the deadline."""
    deadline = time.monotonic() + within_s
    while True:
        began = time.monotonic()
        last: Value | NotYetError
        try:
            if last := read():
                return last
        except NotYetError as missing:
            last = missing
        now = time.monotonic()
        if now > deadline:
            raise AssertionError(f"{what}: not within {within_s} s; last value: {last!r}")
        # What is waited for needs the processors that a long read takes.
        time.sleep(max(POLL_S, now - began))
