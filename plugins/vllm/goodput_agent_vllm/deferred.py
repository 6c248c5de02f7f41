"""Work of the middleware that no client waits for, and that must not delay a first token."""

from asyncio import get_running_loop
from collections import deque
from collections.abc import Callable
from time import monotonic

# It is done after so many seconds at the latest. Then most requests of an idle engine have their
# first token.
WITHIN_S = 0.05
# The step of an event loop's timers.
_TIMER_S = 0.001
# The event loop does other work after each slice.
_SLICE_S = 0.0002
# Of a front that is never idle, more does not wait.
_MAX_WAITING = 256


class DeferredWork:
    """Does work, in its order, once no request waits for its first token, or WITHIN_S later.

    The work raises nothing. For the thread of one event loop.
    """

    __slots__ = ("_planned", "_requests", "_waiting")

    def __init__(self) -> None:
        # With the time by which it is done.
        self._waiting: deque[tuple[float, Callable[[], None]]] = deque()
        # Whether a timer is set for the oldest.
        self._planned = False
        # How many wait for their first token.
        self._requests = 0

    def hold(self) -> None:
        """A request came, and waits for its first token."""
        self._requests += 1

    def release(self, *, now: bool) -> None:
        """A request that came has its first token, or ended: its client may send the next one.

        `now`: it goes on, so this is the best time for the work.
        """
        self._requests -= 1
        if now and not self._requests and self._waiting:
            # The server sends the token before that.
            get_running_loop().call_soon(self._do_slice)

    def add(self, work: Callable[[], None]) -> None:
        """Do this later."""
        self._waiting.append((monotonic() + WITHIN_S, work))
        if len(self._waiting) > _MAX_WAITING:
            self._do_oldest()
        if not self._planned:
            self._plan(WITHIN_S)

    def finish(self) -> None:
        """Do all of it now."""
        while self._waiting:
            self._do_oldest()

    def _do_oldest(self) -> None:
        self._waiting.popleft()[1]()

    def _plan(self, after_s: float) -> None:
        self._planned = True
        get_running_loop().call_later(after_s, self._do_planned)

    def _do_planned(self) -> None:
        self._planned = False
        if not self._waiting:
            return
        # The timer may be that of work which was done before its time.
        early_s = self._waiting[0][0] - monotonic()
        if self._requests and early_s > _TIMER_S:
            self._plan(early_s)
        else:
            self._do_slice()

    def _do_slice(self) -> None:
        ends_s = monotonic() + _SLICE_S
        while self._waiting:
            self._do_oldest()
            if monotonic() >= ends_s:
                break
        if self._waiting:
            get_running_loop().call_soon(self._do_slice)
