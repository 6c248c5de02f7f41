"""Reads a large, compressed or JSON body step by step, so that other work comes between."""

from collections.abc import Callable, Iterator

from agent.catalog.reasons import SpanRejected, ValueDropped
from agent.sources.otlp.body import Body
from agent.sources.otlp.freed_memory import give_back_now
from agent.sources.otlp.json_payload import json_bytes_taken, parse_json_pieces
from agent.sources.otlp.limits import (
    MAX_BODY_BYTES,
    MAX_JSON_BYTES,
    MIB,
    PIECE_BYTES,
    PIECES_TAKE_BYTES,
)
from agent.sources.otlp.payload import JSON, PROTOBUF, Parsed, check, gunzip, parse_pieces
from agent.sources.otlp.sampled_spans import MARK, sampled_part
from agent.sources.otlp.span_reader import ExportContent, SpanReader


class LargeBody:
    """One body. After its last step `sampled` is what is forwarded of it."""

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
