"""Parses an OTLP body, protobuf or JSON, to a message of bounded size.

The proxy marks spans of clients that did not sample in `tracestate`, and the engine's span inherits
the mark; `sampled_part` removes them.
"""

import json
import zlib
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from agent.catalog.spans import UNSAMPLED
from agent.errors import PayloadInvalid, PayloadTooLarge
from agent.sources.otlp.limits import (
    MAX_BODY_BYTES,
    MAX_JSON_VALUES,
    MAX_PARSED_BYTES,
    SMALL_PROTOBUF_BYTES,
)

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


def _part_tags(root: Descriptor) -> frozenset[int]:
    """The tags of all fields that protobuf takes memory for: messages, and lists of texts."""
    texts = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
    tags, seen, waiting = set(), {root.full_name}, [root]
    while waiting:
        for field in waiting.pop().fields:
            inner = field.message_type
            if inner is not None or (field.is_repeated and field.type in texts):
                tags.add(field.number << 3 | _DELIMITED)
            if inner is not None and inner.full_name not in seen:
                seen.add(inner.full_name)
                waiting.append(inner)
    return frozenset(tags)


# Protobuf's wire type of texts and messages.
_DELIMITED = 2
# Measured with upb of protobuf 7.36 on 64 bits, in empty parts; links are the largest after spans.
_SPAN_BYTES = 168
_PART_BYTES = 82
_SHORTEST_PART_BYTES = 2


def _both_spellings(tags: frozenset[int]) -> bytes:
    """The bytes that can begin a part; a sender may write a tag longer than needed."""
    return bytes(tags | {tag | 0x80 for tag in tags})


# Field 2 of a scope's spans.
_SPAN_TAGS = _both_spellings(frozenset((2 << 3 | _DELIMITED,)))
_PART_TAGS = _both_spellings(_part_tags(ExportTraceServiceRequest.DESCRIPTOR))


def fits(body: bytes, limit_bytes: int) -> bool:
    """Whether the parsed messages of a body take no more than the limit, without their texts.

    Two bytes can encode an empty span, which takes 168 bytes in memory. A body has no more parts
    than bytes that can begin one, so these bytes are counted. Beyond 28 % of 4 MiB they are too
    many for 96 MiB. A text of dense JSON has 20 %, vLLM's spans have 11 %.
    """
    if len(body) // _SHORTEST_PART_BYTES * _SPAN_BYTES <= limit_bytes:
        return True
    parts = len(body) - len(body.translate(None, _PART_TAGS))
    spans = len(body) - len(body.translate(None, _SPAN_TAGS))
    return parts * _PART_BYTES + spans * (_SPAN_BYTES - _PART_BYTES) <= limit_bytes


def parse(body: bytes) -> Parsed:
    """The message of a plain protobuf body. Raises PayloadInvalid and PayloadTooLarge."""
    if len(body) > SMALL_PROTOBUF_BYTES and not fits(body, MAX_PARSED_BYTES):
        raise PayloadTooLarge(
            f"the spans take over {MAX_PARSED_BYTES} bytes when they are read; send smaller batches"
        )
    try:
        return Parsed(ExportTraceServiceRequest.FromString(body))
    except DecodeError as error:
        raise PayloadInvalid(f"the body is no ExportTraceServiceRequest: {error}") from error


_HEX_IDS = (("traceId", 16), ("spanId", 8))
_PARENT = "parentSpanId"
# Of a wrong length, so that whoever reads the span counts it and leaves it out.
_NO_ID = b"\0"

# The parts of a span that are read; errors in other parts do no harm.
_READ = ("name", "startTimeUnixNano", "endTimeUnixNano", "attributes", "status")


def parse_json(body: bytes) -> Parsed:
    """The message of a plain body. Raises PayloadInvalid and PayloadTooLarge."""
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
    return _JsonExport().parsed(content)


