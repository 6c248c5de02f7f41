"""Receives exports for both transports: reads one, stores it, and only then acknowledges it."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from agent.catalog.reasons import ExportRefused, SpanRejected, ValueDropped
from agent.errors import PayloadInvalid, StoreUnavailable
from agent.records.request import RequestRecord
from agent.sources.otlp.freed_memory import give_back_now
from agent.sources.otlp.json_payload import json_bytes_taken, parse_json_pieces
from agent.sources.otlp.limits import (
    MAX_BODY_BYTES,
    MAX_JSON_BYTES,
    MIB,
    PIECE_BYTES,
    PIECE_SPANS,
    PIECES_TAKE_BYTES,
    STORED_WITHIN_S,
)
from agent.sources.otlp.payload import (
    JSON,
    PROTOBUF,
    Body,
    Parsed,
    check,
    gunzip,
    parse,
    parse_pieces,
)
from agent.sources.otlp.room import Place, Room
from agent.sources.otlp.sampled_spans import MARK, sampled_part
from agent.sources.otlp.span_reader import ExportContent, SpanReader

# Two, so that the second takes pieces of other bodies while the first unpacks one.
READERS = 2
_NO_PRECEDENCE = nullcontext()


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


def _hold_nothing(_size_bytes: int) -> None:
    """Take no memory from the room: the caller has bounded it."""


class Receiver:
    """Takes bodies from any transport.

    `accept` returns when an export's records are committed; `forward` must not block and gets the
    spans that the proxy's clients sample, or all without `client_sampling`; None forwards nothing.
    `now` gives Unix seconds. `precedence` is entered while a body is read and stored.
    """

    def __init__(
        self,
        reader: SpanReader,
        accept: Accept,
        forward: Forward | None,
        counter: ExportCounter,
        now: Callable[[], float],
        *,
        client_sampling: bool = True,
        precedence: AbstractContextManager[object] = _NO_PRECEDENCE,
    ) -> None:
        self._reader = reader
        self._client_sampling = client_sampling
        self._accept = accept
        self._forward = forward
        self._counter = counter
        self._now = now
        self._precedence = precedence
        self._room = Room()
        self._finishing: set[asyncio.Future[None]] = set()
        self._stopping = False
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="otlp-reader")

    @property
    def fill(self) -> float:
        """The share of the memory of all bodies that is held."""
        return self._room.fill

    def place(self) -> AbstractContextManager[Place]:
        """A place in the memory that all bodies share, until the body is finished."""
        return self._room.place()

    def stop(self) -> None:
        """Read no further pieces of large bodies, and wait no longer for bodies that arrive.

        Their senders are asked to send again.
        """
        self._stopping = True
        self._room.stop()

    async def close(self) -> None:
        """Wait for running exports, and end the threads that read large bodies."""
        self.stop()
        await asyncio.gather(*self._finishing, return_exceptions=True)
        await asyncio.to_thread(self._readers.shutdown)

    async def take(self, body: Body, hold: Callable[[int], None] = _hold_nothing) -> ExportResult:
        """Store the spans of a body; returns how many were refused.

        Raises PayloadInvalid, PayloadTooLarge (do not send again), StoreUnavailable and what
        `hold` raises when it has no memory for what a large body takes (send again).
        """
        with self._precedence:
            return await self._take(body, hold)

    async def _take(self, body: Body, hold: Callable[[int], None]) -> ExportResult:
        if not _is_large(body):
            parsed = parse(body.content)
            # A span may have few bytes, and thousands of spans would keep all others waiting.
            if parsed.spans <= PIECE_SPANS:
                export = self._reader.read(parsed.message, self._now())
                return await self._complete(export, self._sampled(body))
        return await self._take_large(body, hold)

    async def _take_large(self, body: Body, hold: Callable[[int], None]) -> ExportResult:
        """Store a body piece by piece; pieces stored before a failure are known when it returns."""
        large = _LargeBody(body, self._reader, self._now, client_sampling=self._client_sampling)
        steps = large.steps()
        loop = asyncio.get_running_loop()
        before, last, until = ExportContent(), ExportContent(), loop.time() + STORED_WITHIN_S
        while (step := await loop.run_in_executor(self._readers, next, steps, None)) is not None:
            self._check_time(until - loop.time())
            if isinstance(step, int):
                hold(step)
            else:
                if last.records:
                    await self._finish(self._store(last))
                before.add_counts(last)
                last = step
        last.add_counts(before)
        return await self._complete(last, large.sampled)

    async def _complete(self, export: ExportContent, sampled: Body | None) -> ExportResult:
        """Store the last records of a body, count all its spans and forward it."""
        if export.rejected_spans and not export.readable_spans:
            raise PayloadInvalid(
                f"none of the {export.rejected_spans} spans can be read: {_reasons(export)}"
            )
        await self._finish(self._store_and_count(export, sampled))
        if export.rejected_spans:
            return ExportResult(export.rejected_spans, f"refused: {_reasons(export)}")
        return ExportResult()

    async def _store(self, export: ExportContent) -> None:
        if refused := await self._accept(export.records):
            export.rejected[SpanRejected.UNSTORABLE] += refused

    async def _store_and_count(self, export: ExportContent, sampled: Body | None) -> None:
        await self._store(export)
        self._counter.exported(export)
        if self._forward is not None and sampled is not None:
            self._forward(sampled)

    def _check_time(self, left_s: float) -> None:
        if self._stopping:
            raise StoreUnavailable("the agent is stopping; send the spans again in a moment")
        if left_s < 0:
            raise StoreUnavailable(
                f"the spans are not stored after {STORED_WITHIN_S:.0f} s; send smaller batches"
            )

    async def _finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Do it to its end: rows must be counted even if their sender leaves now."""
        finishing = asyncio.ensure_future(work)
        self._finishing.add(finishing)
        finishing.add_done_callback(self._finished)
        try:
            await asyncio.shield(finishing)
        finally:
            # A failure holds this frame, which would keep the body until a garbage collection.
            del finishing

    def _finished(self, finishing: "asyncio.Future[None]") -> None:
        self._finishing.discard(finishing)
        if not finishing.cancelled():
            # asyncio logs an exception that nobody retrieves, as when the sender has left.
            finishing.exception()

    def refused(self, reason: ExportRefused) -> None:
        """Count a body that a transport or `take` refused."""
        self._counter.refused(reason)

    def _sampled(self, body: Body) -> Body | None:
        """A small body as received where all its spans are sampled; None where none is."""
        if not self._client_sampling:
            return body
        sampled = sampled_part(body.content, body.content_type)
        if sampled is body.content:
            return body
        return Body(sampled, body.content_type) if sampled else None


