"""A running OTLP forwarder whose outcomes are counted."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from agent.catalog.reasons import FORWARDS_DROPPED
from agent.outputs.otlp_destinations import Destination as To
from agent.outputs.otlp_destinations import destination
from agent.outputs.otlp_forwarder import Forwarder
from tests.outputs.otlp_destinations import WITHIN_S, Destination

PROTOBUF = "application/x-protobuf"
JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Body:
    """An OTLP body as the receiver passes it to the forwarder."""

    content: bytes
    content_type: str = PROTOBUF
    gzipped: bool = False


@dataclass(slots=True)
class ForwardCounts:
    """Counts sent and dropped bodies; tests wait for them."""

    sent: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def forwarded(self) -> None:
        with self._changed:
            self.sent += 1
            self._changed.notify_all()

    def forward_dropped(self, reason: str) -> None:
        assert reason in FORWARDS_DROPPED
        with self._changed:
            self.dropped[reason] += 1
            self._changed.notify_all()

    def wait_for(self, bodies: int) -> None:
        """Return when this many bodies were sent or dropped."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: self.sent + self.dropped.total() >= bodies, WITHIN_S
            ), self


@contextmanager
def forwarding(to: To, first_delay_s: float = 0.0) -> Iterator[tuple[Forwarder, ForwardCounts]]:
    """Run a forwarder that retries at once; close it at the end."""
    counts = ForwardCounts()
    forwarder = Forwarder(to, counts, jitter=lambda: 0.5, first_delay_s=first_delay_s)
    try:
        yield forwarder, counts
    finally:
        forwarder.close(grace_s=WITHIN_S)


def forward(to: Destination, *bodies: Body, first_delay_s: float = 0.0) -> ForwardCounts:
    """Forward these bodies and return the counts when each was sent or dropped."""
    with forwarding(destination(to.url), first_delay_s) as (forwarder, counts):
        for body in bodies:
            forwarder.forward(body)
        counts.wait_for(len(bodies))
    return counts
