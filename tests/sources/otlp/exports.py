"""Exports as engines send them, made by hand: nothing here is the agent's."""

import gzip
import itertools
import json
import secrets
import time
from base64 import b64decode
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.proto.trace.v1.trace_pb2 import Status as SpanStatus

Attributes = Mapping[str, Any]

# What vLLM 0.32 tells of a request, `vllm/v1/engine/output_processor.py`, do_tracing.
VLLM: Attributes = {
    "gen_ai.latency.time_to_first_token": 0.2,
    "gen_ai.latency.e2e": 1.2,
    "gen_ai.latency.time_in_queue": 0.05,
    "gen_ai.latency.time_in_model_prefill": 0.15,
    "gen_ai.latency.time_in_model_decode": 1.0,
    "gen_ai.latency.time_in_model_inference": 1.15,
    "gen_ai.usage.prompt_tokens": 300,
    "gen_ai.usage.completion_tokens": 11,
    "gen_ai.request.id": "chatcmpl-1",
    "gen_ai.request.n": 1,
}

_SLOTS = {
    bool: "bool_value",
    int: "int_value",
    float: "double_value",
    str: "string_value",
    bytes: "bytes_value",
}
_SECOND_NS = 1_000_000_000
_numbers = itertools.count(1)


def any_value(value: object) -> AnyValue:
    """A Python value as OTLP's variant; None is a value that was never set."""
    if value is None:
        return AnyValue()
    if isinstance(value, AnyValue):
        return value
    if isinstance(value, list):
        return AnyValue(array_value=ArrayValue(values=[any_value(item) for item in value]))
    made = AnyValue()
    setattr(made, _SLOTS[type(value)], value)
    return made


def pairs(attributes: Attributes) -> list[KeyValue]:
    return [KeyValue(key=key, value=any_value(value)) for key, value in attributes.items()]


def vllm_span(
    changed: Attributes | None = None, *, without: Sequence[str] = (), **fields: Any
) -> Span:
    """vLLM's span of a request that ended just now, with attributes changed or left out."""
    kept = {key: value for key, value in VLLM.items() if key not in without}
    return span({**kept, **(changed or {})}, **fields)


def span(
    attributes: Attributes, *, age_s: float = 0.0, failed: bool = False, **fields: Any
) -> Span:
    """A span of 1.2 s that ended `age_s` ago, with ids of its own."""
    ended_ns = time.time_ns() - int(age_s * _SECOND_NS)
    plain = {
        "trace_id": secrets.token_bytes(16),
        "span_id": next(_numbers).to_bytes(8, "big"),
        "name": "llm_request",
        "kind": Span.SPAN_KIND_SERVER,
        "start_time_unix_nano": ended_ns - int(1.2 * _SECOND_NS),
        "end_time_unix_nano": ended_ns,
    }
    if failed:
        plain["status"] = SpanStatus(code=SpanStatus.STATUS_CODE_ERROR)
    return Span(**{**plain, **fields}, attributes=pairs(attributes))


def export(
    *spans: Span, resource: Attributes | None = None, scope: str = ""
) -> ExportTraceServiceRequest:
    request = ExportTraceServiceRequest()
    resource_spans = request.resource_spans.add()
    resource_spans.resource.attributes.extend(pairs(resource or {"service.name": "chat-0"}))
    scope_spans = resource_spans.scope_spans.add()
    scope_spans.scope.name = scope
    scope_spans.spans.extend(spans)
    return request


def in_json(request: ExportTraceServiceRequest) -> dict[str, Any]:
    """The export in OTLP's JSON, where ids are hexadecimal."""
    content: dict[str, Any] = MessageToDict(request)
    for json_span in json_spans(content):
        for key in json_span.keys() & {"traceId", "spanId", "parentSpanId"}:
            json_span[key] = b64decode(json_span[key]).hex()
    return content


def json_spans(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        json_span
        for resource_spans in content.get("resourceSpans", [])
        for scope_spans in resource_spans.get("scopeSpans", [])
        for json_span in scope_spans.get("spans", [])
    ]


def json_bytes(content: object) -> bytes:
    return json.dumps(content).encode()


def gzip_bomb(size_bytes: int, members: int = 1) -> bytes:
    """A small gzip body that unpacks to `size_bytes` of zeros."""
    return gzip.compress(b"\0" * (size_bytes // members)) * members


def varint(number: int) -> bytes:
    written = b""
    while number > 0x7F:
        written += bytes([number & 0x7F | 0x80])
        number >>= 7
    return written + bytes([number])


def part(field: int, content: bytes) -> bytes:
    """A field that holds a message or a text."""
    return bytes([field << 3 | 2]) + varint(len(content)) + content
