"""What both transports do with an export: read it, have it stored, and only then say so."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from agent.catalog.reasons import ExportRefused, SpanRejected, ValueDropped
from agent.errors import PayloadInvalid, StoreUnavailable
from agent.records.request import RequestRecord
from agent.sources.otlp.payload import JSON, MAX_BODY_BYTES, PROTOBUF, gunzip, parse
from agent.sources.otlp.span_reader import ExportContent, SpanReader

# Bodies of all senders together; more are told to come back. Parsed, a body takes several times
# its size, so this bounds the memory that strangers can make the agent take.
MAX_BYTES_IN_HAND = 2 * MAX_BODY_BYTES

# A larger body is read in a thread, so that nobody else waits for it. So is JSON, which takes ten
# times as long.
INLINE_BODY_BYTES = 512 * 1024

# vLLM's exporter gives up after 10 s in all, so a long delay would lose the batch.
RETRY_AFTER_S = 1


@dataclass(frozen=True, slots=True)
class Body:
    """A body as it came: forwarding passes on these bytes."""

    content: bytes
    content_type: str = PROTOBUF
    gzipped: bool = False


@dataclass(frozen=True, slots=True)
class ExportResult:
    """What a sender is told of spans that cannot be taken; both are empty on full success."""

    rejected_spans: int = 0
    message: str = ""


class ExportCounter(Protocol):
    """Where the receiver reports what it saw."""

    def exported(self, intake: ExportContent) -> None:
        """An export was read and its records are stored."""

    def refused(self, reason: ExportRefused) -> None:
        """A whole body was refused."""


Accept = Callable[[Sequence[RequestRecord]], Awaitable[None]]
Forward = Callable[[Body], None]


class Receiver:
    """Takes bodies from any transport.

    `accept` returns when an export's records are committed; `forward` must not block; `now` gives
    Unix seconds.
    """

    def __init__(
        self,
        reader: SpanReader,
        accept: Accept,
        forward: Forward,
        tell: ExportCounter,
        now: Callable[[], float],
    ) -> None:
        self._reader = reader
        self._accept = accept
        self._forward = forward
        self._tell = tell
        self._now = now
        self._bytes_in_hand = 0
        self._finishing: set[asyncio.Future[None]] = set()
        # One at a time: what a small body can unpack to is bounded once, not once a sender.
        self._large = ThreadPoolExecutor(max_workers=1, thread_name_prefix="otlp-reader")

    @contextmanager
    def room(self) -> Iterator[Callable[[int], None]]:
        """A function that holds room for so many more bytes, until the body has been dealt with.

        It raises StoreUnavailable where all senders together have too much in hand.
        """
        held_bytes = 0

        def hold(size_bytes: int) -> None:
            nonlocal held_bytes
            if self._bytes_in_hand + size_bytes > MAX_BYTES_IN_HAND:
                raise StoreUnavailable(
                    f"{self._bytes_in_hand} bytes of spans are in hand; send again in a moment"
                )
            held_bytes += size_bytes
            self._bytes_in_hand += size_bytes

        try:
            yield hold
        finally:
            self._bytes_in_hand -= held_bytes

    async def close(self) -> None:
        """Wait for what is being stored, and end the thread that reads large bodies."""
        await asyncio.gather(*self._finishing, return_exceptions=True)
        self._large.shutdown()

    async def take(self, body: Body) -> ExportResult:
        """Store what the body holds, and tell what could not be taken.

        Raises PayloadInvalid, PayloadTooLarge (send no more of these) and StoreUnavailable (send
        it again).
        """
        if _takes_long(body):
            intake = await asyncio.get_running_loop().run_in_executor(self._large, self._read, body)
        else:
            intake = self._read(body)
        if intake.rejected_spans and not intake.records and not intake.passed:
            raise PayloadInvalid(
                f"none of the {intake.rejected_spans} spans can be read: {_reasons(intake)}"
            )
        await self._store(intake, body)
        if intake.rejected_spans:
            return ExportResult(intake.rejected_spans, f"refused: {_reasons(intake)}")
        return ExportResult()

    async def _store(self, intake: ExportContent, body: Body) -> None:
        finishing = asyncio.ensure_future(self._finish(intake, body))
        self._finishing.add(finishing)
        finishing.add_done_callback(self._finished)
        try:
            # A sender that leaves now must not leave rows behind that nobody counts.
            await asyncio.shield(finishing)
        finally:
            # A failure knows this frame, and would keep the body until the garbage collector comes.
            del finishing

    async def _finish(self, intake: ExportContent, body: Body) -> None:
        await self._accept(intake.records)
        self._tell.exported(intake)
        self._forward(body)

    def _finished(self, finishing: "asyncio.Future[None]") -> None:
        self._finishing.discard(finishing)
        if not finishing.cancelled():
            # Asked for, so that a failure whose sender has left is no surprise to asyncio.
            finishing.exception()

    def refused(self, reason: ExportRefused) -> None:
        """Count a body that a transport or `take` turned away."""
        self._tell.refused(reason)

    def _read(self, body: Body) -> ExportContent:
        content = gunzip(body.content) if body.gzipped else body.content
        parsed = parse(content, body.content_type)
        intake = self._reader.read(parsed.message, self._now())
        if parsed.unreadable_spans:
            intake.rejected[SpanRejected.UNREADABLE] += parsed.unreadable_spans
        if parsed.unreadable_resources:
            intake.screened["resource", ValueDropped.UNREADABLE] += parsed.unreadable_resources
        return intake


def _takes_long(body: Body) -> bool:
    return len(body.content) > INLINE_BODY_BYTES or body.gzipped or body.content_type == JSON


def _reasons(intake: ExportContent) -> str:
    return ", ".join(f"{count} by {reason}" for reason, count in sorted(intake.rejected.items()))
