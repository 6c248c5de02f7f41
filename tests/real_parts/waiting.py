"""Waiting for what another process will do, with a deadline."""

import time
from collections.abc import Callable
from typing import TypeVar

POLL_S = 0.1

Seen = TypeVar("Seen")


def eventually(look: Callable[[], Seen], *, within_s: float, what: str) -> Seen:
    """The first true thing that `look` returns; AssertionError naming `what` after the deadline."""
    deadline = time.monotonic() + within_s
    while not (seen := look()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {within_s} s; last seen: {seen!r}")
        time.sleep(POLL_S)
    return seen