class _LargeBody:
    """Reads a large, compressed or JSON body step by step, so that other work comes between.

    After its last step `sampled` is what is forwarded of it.
    """

    def __init__(
        self, body: Body, reader: SpanReader, now: Callable[[], float], *, client_sampling: bool
    ) -> None:
        self._body = body
        self._reader = reader
        self._now = now
        self._client_sampling = client_sampling
        self.sampled: Body | None = body

    def steps(self) -> Iterator[int | ExportContent]:
        """Bytes of memory that a step took, or spans of a whole body that is valid.

        Raises PayloadInvalid and PayloadTooLarge before it yields spans.
        """
        content: bytes | bytearray = self._body.content
        if self._body.gzipped:
            content = bytearray()
            is_json = self._body.content_type == JSON
            limit_bytes = MAX_JSON_BYTES if is_json else MAX_BODY_BYTES
            yield from gunzip(self._body.content, content, limit_bytes)
        if len(content) <= PIECE_BYTES:
            yield from self._spans(content)
            return
        yield PIECES_TAKE_BYTES
        yield from self._spans(content)
        del content
        give_back_now()

    def _spans(self, content: bytes | bytearray) -> Iterator[int | ExportContent]:
        is_json = self._body.content_type == JSON
        yield from self._json(content) if is_json else self._protobuf(content)

    def _json(self, content: bytes | bytearray) -> Iterator[int | ExportContent]:
        taken_bytes = json_bytes_taken(content)
        if taken_bytes >= MIB:
            yield taken_bytes
        yield from map(self._read, parse_json_pieces(content))
        if self._client_sampling:
            plain = bytes(content)
            sampled = sampled_part(plain, JSON)
            if sampled is not plain:
                self.sampled = Body(sampled, JSON) if sampled else None

    def _protobuf(self, content: bytes | bytearray) -> Iterator[int | ExportContent]:
        yield from check(content)
        marked = self._client_sampling and MARK in content
        kept: list[bytes] = []
        dropped = False
        for piece, parsed in parse_pieces(content):
            if marked:
                kept.append(sampled_part(piece, PROTOBUF))
                dropped = dropped or kept[-1] is not piece
            yield self._read(parsed)
        if dropped:
            sampled = b"".join(kept)
            self.sampled = Body(sampled) if sampled else None

    def _read(self, parsed: Parsed) -> ExportContent:
        export = self._reader.read(parsed.message, self._now(), continues=parsed.continues)
        if parsed.unreadable_spans:
            export.rejected[SpanRejected.UNREADABLE] += parsed.unreadable_spans
        if parsed.unreadable_resources:
            export.screened["resource", ValueDropped.UNREADABLE] += parsed.unreadable_resources
        return export


def _is_large(body: Body) -> bool:
    """Whether it is read in a thread; JSON takes ten times as long as protobuf."""
    return len(body.content) > PIECE_BYTES or body.gzipped or body.content_type == JSON


def _reasons(export: ExportContent) -> str:
    return ", ".join(f"{count} by {reason}" for reason, count in sorted(export.rejected.items()))
