"""What a span says of a request, in the words of the GenAI conventions where these have one.

Names: open-telemetry/semantic-conventions-genai, docs/gen-ai/gen-ai-spans.md (development, seen
2026). What they have no word for starts with `goodput.`. No text of prompts or answers.
"""

from collections.abc import Callable, Mapping

from agent.records.request import RequestRecord, Status

Value = str | float | int | bool | tuple[str, ...]

# `vllm` is no value that the conventions list, and they allow others.
PROVIDER = "vllm"

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
}
_UNKNOWN_OPERATION = "generate_content"

FAILED = frozenset((Status.ERROR, Status.TIMEOUT, Status.THROTTLED))

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
    """Everything that is known of a request; unknown is absent."""
    known: dict[str, Value] = {
        "gen_ai.operation.name": operation(record.route),
        "gen_ai.provider.name": PROVIDER,
    }
    for name, told in _FROM_RECORD.items():
        value = told(record)
        if value is not None:
            known[name] = value
    return known


def operation(route: str | None) -> str:
    """The conventions' word for what a route does."""
    return OPERATIONS.get(route or "", _UNKNOWN_OPERATION)


def error_type(record: RequestRecord) -> str | None:
    """A word for what went wrong; None for what did not fail."""
    if record.status not in FAILED:
        return None
    return (record.proxied and record.proxied.error) or record.status.value


def _reasons(finish_reason: str | None) -> tuple[str, ...] | None:
    return None if finish_reason is None else tuple(finish_reason.split(","))
