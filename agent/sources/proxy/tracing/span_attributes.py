"""The attributes of a request's span, by the GenAI conventions.

Names: open-telemetry/semantic-conventions-genai, docs/gen-ai/gen-ai-spans.md (development, 2026).
Attributes outside the conventions start with `goodput.`. No text of prompts or responses.
"""

from collections.abc import Callable, Mapping

from agent.records.request import FAILED, RequestRecord
from agent.sources.proxy.measuring.api_protocols import PROTOCOLS

Value = str | float | int | bool | tuple[str, ...]

# The conventions do not list `vllm`, and allow other values.
_PROVIDER = "vllm"

_UNKNOWN_OPERATION = "generate_content"

_FROM_RECORD: Mapping[str, Callable[[RequestRecord], Value | None]] = {
    "gen_ai.request.model": lambda record: record.model,
    "gen_ai.request.id": lambda record: record.request_id,
    "gen_ai.usage.input_tokens": lambda record: record.input_tokens,
    "gen_ai.usage.output_tokens": lambda record: record.output_tokens,
    "gen_ai.usage.cache_read.input_tokens": lambda record: record.cached_tokens,
    "gen_ai.usage.reasoning.output_tokens": lambda record: record.reasoning_tokens,
    "gen_ai.response.finish_reasons": lambda record: _reasons(record.finish_reason),
    "gen_ai.response.time_to_first_chunk": lambda record: record.ttft_s,
    "gen_ai.latency.time_to_first_token": lambda record: record.ttft_s,
    "gen_ai.latency.e2e": lambda record: record.e2e_s,
    "http.request.method": lambda record: "POST",
    "http.response.status_code": lambda record: record.http_status,
    "url.path": lambda record: record.route,
    "error.type": lambda record: error_type(record),
    "goodput.engine": lambda record: record.engine,
    "goodput.tenant": lambda record: record.tenant,
    "goodput.status": lambda record: record.status.value,
    "goodput.time_per_output_token_s": lambda record: record.tpot_s,
    "goodput.max_gap_s": lambda record: record.max_gap_s,
    "gen_ai.request.stream": lambda record: record.proxied and record.proxied.streamed,
    "gen_ai.request.choice.count": lambda record: record.proxied and record.proxied.choices,
    "goodput.time_to_first_byte_s": lambda record: record.proxied and record.proxied.first_byte_s,
    "http.request.body.size": lambda record: record.proxied and record.proxied.input_bytes,
    "http.response.body.size": lambda record: record.proxied and record.proxied.output_bytes,
}


def attributes_of(record: RequestRecord) -> dict[str, Value]:
    """Return the known attributes of a request."""
    known: dict[str, Value] = {
        "gen_ai.operation.name": operation(record.route),
        "gen_ai.provider.name": _PROVIDER,
    }
    for name, read in _FROM_RECORD.items():
        value = read(record)
        if value is not None:
            known[name] = value
    return known


def operation(route: str | None) -> str:
    """Return the name of a route's operation in the conventions."""
    protocol = PROTOCOLS.get(route or "")
    return _UNKNOWN_OPERATION if protocol is None else protocol.operation


def error_type(record: RequestRecord) -> str | None:
    """Return a short code for the error; None if the request did not fail."""
    if record.status not in FAILED:
        return None
    return (record.proxied and record.proxied.error) or record.status.value


def _reasons(finish_reason: str | None) -> tuple[str, ...] | None:
    return None if finish_reason is None else tuple(finish_reason.split(","))
