"""Parses an OTLP body to a protobuf message, within limits of size and memory."""

import json
import zlib
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agent.errors import PayloadInvalid, PayloadTooLarge
from agent.sources.otlp.weight import fits

# opentelemetry-proto docs/specification.md (2026): limit after decompression, 64 MiB recommended.
MAX_BODY_BYTES = 64 * 1024 * 1024

# Memory of a body's messages without their texts; 64 MiB of vLLM's spans take 160 MiB.
MAX_PARSED_BYTES = 384 * 1024 * 1024

# 64 MiB of vLLM's spans in JSON hold four million values. Python takes up to 240 bytes for one.
MAX_JSON_VALUES = 5_000_000

PROTOBUF = "application/x-protobuf"
JSON = "application/json"

_GZIP = 31  # zlib's window bits for a gzip header and trailer
# zlib copies the rest of a chunk when a member ends, and a body may hold millions of members.
_GZIP_CHUNK_BYTES = 16 * 1024

_HEX_IDS = (("traceId", 16), ("spanId", 8))

# The parts of a span that are read; errors in other parts do no harm.
_READ = ("name", "startTimeUnixNano", "endTimeUnixNano", "attributes", "status")


@dataclass(frozen=True, slots=True)
class Parsed:
    """A message, and how many of its spans and resources could not be read."""

    message: ExportTraceServiceRequest
    unreadable_spans: int = 0
    unreadable_resources: int = 0


def gunzip(body: bytes, limit_bytes: int = MAX_BODY_BYTES) -> bytes:
    """The plain bytes of a gzip body of one or several members, never more than the limit."""
    plain = bytearray()
    stream, at = zlib.decompressobj(_GZIP), 0
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
    if body and not stream.eof:
        raise PayloadInvalid("the gzip body is cut off")
    return bytes(plain)


def _parse_protobuf(body: bytes) -> Parsed:
    if not fits(body, MAX_PARSED_BYTES):
        raise PayloadTooLarge(
            f"the body takes over {MAX_PARSED_BYTES} bytes when it is read; send smaller batches"
        )
    try:
        return Parsed(ExportTraceServiceRequest.FromString(body))
    except DecodeError as error:
        raise PayloadInvalid(f"the body is no ExportTraceServiceRequest: {error}") from error


def _parse_json(body: bytes) -> Parsed:
    content = _json_object(body)
    export = _JsonExport()
    for resource_spans in export.objects(content, "resourceSpans"):
        export.add_resource(resource_spans)
    return Parsed(export.message, export.unreadable_spans, export.unreadable_resources)


def _json_object(body: bytes) -> Mapping[str, Any]:
    if sum(map(body.count, (b"{", b"[", b","))) > MAX_JSON_VALUES:
        raise PayloadTooLarge(
            f"the body holds over {MAX_JSON_VALUES} JSON values; send smaller batches"
        )
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise PayloadInvalid(f"the body is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise PayloadInvalid(f"the body holds a JSON {type(content).__name__}, not an object")
    return content


@dataclass(slots=True)
class _JsonExport:
    """Builds an export from JSON; unreadable parts are left out and counted."""

    message: ExportTraceServiceRequest = field(default_factory=ExportTraceServiceRequest)
    unreadable_spans: int = 0
    unreadable_resources: int = 0

    def objects(self, content: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
        """The objects in a list; any other value counts as an unreadable span."""
        found = content.get(key)
        if found is None:
            return []
        if not isinstance(found, list):
            self.unreadable_spans += 1
            return []
        objects = [item for item in found if isinstance(item, dict)]
        self.unreadable_spans += len(found) - len(objects)
        return objects

    def add_resource(self, resource_spans: Mapping[str, Any]) -> None:
        """Read a resource and its spans."""
        into = self.message.resource_spans.add()
        if not _fill(into.resource, resource_spans.get("resource") or {}):
            self.unreadable_resources += 1
        into_scope = into.scope_spans.add()
        for scope_spans in self.objects(resource_spans, "scopeSpans"):
            for span in self.objects(scope_spans, "spans"):
                if not _fill(into_scope.spans.add(), _readable(span)):
                    del into_scope.spans[-1]
                    self.unreadable_spans += 1


def _fill(message: Any, content: object) -> bool:
    """Whether the JSON object could be read into the message; unknown fields are no fault."""
    if not isinstance(content, dict):
        return False
    try:
        ParseDict(content, message, ignore_unknown_fields=True)
    except Exception:
        # Half a surrogate pair makes the library raise SystemError, depth RecursionError. After any
        # error the caller counts this message as unreadable and reads the next.
        return False
    return True


def _readable(span: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a span that are read, with ids in base64 as protobuf wants them; OTLP has hex.

    Empty for ids of a wrong length, so that the span is refused.
    """
    ids = {}
    for key, length in _HEX_IDS:
        binary = _from_hex(span.get(key))
        if binary is None or len(binary) != length:
            return {}
        ids[key] = b64encode(binary).decode("ascii")
    return ids | {key: span[key] for key in _READ if key in span}


def _from_hex(text: object) -> bytes | None:
    try:
        return bytes.fromhex(text) if isinstance(text, str) else None
    except ValueError:
        return None


_PARSERS: Mapping[str, Callable[[bytes], Parsed]] = {PROTOBUF: _parse_protobuf, JSON: _parse_json}

CONTENT_TYPES = frozenset(_PARSERS)


def parse(body: bytes, content_type: str) -> Parsed:
    """The message of a plain body. Raises PayloadInvalid and PayloadTooLarge."""
    return _PARSERS[content_type](body)
