"""Receives exports for both transports: reads one, stores it, and only then acknowledges it.

Responses to failures: opentelemetry-proto docs/specification.md.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from agent.catalog.reasons import ExportRefused, SpanRejected, ValueDropped
from agent.errors import AgentError, PayloadInvalid, PayloadTooLarge, StoreUnavailable
from agent.records.engine import LoadingSpan
from agent.records.request import RequestRecord
from agent.settings.access import AccessRefusal
from agent.sources.otlp.limits import (
    BATCH_SPANS,
    RECORD_BYTES,
    SMALL_PROTOBUF_BYTES,
    SMALL_SPAN_TAGS,
    STORED_WITHIN_S,
    BodyTooSlow,
    MemoryBudget,
    NoRoom,
    Reservation,
)
from agent.sources.otlp.payload import JSON, Body, gunzip, parse, parse_json, sampled_part
from agent.sources.otlp.span_reader import ExportContent, SpanReader

# One, so that only one body at a time has its messages in memory.
READERS = 1
_NO_PRECEDENCE = nullcontext()
# Field 2 of a scope's spans.
_SPAN_TAG = b"\x12"


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


def _ignore(_spans: Sequence[LoadingSpan]) -> None:
    """Take spans of starts that nobody follows."""


class Receiver:
    """Takes bodies from any transport.

    `accept` returns when an export's records are committed; `forward` must not block and gets the
    spans that the proxy's clients sample, or all without `client_sampling`; None forwards nothing.
    `on_loading` gets spans of starts. `now` gives Unix seconds. `precedence` is entered while a
    body is read and stored.
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
        on_loading: Callable[[Sequence[LoadingSpan]], None] = _ignore,
        precedence: AbstractContextManager[object] = _NO_PRECEDENCE,
    ) -> None:
        self._reader = reader
        self._client_sampling = client_sampling
        self._on_loading = on_loading
        self._accept = accept
        self._forward = forward
        self._counter = counter
        self._now = now
        self._precedence = precedence
        self._memory = MemoryBudget()
        self._finishing: set[asyncio.Future[None]] = set()
        self._stopping = False
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="otlp-reader")

    @property
    def fill(self) -> float:
        """The share of the memory of all bodies that is held."""
        return self._memory.fill

    def reserve(self) -> AbstractContextManager[Reservation]:
        """A part of the memory that all bodies share, until the body is finished."""
        return self._memory.reserve()

    def stop(self) -> None:
        """Store no further records of large bodies; their senders are asked to send again."""
        self._stopping = True

    async def close(self) -> None:
        """Wait for running exports, and end the threads that read large bodies."""
        self.stop()
        await asyncio.gather(*self._finishing, return_exceptions=True)
        await asyncio.to_thread(self._readers.shutdown)

    async def take(self, body: Body, memory: Reservation | None = None) -> ExportResult:
        """Store the spans of a body; returns how many were refused.

        `memory` holds the body already, and takes what a large one needs more; None has no limit.
        Raises PayloadInvalid, PayloadTooLarge (do not send again), StoreUnavailable and NoRoom.
        """
        with self._precedence:
            return await self._take(body, memory)

    async def _take(self, body: Body, memory: Reservation | None) -> ExportResult:
        loop = asyncio.get_running_loop()
        until = loop.time() + STORED_WITHIN_S
        if not _is_large(body):
            return await self._complete(*self._read(body), until)
        plain = body
        if body.gzipped:
            content = await loop.run_in_executor(self._readers, gunzip, body.content)
            if memory is not None:
                memory.add(len(content))
            plain = Body(content, body.content_type)
        export, sampled = await loop.run_in_executor(self._readers, self._read, plain)
        self._check_time(until)
        if sampled is plain:
            sampled = body
        if memory is not None:
            memory.add(len(export.records) * RECORD_BYTES)
        return await self._complete(export, sampled, until)

    def _read(self, body: Body) -> tuple[ExportContent, Body | None]:
        """The spans of a plain body, and what is forwarded of it."""
        parsed = (parse_json if body.content_type == JSON else parse)(body.content)
        export = self._reader.read(parsed.message, self._now())
        if parsed.unreadable_spans:
            export.rejected[SpanRejected.UNREADABLE] += parsed.unreadable_spans
        if parsed.unreadable_resources:
            export.screened["resource", ValueDropped.UNREADABLE] += parsed.unreadable_resources
        return export, self._sampled(body)

    async def _complete(
        self, export: ExportContent, sampled: Body | None, until: float
    ) -> ExportResult:
        """Store the records of a body, count its spans and forward it."""
        if export.rejected_spans and not export.readable_spans:
            raise PayloadInvalid(
                f"none of the {export.rejected_spans} spans can be read: {_reasons(export)}"
            )
        await self._finish(self._store_and_count(export, sampled, until))
        if export.rejected_spans:
            return ExportResult(export.rejected_spans, f"refused: {_reasons(export)}")
        return ExportResult()

    async def _store_and_count(
        self, export: ExportContent, sampled: Body | None, until: float
    ) -> None:
        records = export.records
        for start in range(0, max(len(records), 1), BATCH_SPANS):
            if start:
                self._check_time(until)
            if refused := await self._accept(records[start : start + BATCH_SPANS]):
                export.rejected[SpanRejected.UNSTORABLE] += refused
        self._counter.exported(export)
        self._on_loading(export.loading)
        if self._forward is not None and sampled is not None:
            self._forward(sampled)

    def _check_time(self, until: float) -> None:
        if self._stopping:
            raise StoreUnavailable("the agent is stopping; send the spans again in a moment")
        if asyncio.get_running_loop().time() > until:
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
        """A body as received if all its spans are sampled; None if none is."""
        if not self._client_sampling:
            return body
        sampled = sampled_part(body.content, body.content_type)
        if sampled is body.content:
            return body
        return Body(sampled, body.content_type) if sampled else None


