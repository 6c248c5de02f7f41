"""Parses an OTLP body to protobuf messages of bounded size."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agent.errors import PayloadInvalid, PayloadTooLarge
from agent.sources.otlp.limits import (
    MAX_PIECE_PARSED_BYTES,
    MIB,
    PIECE_BYTES,
    PIECE_SPANS,
)
from agent.sources.otlp.pieces import Piece, fits, malformed, split

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
CONTENT_TYPES = frozenset((PROTOBUF, JSON))


@dataclass(frozen=True, slots=True)
class Body:
    """The bytes of an export as they were received; forwarding sends these."""

    content: bytes
    content_type: str = PROTOBUF
    gzipped: bool = False


_GZIP = 31  # zlib's window bits for a gzip header and trailer
# zlib copies the rest of a chunk when a member ends, and a body may hold millions of members.
_GZIP_CHUNK_BYTES = 16 * 1024
_GZIP_CHUNKS_A_STEP = 4096


@dataclass(frozen=True, slots=True)
class Parsed:
    """A message, and how many of its spans and resources could not be read.

    `continues`: its first resource is the last of the message before, of the same body.
    """

    message: ExportTraceServiceRequest
    unreadable_spans: int = 0
    unreadable_resources: int = 0
    continues: bool = False

    @property
    def spans(self) -> int:
        """How many spans the message has."""
        return sum(
            len(scope_spans.spans)
            for resource_spans in self.message.resource_spans
            for scope_spans in resource_spans.scope_spans
        )


def gunzip(body: bytes | bytearray, plain: bytearray, limit_bytes: int) -> Iterator[int]:
    """Append the plain bytes of a gzip body of one or several members, never over the limit.

    Yields how many came since the last time. Raises PayloadInvalid and PayloadTooLarge.
    """
    stream, at, chunks, told_bytes = zlib.decompressobj(_GZIP), 0, 0, 0
    while at < len(body):
        if stream.eof:
            stream = zlib.decompressobj(_GZIP)
        chunk = body[at : at + _GZIP_CHUNK_BYTES]
        try:
            plain += stream.decompress(chunk, limit_bytes - len(plain) + 1)
        except zlib.error as error:
            raise PayloadInvalid(f"the body is not gzip: {error}") from error
        if len(plain) > limit_bytes:
            raise PayloadTooLarge(
                f"the body is over {limit_bytes} bytes after decompression; send smaller batches"
            )
        at += len(chunk) - len(stream.unused_data)
        chunks += 1
        if len(plain) - told_bytes >= MIB or chunks % _GZIP_CHUNKS_A_STEP == 0:
            yield len(plain) - told_bytes
            told_bytes = len(plain)
    if body and not stream.eof:
        raise PayloadInvalid("the gzip body is cut off")


def parse(body: bytes) -> Parsed:
    """The message of a protobuf body of at most the size of a piece. Raises PayloadInvalid."""
    try:
        return Parsed(ExportTraceServiceRequest.FromString(body))
    except DecodeError as error:
        raise malformed(str(error)) from error


def parse_pieces(body: bytes | bytearray) -> Iterator[tuple[bytes, Parsed]]:
    """The plain bytes and message of each piece of a protobuf body.

    Raises PayloadInvalid and PayloadTooLarge.
    """
    if len(body) <= PIECE_BYTES:
        content = bytes(body)
        parsed = parse(content)
        if parsed.spans <= PIECE_SPANS:
            yield content, parsed
            return
    for piece in split(body):
        yield piece.content, _parse_piece(piece)


def check(body: bytes | bytearray) -> Iterator[int]:
    """Parse a large body once to its end, so that none of a bad one is stored; yields zeros.

    Raises PayloadInvalid and PayloadTooLarge.
    """
    if len(body) > PIECE_BYTES:
        for piece in split(body):
            _parse_piece(piece)
            yield 0


def _parse_piece(piece: Piece) -> Parsed:
    if not fits(piece.content, MAX_PIECE_PARSED_BYTES):
        raise PayloadTooLarge(
            f"some spans take over {MAX_PIECE_PARSED_BYTES} bytes when they are read; "
            "send fewer attributes"
        )
    message = parse(piece.content).message
    return Parsed(message, piece.large_spans, piece.large_resources, piece.continues)
