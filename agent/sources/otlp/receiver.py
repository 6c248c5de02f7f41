"""Receives exports for both transports: reads one, stores it, and only then acknowledges it."""

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
from agent.sources.otlp.sampled_spans import sampled_part
from agent.sources.otlp.span_reader import ExportContent, SpanReader

# Bodies of all senders together; further senders are asked to send again later. A parsed body takes
# several times its size, so this limits the memory that senders can make the agent take.
MAX_BYTES_HELD = 2 * MAX_BODY_BYTES

# A larger body is read in a thread, so that other senders do not wait for it. So is JSON, which
# takes ten times as long.
INLINE_BODY_BYTES = 512 * 1024

# vLLM's exporter gives up after 10 s in all, so a long delay would lose the batch.
RETRY_AFTER_S = 1


@dataclass(frozen=True, slots=True)
class Body:
    """A body as received: forwarding sends these bytes."""

    content: bytes
    content_type: str = PROTOBUF
    gzipped: bool = False


@dataclass(frozen=True, slots=True)
class ExportResult:
    """The refused spans of an export, for the response; both are empty on full success."""

    rejected_spans: int = 0
    message: str = ""


class ExportCounter(Protocol):
    """Counts exports. The meter of the outputs does; sources do not import outputs."""

    def exported(self, export: ExportContent) -> None:
        """An export was read and its records are stored."""

    def refused(self, reason: ExportRefused) -> None:
        """A whole body was refused."""


# Returns how many of the records can never be stored.
Accept = Callable[[Sequence[RequestRecord]], Awaitable[int]]
Forward = Callable[[Body], None]


class Receiver:
    """Takes bodies from any transport.

    `accept` returns when an export's records are committed; `forward` must not block and gets the
    spans that the proxy's clients sample, or all without `client_sampling`; `now` gives Unix
    seconds.
    """

    def __init__(
        self,
        reader: SpanReader,
        accept: Accept,
        forward: Forward,
        counter: ExportCounter,
        now: Callable[[], float],
        *,
        client_sampling: bool = True,
    ) -> None:
        self._reader = reader
        self._client_sampling = client_sampling
        self._accept = accept
        self._forward = forward
        self._counter = counter
        self._now = now
        self._bytes_held = 0
        self._finishing: set[asyncio.Future[None]] = set()
        # One thread, so that only one body at a time is unpacked, which can take much memory.
        self._large = ThreadPoolExecutor(max_workers=1, thread_name_prefix="otlp-reader")

    @contextmanager
    def room(self) -> Iterator[Callable[[int], None]]:
        """A function that reserves room for more bytes, until the body is finished.

        It raises StoreUnavailable where the bodies of all senders together are too large.
        """
        held_bytes = 0

        def hold(size_bytes: int) -> None:
            nonlocal held_bytes
            if self._bytes_held + size_bytes > MAX_BYTES_HELD:
                raise StoreUnavailable(
                    f"{self._bytes_held} bytes of spans are being stored; send again in a moment"
                )
            held_bytes += size_bytes
            self._bytes_held += size_bytes

        try:
            yield hold
        finally:
            self._bytes_held -= held_bytes

    async def close(self) -> None:
        """Wait for running exports, and end the thread that reads large bodies."""
        await asyncio.gather(*self._finishing, return_exceptions=True)
        self._large.shutdown()

    async def take(self, body: Body) -> ExportResult:
        """Store the spans of a body; returns how many were refused.

        Raises PayloadInvalid, PayloadTooLarge (do not send again) and StoreUnavailable (send
        again).
        """
        if _takes_long(body):
            loop = asyncio.get_running_loop()
            export, sampled = await loop.run_in_executor(self._large, self._read, body)
        else:
            export, sampled = self._read(body)
        if export.rejected_spans and not export.records and not export.passed:
            raise PayloadInvalid(
                f"none of the {export.rejected_spans} spans can be read: {_reasons(export)}"
            )
        await self._store(export, sampled)
        if export.rejected_spans:
            return ExportResult(export.rejected_spans, f"refused: {_reasons(export)}")
        return ExportResult()

    async def _store(self, export: ExportContent, sampled: Body | None) -> None:
        finishing = asyncio.ensure_future(self._finish(export, sampled))
        self._finishing.add(finishing)
        finishing.add_done_callback(self._finished)
        try:
            # Rows must be counted even if their sender leaves now.
            await asyncio.shield(finishing)
        finally:
            # A failure holds this frame, which would keep the body until a garbage collection.
            del finishing

    async def _finish(self, export: ExportContent, sampled: Body | None) -> None:
        if refused := await self._accept(export.records):
            export.rejected[SpanRejected.UNSTORABLE] += refused
        self._counter.exported(export)
        if sampled is not None:
            self._forward(sampled)

    def _finished(self, finishing: "asyncio.Future[None]") -> None:
        self._finishing.discard(finishing)
        if not finishing.cancelled():
            # asyncio logs an exception that nobody retrieves, as when the sender has left.
            finishing.exception()

    def refused(self, reason: ExportRefused) -> None:
        """Count a body that a transport or `take` refused."""
        self._counter.refused(reason)

    def _read(self, body: Body) -> tuple[ExportContent, Body | None]:
        """The content of a body, and what is forwarded of it."""
        content = gunzip(body.content) if body.gzipped else body.content
        parsed = parse(content, body.content_type)
        export = self._reader.read(parsed.message, self._now())
        if parsed.unreadable_spans:
            export.rejected[SpanRejected.UNREADABLE] += parsed.unreadable_spans
        if parsed.unreadable_resources:
            export.screened["resource", ValueDropped.UNREADABLE] += parsed.unreadable_resources
        return export, self._sampled(body, content)

    def _sampled(self, body: Body, content: bytes) -> Body | None:
        """The body as received where all its spans are sampled; None where none is."""
        if not self._client_sampling:
            return body
        sampled = sampled_part(content, body.content_type)
        if sampled is content:
            return body
        return Body(sampled, body.content_type) if sampled else None


def _takes_long(body: Body) -> bool:
    return len(body.content) > INLINE_BODY_BYTES or body.gzipped or body.content_type == JSON


def _reasons(export: ExportContent) -> str:
    return ", ".join(f"{count} by {reason}" for reason, count in sorted(export.rejected.items()))
