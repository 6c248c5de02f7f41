"""A clock for tests of the store."""


class Clock:
    """Seconds that a test sets."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