def _is_large(body: Body) -> bool:
    """Whether it is read in a thread; JSON takes ten times as long as protobuf."""
    if body.gzipped or body.content_type == JSON or len(body.content) > SMALL_PROTOBUF_BYTES:
        return True
    return body.content.count(_SPAN_TAG) > SMALL_SPAN_TAGS


def _reasons(export: ExportContent) -> str:
    return ", ".join(f"{count} by {reason}" for reason, count in sorted(export.rejected.items()))


@dataclass(frozen=True, slots=True)
class Refusal:
    """One failure: its reason for counting, HTTP status, gRPC code, and whether to send again."""

    reason: ExportRefused
    http_status: int
    grpc_code: int
    retryable: bool = False


# google.rpc.Code
INVALID_ARGUMENT = 3
NOT_FOUND = 5
PERMISSION_DENIED = 7
RESOURCE_EXHAUSTED = 8
UNAVAILABLE = 14
UNAUTHENTICATED = 16

INVALID = Refusal(ExportRefused.INVALID, 400, INVALID_ARGUMENT)
NO_SUCH_PATH = Refusal(ExportRefused.NO_SUCH_PATH, 404, NOT_FOUND)
METHOD = Refusal(ExportRefused.METHOD, 405, INVALID_ARGUMENT)
TOO_LARGE = Refusal(ExportRefused.TOO_LARGE, 413, RESOURCE_EXHAUSTED)
CONTENT_TYPE = Refusal(ExportRefused.CONTENT_TYPE, 415, INVALID_ARGUMENT)
CONTENT_ENCODING = Refusal(ExportRefused.CONTENT_ENCODING, 415, INVALID_ARGUMENT)
BUSY = Refusal(ExportRefused.BUSY, 503, UNAVAILABLE, retryable=True)
# A sender tries again after RESOURCE_EXHAUSTED only with a delay, and Python's exporter over HTTP
# after 503, but not after 429.
NO_ROOM = Refusal(ExportRefused.NO_ROOM, 503, RESOURCE_EXHAUSTED, retryable=True)
TOO_SLOW = Refusal(ExportRefused.TOO_SLOW, 503, UNAVAILABLE, retryable=True)


ACCESS_REFUSALS = {
    AccessRefusal.TOKEN: Refusal(ExportRefused.TOKEN, 401, UNAUTHENTICATED),
    AccessRefusal.HOST: Refusal(ExportRefused.HOST, 421, PERMISSION_DENIED),
}

REFUSALS: dict[type[Exception], Refusal] = {
    PayloadInvalid: INVALID,
    PayloadTooLarge: TOO_LARGE,
    StoreUnavailable: BUSY,
    NoRoom: NO_ROOM,
    BodyTooSlow: TOO_SLOW,
}
REFUSED = tuple(REFUSALS)


def public(error: Exception) -> str:
    """What the sender may read of an error of REFUSED."""
    return error.public if isinstance(error, AgentError) else str(error)


def response(result: ExportResult) -> ExportTraceServiceResponse:
    """The message for a full or partial success; partial_success is unset on a full one."""
    message = ExportTraceServiceResponse()
    if result.rejected_spans:
        message.partial_success.rejected_spans = result.rejected_spans
        message.partial_success.error_message = result.message
    return message
