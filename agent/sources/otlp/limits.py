"""What one export may hold and what all exports may take together; `docs/otlp.md` explains it.

The agent lives in 512 MiB and takes 140 of them at rest. What is below takes 250 MiB at most.
"""

from collections.abc import Iterator
from contextlib import contextmanager

KIB = 1024
MIB = 1024 * KIB

# One body, as it comes and after decompression: gRPC's own default.
MAX_BODY_BYTES = 4 * MIB
# Messages that gRPC receives at a time. gRPC does not say how long a message is before all of it is
# in memory.
MAX_GRPC_READING = 12
# Calls of one connection; its others wait at the sender. gRPC holds up to 64 KiB of each.
MAX_GRPC_CALLS = 4

# Python's parser of JSON cannot be interrupted: it takes 0.3 s at most for so many values, and
# 77 MB.
MAX_JSON_VALUES = 550_000
# Two bytes can encode an empty span, which takes 168 bytes in memory.
MAX_PARSED_BYTES = 96 * MIB

# A body up to this size is parsed in the event loop, others one by one in a thread.
SMALL_PROTOBUF_BYTES = 512 * KIB
# A body with more bytes that can begin a span is not parsed there: 1,500 spans of vLLM have them.
SMALL_SPAN_TAGS = 32_768
# So many records are stored at a time, and those of other senders come between.
BATCH_SPANS = 2048
# A record that waits to be stored, beside its texts, which are no longer than in the body. Measured
# with tracemalloc on Python 3.11: an empty span takes 530 bytes, vLLM's 800 with its texts.
RECORD_BYTES = 530

# All bodies in work, plain and compressed, of both protocols, and their records. Large ones leave a
# part to those of a usual size: vLLM sends 512 spans, which are 0.25 MiB.
MAX_BYTES_HELD = 64 * MIB
KEPT_FOR_SMALL_BYTES = 8 * MIB
SMALL_BYTES = 1 * MIB

# The time for a body to arrive. OpenTelemetry's exporters give up after 10 s. A message over gRPC
# has less, because others wait until it is complete; the wait for its turn has the whole time.
BODY_WITHIN_S = 10.0
GRPC_MESSAGE_WITHIN_S = 4.0
# No sender waits longer for an answer, so storing the rest of a body is of no use.
STORED_WITHIN_S = 60.0


class NoRoom(Exception):
    """Other exports take all the memory; the same export may be sent again."""


class BodyTooSlow(Exception):
    """A sender took too long to send its body."""

    def __init__(self) -> None:
        super().__init__("the body took too long to arrive; send smaller batches")


class Reservation:
    """The part of a memory budget that one export holds."""

    def __init__(self, budget: "MemoryBudget") -> None:
        self._budget = budget
        self.held_bytes = 0

    def add(self, size_bytes: int) -> None:
        """Hold more memory. Raises NoRoom."""
        self._budget.raise_if_full(size_bytes, is_small=self.held_bytes + size_bytes <= SMALL_BYTES)
        self._budget.held_bytes += size_bytes
        self.held_bytes += size_bytes


class MemoryBudget:
    """The memory for the exports of all senders, over all protocols."""

    def __init__(
        self, capacity_bytes: int = MAX_BYTES_HELD, kept_bytes: int = KEPT_FOR_SMALL_BYTES
    ) -> None:
        self._capacity_bytes = capacity_bytes
        self._for_large_bytes = capacity_bytes - kept_bytes
        self.held_bytes = 0

    @property
    def fill(self) -> float:
        """The share of the memory that is held, from 0 to 1."""
        return self.held_bytes / self._capacity_bytes

    @contextmanager
    def reserve(self) -> Iterator[Reservation]:
        """The memory of one export, given back at the end."""
        reservation = Reservation(self)
        try:
            yield reservation
        finally:
            self.held_bytes -= reservation.held_bytes

    def raise_if_full(self, size_bytes: int, *, is_small: bool) -> None:
        """Raise NoRoom if an export cannot hold more; large ones leave a part to small ones."""
        limit_bytes = self._capacity_bytes if is_small else self._for_large_bytes
        if self.held_bytes + size_bytes > limit_bytes:
            raise NoRoom(
                f"{self.held_bytes} bytes of spans are being stored; send again in a moment"
            )
