"""Parses an OTLP body to a protobuf message of bounded size."""

import zlib
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agent.errors import PayloadInvalid, PayloadTooLarge
from agent.sources.otlp.limits import MAX_BODY_BYTES, MAX_PARSED_BYTES, SMALL_PROTOBUF_BYTES
from agent.sources.otlp.parsed_size import fits, malformed

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


@dataclass(frozen=True, slots=True)
class Parsed:
    """A message, and how many of its spans and resources could not be read."""

    message: ExportTraceServiceRequest
    unreadable_spans: int = 0
    unreadable_resources: int = 0


def gunzip(body: bytes) -> bytes:
    """The plain bytes of a gzip body of one or several members, never over the limit.

    Raises PayloadInvalid and PayloadTooLarge.
    """
    plain, stream, at = bytearray(), zlib.decompressobj(_GZIP), 0
    while at < len(body):
        if stream.eof:
            stream = zlib.decompressobj(_GZIP)
        chunk = body[at : at + _GZIP_CHUNK_BYTES]
        try:
            plain += stream.decompress(chunk, MAX_BODY_BYTES - len(plain) + 1)
        except zlib.error as error:
            raise PayloadInvalid(f"the body is not gzip: {error}") from error
        if len(plain) > MAX_BODY_BYTES:
            raise PayloadTooLarge(
                f"the body is over {MAX_BODY_BYTES} bytes after decompression; send smaller batches"
            )
        at += len(chunk) - len(stream.unused_data)
    if body and not stream.eof:
        raise PayloadInvalid("the gzip body is cut off")
    return bytes(plain)


def parse(body: bytes) -> Parsed:
    """The message of a plain protobuf body. Raises PayloadInvalid and PayloadTooLarge."""
    if len(body) > SMALL_PROTOBUF_BYTES and not fits(body, MAX_PARSED_BYTES):
        raise PayloadTooLarge(
            f"the spans take over {MAX_PARSED_BYTES} bytes when they are read; send smaller batches"
        )
    try:
        return Parsed(ExportTraceServiceRequest.FromString(body))
    except DecodeError as error:
        raise malformed(str(error)) from error
