"""From the bytes of an OTLP body to a protobuf message, with every limit kept."""

import json
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agent.errors import PayloadInvalid, PayloadTooLarge

# opentelemetry-proto docs/specification.md (2026): limit after decompression, 64 MiB recommended.
MAX_BODY_BYTES = 64 * 1024 * 1024

PROTOBUF = "application/x-protobuf"
JSON = "application/json"

_GZIP = 31  # zlib's window bits for a gzip header and trailer

_HEX_IDS = (("traceId", 16), ("spanId", 8), ("parentSpanId", 8))


@dataclass(frozen=True, slots=True)
class Parsed:
    """A message and the number of spans that were lost in reading it."""

    message: ExportTraceServiceRequest
    unreadable_spans: int = 0


def gunzip(body: bytes, limit_bytes: int = MAX_BODY_BYTES) -> bytes:
    """The plain bytes of a gzip body of one or several members; nothing over the limit is made."""
    plain = bytearray()
    rest = body
    while rest:
        stream = zlib.decompressobj(_GZIP)
        try:
            plain += stream.decompress(rest, limit_bytes - len(plain) + 1)
        except zlib.error as error:
            raise PayloadInvalid(f"the body is no gzip: {error}") from error
        if len(plain) > limit_bytes:
            raise PayloadTooLarge(
                f"the body is over {limit_bytes} bytes after decompression; send smaller batches"
            )
        if not stream.eof:
            raise PayloadInvalid("the gzip body is cut off")
        rest = stream.unused_data
    return bytes(plain)


def _parse_protobuf(body: bytes) -> Parsed:
    try:
        return Parsed(ExportTraceServiceRequest.FromString(body))
    except DecodeError as error:
        raise PayloadInvalid(f"the body is no ExportTraceServiceRequest: {error}") from error


def _parse_json(body: bytes) -> Parsed:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise PayloadInvalid(f"the body is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise PayloadInvalid(f"the body holds a JSON {type(content).__name__}, not an object")
    message = ExportTraceServiceRequest()
    unreadable = 0
    for resource_spans in _objects(content, "resourceSpans"):
        into_resource = message.resource_spans.add()
        _fill(into_resource.resource, resource_spans.get("resource"))
        for scope_spans in _objects(resource_spans, "scopeSpans"):
            into_scope = into_resource.scope_spans.add()
            _fill(into_scope.scope, scope_spans.get("scope"))
            for span in _objects(scope_spans, "spans"):
                if not _fill(into_scope.spans.add(), _with_binary_ids(span)):
                    del into_scope.spans[-1]
                    unreadable += 1
    return Parsed(message, unreadable)


def _objects(content: Mapping[str, Any], key: str) -> Iterable[dict[str, Any]]:
    found = content.get(key) or []
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise PayloadInvalid(f"{key} must be a list of objects")
    return found


def _fill(message: Any, content: object) -> bool:
    """Whether the JSON object could be read into the message; unknown fields are no fault."""
    if content is None:
        return True
    try:
        ParseDict(content, message, ignore_unknown_fields=True)  # type: ignore[arg-type]
    except (ParseError, ValueError, TypeError, AttributeError, RecursionError):
        return False
    return True


def _with_binary_ids(span: dict[str, Any]) -> dict[str, Any]:
    """The span with its ids as protobuf's JSON mapping wants them; OTLP writes them in hex.

    An id that is no hex of the right length is left out, so that the span is refused for it.
    """
    ids = {}
    for key, length in _HEX_IDS:
        binary = _from_hex(span.get(key))
        if binary is not None and len(binary) == length:
            ids[key] = _base64(binary)
    rest = {key: value for key, value in span.items() if key not in _ID_KEYS}
    if isinstance(rest.get("links"), list):
        rest["links"] = [
            _with_binary_ids(link) if isinstance(link, dict) else link for link in rest["links"]
        ]
    return rest | ids


_ID_KEYS = frozenset(key for key, _ in _HEX_IDS)


def _from_hex(text: object) -> bytes | None:
    try:
        return bytes.fromhex(text) if isinstance(text, str) else None
    except ValueError:
        return None


def _base64(binary: bytes) -> str:
    return b64encode(binary).decode("ascii")


_PARSERS: Mapping[str, Callable[[bytes], Parsed]] = {PROTOBUF: _parse_protobuf, JSON: _parse_json}

CONTENT_TYPES = frozenset(_PARSERS)


def parse(body: bytes, content_type: str) -> Parsed:
    """The message in a plain body; PayloadInvalid where there is none to be read."""
    return _PARSERS[content_type](body)
