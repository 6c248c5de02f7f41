"""Xid errors that wait to be read, the newest of each GPU."""

from collections import defaultdict, deque

from agent.records.gpu import XidError

# A broken GPU reports bursts; the oldest of a thousand errors adds nothing to the newest.
_MAX_OF_ONE_GPU = 1000


class WaitingXids:
    """Holds Xid errors until they are taken. A burst of one GPU drops no error of another.

    The owner holds a lock for each call.
    """

    def __init__(self) -> None:
        self._of_gpu: defaultdict[str, deque[XidError]] = defaultdict(
            lambda: deque(maxlen=_MAX_OF_ONE_GPU)
        )

    def add(self, error: XidError) -> None:
        """Hold an error; drops the oldest of its GPU when there are too many."""
        self._of_gpu[error.gpu].append(error)

    def take(self) -> tuple[XidError, ...]:
        """The errors since the last call, oldest first."""
        taken = [error for of_one in self._of_gpu.values() for error in of_one]
        self._of_gpu.clear()
        return tuple(sorted(taken, key=lambda error: error.at))
