"""Sends OTLP bodies to an endpoint from a queue: forwarded exports, unchanged, and own metrics."""

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from agent.catalog.reasons import ForwardDropped
from agent.outputs.otlp_destinations import Destination, OtlpBody

_LOG = logging.getLogger(__name__)

MAX_QUEUE_BYTES = 64 * 1024 * 1024
# Bodies can be very small, and each takes some memory of its own.
MAX_QUEUE_BODIES = 10_000
MAX_TRIES = 6
FIRST_DELAY_S = 1.0
MAX_DELAY_S = 30.0
# A destination that asks for a longer delay would make the queue overflow.
MAX_RETRY_AFTER_S = 300.0


class ForwardCounter(Protocol):
    """Counts forwarded bodies. The meter does; outputs do not import each other."""

    def forwarded(self) -> None:
        """The destination accepted a body."""

    def forward_dropped(self, reason: str) -> None:
        """A body was dropped."""


class Forwarder:
    """Sends bodies from a bounded queue in its own thread; a full queue drops the newest."""

    def __init__(
        self,
        to: Destination,
        counter: ForwardCounter,
        jitter: Callable[[], float] = random.random,
        first_delay_s: float = FIRST_DELAY_S,
        *,
        name: str = "otlp-forwarder",
        max_bodies: int | None = None,
    ) -> None:
        """`name` is that of its thread. At most `max_bodies` wait, or MAX_QUEUE_BODIES."""
        self._to = to
        self._counter = counter
        self._jitter = jitter
        self._first_delay_s = first_delay_s
        self._queue: deque[tuple[OtlpBody, float]] = deque()
        self._queued_bytes = 0
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._max_bodies = MAX_QUEUE_BODIES if max_bodies is None else max_bodies
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def queued_bytes(self) -> int:
        """Bytes of the bodies in the queue."""
        return self._queued_bytes

    @property
    def fill(self) -> float:
        """The share of the queue that is taken, by bodies or by bytes."""
        return max(len(self._queue) / self._max_bodies, self._queued_bytes / MAX_QUEUE_BYTES)

    @property
    def lag_s(self) -> float:
        """For how long the oldest body has waited; 0 while none waits."""
        with self._changed:
            return time.monotonic() - self._queue[0][1] if self._queue else 0.0

    def forward(self, payload: OtlpBody) -> None:
        """Queue a body; never blocks."""
        with self._changed:
            refused = self._refusal(payload)
            if refused is None:
                self._queue.append((payload, time.monotonic()))
                self._queued_bytes += len(payload.content)
                self._changed.notify()
        if refused is not None:
            self._counter.forward_dropped(refused)

    def _refusal(self, payload: OtlpBody) -> str | None:
        if self._closing.is_set():
            return ForwardDropped.STOPPING
        too_large = self._queued_bytes + len(payload.content) > MAX_QUEUE_BYTES
        full = too_large or len(self._queue) >= self._max_bodies
        return ForwardDropped.QUEUE_FULL if full else None

    def close(self, grace_s: float) -> None:
        """Send queued bodies for at most `grace_s`, then drop and count the rest."""
        with self._changed:
            self._closing.set()
            self._changed.notify()
        self._thread.join(grace_s)
        with self._changed:
            left = len(self._queue)
            self._queue.clear()
            self._queued_bytes = 0
        for _ in range(left):
            self._counter.forward_dropped(ForwardDropped.STOPPING)
        self._to.close()

    def _run(self) -> None:
        while (payload := self._next()) is not None:
            try:
                refused = self._deliver(payload)
            except Exception:
                # A body that cannot be sent must not block the next.
                _LOG.exception("a body could not be forwarded")
                refused = ForwardDropped.FAILED
            if not self._done(payload):
                return
            if refused is None:
                self._counter.forwarded()
            else:
                self._counter.forward_dropped(refused)

    def _next(self) -> OtlpBody | None:
        """The oldest body, which stays queued until it is sent or dropped; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing.is_set())
            return self._queue[0][0] if self._queue else None

    def _done(self, payload: OtlpBody) -> bool:
        """Remove the body; False where `close` has already dropped and counted it."""
        with self._changed:
            if not self._queue:
                return False
            self._queue.popleft()
            self._queued_bytes -= len(payload.content)
            return True

    def _deliver(self, payload: OtlpBody) -> str | None:
        """None where the destination accepted the body, else the reason of the drop."""
        delay_s = self._first_delay_s
        for tries_left in reversed(range(MAX_TRIES)):
            last = tries_left == 0 or self._closing.is_set()
            result = self._to.send(payload)
            if result.refused is None or not result.retry or last:
                break
            self._closing.wait(self._pause_s(result.retry_after_s, delay_s))
            delay_s = min(2 * delay_s, MAX_DELAY_S)
        return result.refused

    def _pause_s(self, retry_after_s: float | None, delay_s: float) -> float:
        if retry_after_s is not None:
            return min(retry_after_s, MAX_RETRY_AFTER_S)
        return delay_s * (0.8 + 0.4 * self._jitter())
