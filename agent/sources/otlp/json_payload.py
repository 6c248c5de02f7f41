"""Parses an OTLP body in JSON to a protobuf message."""

import json
from base64 import b64encode
from collections.abc import Mapping
from typing import Any

from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agent.errors import PayloadInvalid, PayloadTooLarge
from agent.sources.otlp.limits import MAX_JSON_VALUES
from agent.sources.otlp.payload import Parsed

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
        """The message, and what is left out of it."""
        for resource_spans in self._objects(content, "resourceSpans"):
            resource = self._message.resource_spans.add().resource
            if not _fill(resource, resource_spans.get("resource") or {}):
                self._unreadable_resources += 1
            into = self._message.resource_spans[-1].scope_spans.add()
            for scope_spans in self._objects(resource_spans, "scopeSpans"):
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
        ids[key] = _base64(binary)
    if (parent := span.get(_PARENT)) is not None:
        binary = _from_hex(parent)
        ids[_PARENT] = _base64(_NO_ID if binary is None else binary)
    return ids | {key: span[key] for key in _READ if key in span}


def _base64(binary: bytes) -> str:
    return b64encode(binary).decode("ascii")


def _from_hex(text: object) -> bytes | None:
    try:
        return bytes.fromhex(text) if isinstance(text, str) else None
    except ValueError:
        return None