class _JsonExport:
    """Builds a message from JSON; unreadable parts are left out and counted."""

    def __init__(self) -> None:
        self._message = ExportTraceServiceRequest()
        self._unreadable_spans = 0
        self._unreadable_resources = 0

    def parsed(self, content: Mapping[str, Any]) -> Parsed:
        for resource_spans in self._objects(content, "resourceSpans"):
            resource = self._message.resource_spans.add().resource
            if not _fill(resource, resource_spans.get("resource") or {}):
                self._unreadable_resources += 1
            for scope_spans in self._objects(resource_spans, "scopeSpans"):
                into = self._message.resource_spans[-1].scope_spans.add()
                scope = scope_spans.get("scope")
                if isinstance(scope, dict) and isinstance(scope.get("name"), str):
                    into.scope.name = scope["name"]
                for span in self._objects(scope_spans, "spans"):
                    self._add_span(into.spans, span)
        return Parsed(self._message, self._unreadable_spans, self._unreadable_resources)

    def _add_span(self, into: Any, span: Mapping[str, Any]) -> None:
        if not _fill(into.add(), _readable(span)):
            del into[-1]
            self._unreadable_spans += 1

    def _objects(self, content: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
        """The objects in a list; any other value counts as an unreadable span."""
        found = content.get(key)
        if found is None:
            return []
        if not isinstance(found, list):
            self._unreadable_spans += 1
            return []
        objects = [item for item in found if isinstance(item, dict)]
        self._unreadable_spans += len(found) - len(objects)
        return objects


def _fill(message: Any, content: object) -> bool:
    """Whether the JSON object could be read into the message; unknown fields are skipped."""
    if not isinstance(content, dict):
        return False
    try:
        ParseDict(content, message, ignore_unknown_fields=True)
    except Exception:
        # Half a surrogate pair makes the library raise SystemError, depth RecursionError. After any
        # error the caller counts this message as unreadable and reads the next.
        return False
    return True


# OTLP has numbers, and protobuf's own JSON names.
_KINDS = (*Span.SpanKind.values(), *Span.SpanKind.keys())


def _readable(span: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a span that are read, with ids in base64 as protobuf wants them; OTLP has hex.

    Empty for ids of a wrong length, so that the span is refused.
    """
    ids: dict[str, Any] = {}
    for key, length in _HEX_IDS:
        binary = _from_hex(span.get(key))
        if binary is None or len(binary) != length:
            return {}
        ids[key] = _base64(binary)
    if (parent := span.get(_PARENT)) is not None:
        binary = _from_hex(parent)
        ids[_PARENT] = _base64(_NO_ID if binary is None else binary)
    kind = span.get("kind")
    if kind in _KINDS:
        ids["kind"] = kind
    return ids | {key: span[key] for key in _READ if key in span}


def _base64(binary: bytes) -> str:
    return b64encode(binary).decode("ascii")


def _from_hex(text: object) -> bytes | None:
    try:
        return bytes.fromhex(text) if isinstance(text, str) else None
    except ValueError:
        return None


MARK = UNSAMPLED.encode()


def sampled_part(content: bytes, content_type: str) -> bytes:
    """Return a plain body that was read without its marked spans; `b""` if none is left.

    A body without marked spans is returned itself.
    """
    if MARK not in content:
        return content
    return _WITHOUT_MARKED[content_type](content)


def _is_marked(trace_state: object) -> bool:
    return isinstance(trace_state, str) and UNSAMPLED in map(str.strip, trace_state.split(","))


def _of_protobuf(content: bytes) -> bytes:
    message = ExportTraceServiceRequest.FromString(content)
    found = left = 0
    for resource_spans in message.resource_spans:
        for scope_spans in resource_spans.scope_spans:
            spans = scope_spans.spans
            marked = [index for index, span in enumerate(spans) if _is_marked(span.trace_state)]
            for index in reversed(marked):
                del spans[index]
            found += len(marked)
            left += len(spans)
    if not found:
        return content
    return message.SerializeToString() if left else b""


def _of_json(content: bytes) -> bytes:
    message = json.loads(content)
    found = left = 0
    for resource_spans in _objects(message, "resourceSpans"):
        for scope_spans in _objects(resource_spans, "scopeSpans"):
            spans = _objects(scope_spans, "spans")
            kept = [span for span in spans if not _is_marked(span.get("traceState"))]
            if len(kept) < len(spans):
                scope_spans["spans"] = kept
            found += len(spans) - len(kept)
            left += len(kept)
    if not found:
        return content
    return json.dumps(message).encode() if left else b""


def _objects(content: dict[str, Any], key: str) -> list[dict[str, Any]]:
    found = content.get(key)
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


_WITHOUT_MARKED: Mapping[str, Callable[[bytes], bytes]] = {PROTOBUF: _of_protobuf, JSON: _of_json}
