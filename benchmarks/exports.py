"""Seeded OTLP exports as vLLM sends them, with 13 attributes per span."""

import random
from collections.abc import Mapping
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

SPANS_PER_EXPORT = 512

_SLOTS = {float: "double_value", int: "int_value", str: "string_value"}


def export_body(number: int, newest_end: float, spans: int = SPANS_PER_EXPORT) -> bytes:
    """Return the bytes of an export of requests that ended in the 5 s before `newest_end`."""
    seeded = random.Random(number)
    message = ExportTraceServiceRequest()
    resource_spans = message.resource_spans.add()
    _put(resource_spans.resource, {"service.name": "chat-0", "telemetry.sdk.language": "python"})
    scope_spans = resource_spans.scope_spans.add()
    scope_spans.scope.name = "vllm.tracing.otel"
    for place in range(spans):
        _add_span(scope_spans, seeded, newest_end - place * 5.0 / spans)
    return message.SerializeToString()


def _add_span(scope_spans: Any, seeded: random.Random, ended_at: float) -> None:
    queue_s = seeded.expovariate(50)
    prefill_s = seeded.lognormvariate(-2.5, 0.6)
    output_tokens = seeded.randint(2, 400)
    decode_s = (output_tokens - 1) * seeded.uniform(0.01, 0.03)
    e2e_s = queue_s + prefill_s + decode_s + 0.0005
    span = scope_spans.spans.add(
        trace_id=seeded.randbytes(16),
        span_id=seeded.randbytes(8),
        name="llm_request",
        kind=2,
        start_time_unix_nano=int((ended_at - e2e_s) * 1e9),
        end_time_unix_nano=int(ended_at * 1e9),
    )
    # In the order of vLLM 0.32.
    _put(
        span,
        {
            "gen_ai.latency.time_to_first_token": queue_s + prefill_s,
            "gen_ai.latency.e2e": e2e_s,
            "gen_ai.latency.time_in_queue": queue_s,
            "gen_ai.usage.prompt_tokens": seeded.randint(8, 4000),
            "gen_ai.usage.completion_tokens": output_tokens,
            "gen_ai.latency.time_in_model_prefill": prefill_s,
            "gen_ai.latency.time_in_model_decode": decode_s,
            "gen_ai.latency.time_in_model_inference": prefill_s + decode_s,
            "gen_ai.request.id": f"chatcmpl-{seeded.getrandbits(128):032x}",
            "gen_ai.request.top_p": 1.0,
            "gen_ai.request.max_tokens": 400,
            "gen_ai.request.temperature": 0.7,
            "gen_ai.request.n": 1,
        },
    )


def _put(into: Any, values: Mapping[str, float | int | str]) -> None:
    for key, value in values.items():
        attribute = into.attributes.add(key=key)
        setattr(attribute.value, _SLOTS[type(value)], value)
