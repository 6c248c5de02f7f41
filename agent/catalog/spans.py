"""Attributes of engines' request spans, in all their spellings, and how to recognise such a span.

Names come from vLLM `vllm/tracing/utils.py` (0.32, old usage keys), SGLang `trace.py` (0.5.23), the
GenAI semantic conventions (semantic-conventions-genai, 2026) and OpenInference.
"""

from collections.abc import Mapping
from enum import Enum

# The name of vLLM's one span per finished sequence; its start-up spans have other names.
REQUEST_SPAN_NAME = "llm_request"

# vLLM may send a child span for each phase of a request: vllm_queue, vllm_prefill, vllm_decode and
# vllm_async_kv_transfer (its pull request 44402). A phase is not a request.
PHASE_SPAN_PREFIX = "vllm_"

# With prefill and decode apart, SGLang sends a span of each, named by its role
# (`srt/observability/trace.py`, 0.5.23). The prefill ends with the first token: it is a hop of the
# request, whose tokens and end are those of the decode. It has no time in the queue.
PREFILL_SPAN_PREFIX = "prefill Req "

# Engines put these keys on the request span, whatever its name. Proxies may do so, too.
ENGINE_KEY_PREFIX = "gen_ai.latency."

# How the scopes of engines' tracers begin: vLLM's is the module that makes the span, SGLang's
# "sglang server" (`srt/observability/trace.py`, 0.5.23).
ENGINE_SCOPES = ("vllm", "sglang")

# Routers of llm-d (github.com/llm-d/llm-d-router, ebab6879 of August 2026). The routing sidecar's
# server, otelhttp, sends one span for each call, named by method and path (`pkg/sidecar/proxy/
# proxy_helpers.go`). Inside it `forward_request`, earlier `llm_d.pd_proxy.request`, is the same
# request without its HTTP status, so it is not read. `llm_d.pd_proxy.true_ttft_ms` there is the
# time to the start of decode, not to a token.
SIDECAR_SPAN_PREFIX = "llm_d.pd_proxy.POST "
ROUTED_PATHS = frozenset(
    (
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
        "/inference/v1/generate",
    )
)
HTTP_STATUS_KEYS = frozenset(("http.response.status_code", "http.status_code"))

# The endpoint picker's span of a request that it refuses has an error (`pkg/epp/requestcontrol/
# director.go`). Its codes, and the HTTP status that each becomes (`pkg/common/error/error.go`).
PICKER_SPAN_NAME = "gateway.request_orchestration"
PICKER_MODEL_KEY = "target_model"
PICKER_ERRORS: Mapping[str, int] = {
    "BadRequest": 400,
    "Unauthorized": 401,
    "Forbidden": 403,
    "NotFound": 404,
    "PreconditionFailed": 412,
    "ResourceExhausted": 429,
    "Internal": 500,
    "ServiceUnavailable": 503,
}

# The member of `tracestate` by which the proxy marks its requests, for the middleware in an engine.
# Those that the client does not sample are marked apart. The engine's span inherits the member: the
# agent reads the span of an unsampled request and does not forward it.
PROXY_KEY, PROXIED_VALUE, UNSAMPLED_VALUE = "goodput", "proxied", "unsampled"
UNSAMPLED = f"{PROXY_KEY}={UNSAMPLED_VALUE}"


class ValueType(Enum):
    """The type that an attribute must have."""

    SECONDS = "a number"
    COUNT = "a whole number"
    TEXT = "a string"


# Attribute key -> (field, type, rank). Of two spellings on one span the lower rank counts.
REQUEST_ATTRIBUTES: Mapping[str, tuple[str, ValueType, int]] = {
    "gen_ai.latency.time_to_first_token": ("ttft_s", ValueType.SECONDS, 0),
    "gen_ai.response.time_to_first_chunk": ("ttft_s", ValueType.SECONDS, 1),
    "gen_ai.server.time_to_first_token": ("ttft_s", ValueType.SECONDS, 2),
    "gen_ai.latency.e2e": ("e2e_s", ValueType.SECONDS, 0),
    "gen_ai.latency.time_in_queue": ("queue_s", ValueType.SECONDS, 0),
    "gen_ai.latency.time_in_model_prefill": ("prefill_s", ValueType.SECONDS, 0),
    "gen_ai.latency.time_in_model_decode": ("decode_s", ValueType.SECONDS, 0),
    "gen_ai.usage.input_tokens": ("input_tokens", ValueType.COUNT, 0),
    "gen_ai.usage.prompt_tokens": ("input_tokens", ValueType.COUNT, 1),
    "llm.usage.prompt_tokens": ("input_tokens", ValueType.COUNT, 2),
    "llm.token_count.prompt": ("input_tokens", ValueType.COUNT, 3),
    "gen_ai.usage.output_tokens": ("output_tokens", ValueType.COUNT, 0),
    "gen_ai.usage.completion_tokens": ("output_tokens", ValueType.COUNT, 1),
    "llm.usage.completion_tokens": ("output_tokens", ValueType.COUNT, 2),
    "llm.token_count.completion": ("output_tokens", ValueType.COUNT, 3),
    "gen_ai.usage.cache_read.input_tokens": ("cached_tokens", ValueType.COUNT, 0),
    "gen_ai.usage.cached_tokens": ("cached_tokens", ValueType.COUNT, 1),
    "gen_ai.usage.reasoning.output_tokens": ("reasoning_tokens", ValueType.COUNT, 0),
    "gen_ai.request.id": ("request_id", ValueType.TEXT, 0),
    "gen_ai.response.id": ("request_id", ValueType.TEXT, 1),
    "gen_ai.response.model": ("model", ValueType.TEXT, 0),
    "gen_ai.request.model": ("model", ValueType.TEXT, 1),
    "gen_ai.response.finish_reasons": ("finish_reason", ValueType.TEXT, 0),
}
