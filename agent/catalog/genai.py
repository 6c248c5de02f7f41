"""Latencies by OpenTelemetry's semantic conventions for GenAI.

Names and attributes: github.com/open-telemetry/semantic-conventions-genai,
docs/gen-ai/gen-ai-metrics.md (2026), where nothing is stable yet. Its metrics of tokens are about
to change, so there is none of these.
"""

from collections.abc import Mapping

from agent.catalog.metric import Metric, histogram

# `error` is empty for a request that ended well.
_LABELS = ("engine", "model", "operation", "error")

SERVER_DURATION = histogram(
    "gen_ai.server.request.duration", "Arrival of a request at its engine to its end.", *_LABELS
)
SERVER_TTFT = histogram(
    "gen_ai.server.time_to_first_token",
    "Arrival of a request at its engine to its first token, if it ended well.",
    *_LABELS,
)
SERVER_TPOT = histogram(
    "gen_ai.server.time_per_output_token",
    "First to last token of a request that ended well, over its output tokens after the first.",
    *_LABELS,
)
CLIENT_DURATION = histogram(
    "gen_ai.client.operation.duration",
    "A request from its arrival to its end, as its user sees it.",
    *_LABELS,
)
CLIENT_TTFC = histogram(
    "gen_ai.client.operation.time_to_first_chunk",
    "Arrival of a streamed request to the first chunk with a token, as its user sees it.",
    *_LABELS,
)

# The conventions list no software that serves models, and allow other values.
DEFAULT_PROVIDER = "vllm"
# Ours for routes that the conventions do not name.
UNKNOWN_OPERATION = "generate_content"
OPERATIONS: Mapping[str | None, str] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
}


def operation(route: str | None) -> str:
    """The name of a route's operation in the conventions."""
    return OPERATIONS.get(route, UNKNOWN_OPERATION)


GENAI_METRICS: tuple[Metric, ...] = (
    SERVER_DURATION,
    SERVER_TTFT,
    SERVER_TPOT,
    CLIENT_DURATION,
    CLIENT_TTFC,
)
