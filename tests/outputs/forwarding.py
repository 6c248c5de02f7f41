"""A forwarder at work, and what it reports."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from agent.catalog.reasons import FORWARDS_DROPPED
from agent.outputs.otlp_forwarder import Destination as To
from agent.outputs.otlp_forwarder import Forwarder, destination
from tests.outputs.otlp_destinations import WITHIN_S, Destination

PROTOBUF = "application/x-protobuf"
JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Body:
    """A body as the receiver hands it over."""

    content: bytes
    content_type: str = PROTOBUF
    gzipped: bool = False


@dataclass(slots=True)
class ForwardCounts:
    """What the forwarder reports, and a way to wait for it."""

    taken: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def forwarded(self) -> None:
        with self._changed:
            self.taken += 1
            self._changed.notify_all()

    def forward_dropped(self, reason: str) -> None:
        assert reason in FORWARDS_DROPPED
        with self._changed:
            self.dropped[reason] += 1
            self._changed.notify_all()

    def wait_for(self, bodies: int) -> None:
        """Return when so many bodies have come to an end."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: self.taken + self.dropped.total() >= bodies, WITHIN_S
            ), self


@contextmanager
def forwarding(to: To, first_delay_s: float = 0.0) -> Iterator[tuple[Forwarder, ForwardCounts]]:
    """A forwarder that tries again at once, stopped without grace on the way out."""
    counts = ForwardCounts()
    forwarder = Forwarder(to, counts, jitter=lambda: 0.5, first_delay_s=first_delay_s)
    try:
        yield forwarder, counts
    finally:
        forwarder.close(grace_s=WITHIN_S)


def forward(to: Destination, *bodies: Body, first_delay_s: float = 0.0) -> ForwardCounts:
    """What is reported when all these bodies have come to an end."""
    with forwarding(destination(to.url), first_delay_s) as (forwarder, counts):
        for body in bodies:
            forwarder.forward(body)
        counts.wait_for(len(bodies))
    return counts
