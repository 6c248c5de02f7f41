"""Takes spans that a client of the proxy did not sample out of an OTLP body.

The proxy marks them in `tracestate`, and the engine's span inherits the mark.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agent.catalog.spans import UNSAMPLED
from agent.sources.otlp.payload import JSON, PROTOBUF

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
            marked = [place for place, span in enumerate(spans) if _is_marked(span.trace_state)]
            for place in reversed(marked):
                del spans[place]
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
