"""Every metric of this agent's page, declared once. Pages, rules and dashboards derive from it."""

from agent.catalog.efficiency_metrics import EFFICIENCY_METRICS
from agent.catalog.engine_facts import ENGINE_FACTS
from agent.catalog.gpu_facts import GPU_FACTS
from agent.catalog.host_facts import HOST_FACTS
from agent.catalog.metric import Kind, Merge, Metric, Unit

# The advice of semantic-conventions-genai (2026, gen-ai-metrics.md), refined where one bucket would
# span a factor of 2.5 in the range that people promise. Every objective's limit is added at start.
TTFT_BOUNDS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75,
    1.0, 1.5, 2.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
TPOT_BOUNDS_S = (
    0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.075, 0.1, 0.12,
    0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0,
)  # fmt: skip
DURATION_BOUNDS_S = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92,
    163.84, 327.68,
)  # fmt: skip

_ENGINE_MODEL = ("engine", "model")
_ENGINE_MODEL_VANTAGE = (*_ENGINE_MODEL, "vantage")

TTFT = Metric(
    name="gen_ai_server_time_to_first_token_seconds",
    kind=Kind.HISTOGRAM,
    unit=Unit.SECONDS,
    labels=_ENGINE_MODEL_VANTAGE,
    help="Arrival of a request to its first token, queue included, where it was seen.",
)
TPOT = Metric(
    name="gen_ai_server_time_per_output_token_seconds",
    kind=Kind.HISTOGRAM,
    unit=Unit.SECONDS,
    labels=_ENGINE_MODEL_VANTAGE,
    help="First to last token of a request over its output tokens after the first.",
)
DURATION = Metric(
    name="gen_ai_server_request_duration_seconds",
    kind=Kind.HISTOGRAM,
    unit=Unit.SECONDS,
    labels=_ENGINE_MODEL_VANTAGE,
    help="Arrival of a request to its last token, where it was seen.",
)
QUEUE = Metric(
    name="llm_request_queue_seconds",
    kind=Kind.HISTOGRAM,
    unit=Unit.SECONDS,
    labels=_ENGINE_MODEL,
    help="Time that a request waited in the engine before it was first scheduled.",
)
PREFILL = Metric(
    name="llm_request_prefill_seconds",
    kind=Kind.HISTOGRAM,
    unit=Unit.SECONDS,
    labels=_ENGINE_MODEL,
    help="First scheduling of a request to its first token.",
)
DECODE = Metric(
    name="llm_request_decode_seconds",
    kind=Kind.HISTOGRAM,
    unit=Unit.SECONDS,
    labels=_ENGINE_MODEL,
    help="First to last token of a request.",
)
FIRST_VISIBLE = Metric(
    name="llm_request_first_visible_token_seconds",
    kind=Kind.HISTOGRAM,
    unit=Unit.SECONDS,
    labels=_ENGINE_MODEL,
    help="Arrival of a request at the proxy to the first token that is no reasoning.",
)
CHUNK_GAP = Metric(
    name="llm_chunk_gap_seconds",
    kind=Kind.HISTOGRAM,
    unit=Unit.SECONDS,
    labels=_ENGINE_MODEL,
    help="Times between chunks with tokens at the proxy, within 0.6 %; a chunk may hold several.",
)
MAX_GAP = Metric(
    name="llm_request_max_gap_seconds",
    kind=Kind.HISTOGRAM,
    unit=Unit.SECONDS,
    labels=_ENGINE_MODEL,
    help="Longest time between two chunks with tokens of a request at the proxy.",
)
HOLDBACK = Metric(
    name="llm_request_holdback_seconds",
    kind=Kind.HISTOGRAM,
    unit=Unit.SECONDS,
    labels=_ENGINE_MODEL,
    help="First token at the proxy after the engine's own: what front, parsers and network add.",
)
REQUESTS = Metric(
    name="llm_requests",
    kind=Kind.COUNTER,
    labels=(*_ENGINE_MODEL, "status"),
    help="Requests that ended, by how they ended.",
)
INPUT_TOKENS = Metric(
    name="llm_input_tokens",
    kind=Kind.COUNTER,
    labels=_ENGINE_MODEL,
    help="Input tokens of the requests that ended, cached ones included.",
)
OUTPUT_TOKENS = Metric(
    name="llm_output_tokens",
    kind=Kind.COUNTER,
    labels=_ENGINE_MODEL,
    help="Output tokens of the requests that ended.",
)
SLO_REQUESTS = Metric(
    name="llm_slo_requests",
    kind=Kind.COUNTER,
    labels=("objective", *_ENGINE_MODEL, "verdict"),
    help="Requests by objective and verdict: met, missed or undetermined.",
)
SLO_OUTPUT_TOKENS = Metric(
    name="llm_slo_output_tokens",
    kind=Kind.COUNTER,
    labels=("objective", *_ENGINE_MODEL, "verdict"),
    help="Output tokens of requests by objective and verdict.",
)
SLO_TARGET = Metric(
    name="llm_slo_target_ratio",
    kind=Kind.GAUGE,
    unit=Unit.RATIO,
    labels=("objective",),
    merge=Merge.MAX,
    help="Share of judged requests that must meet the objective.",
)
SLO_LIMIT = Metric(
    name="llm_slo_limit_seconds",
    kind=Kind.GAUGE,
    unit=Unit.SECONDS,
    labels=("objective", "measure"),
    merge=Merge.MAX,
    help="Limit of an objective on one request, by measure: ttft, tpot or e2e.",
)
ENGINE_UP = Metric(
    name="llm_engine_up",
    kind=Kind.GAUGE,
    labels=("engine",),
    merge=Merge.MAX,
    help="1 when the engine's page was read at the last try, 0 when it was not.",
)
ENGINE_EVENTS = Metric(
    name="llm_engine_events",
    kind=Kind.COUNTER,
    labels=("engine", "kind"),
    help="Events of an engine by kind.",
)
AGENT_INFO = Metric(
    name="llm_agent_info",
    kind=Kind.GAUGE,
    labels=("agent", "version", "simulated"),
    merge=Merge.MAX,
    help="Always 1; tells the agent's name and version, and whether it shows a simulation.",
)
SPANS = Metric(
    name="llm_agent_spans",
    kind=Kind.COUNTER,
    labels=("outcome",),
    help="Spans received: stored, duplicate, passed (no engine's request) or rejected.",
)
SPANS_REJECTED = Metric(
    name="llm_agent_spans_rejected",
    kind=Kind.COUNTER,
    labels=("reason",),
    help="Spans that could not be taken, by reason.",
)
EXPORTS_REFUSED = Metric(
    name="llm_agent_exports_refused",
    kind=Kind.COUNTER,
    labels=("reason",),
    help="Whole OTLP bodies that were refused, by reason.",
)
VALUES_DROPPED = Metric(
    name="llm_agent_values_dropped",
    kind=Kind.COUNTER,
    labels=("field", "reason"),
    help="Values that could not be facts and were stored as unknown, by field and reason.",
)
SCRAPES = Metric(
    name="llm_agent_scrapes",
    kind=Kind.COUNTER,
    labels=("engine", "outcome"),
    help="Readings of an engine's page: ok, or why it could not be read.",
)
FORWARDED = Metric(
    name="llm_agent_forwarded",
    kind=Kind.COUNTER,
    help="OTLP bodies that the forwarding destination took.",
)
FORWARD_DROPPED = Metric(
    name="llm_agent_forward_dropped",
    kind=Kind.COUNTER,
    labels=("reason",),
    help="OTLP bodies that were not forwarded, by reason.",
)
FORWARD_QUEUE = Metric(
    name="llm_agent_forward_queue_bytes",
    kind=Kind.GAUGE,
    unit=Unit.BYTES,
    help="Bytes of OTLP bodies that wait to be forwarded.",
)
PROXY_FAILURES = Metric(
    name="llm_agent_proxy_failures",
    kind=Kind.COUNTER,
    labels=("reason",),
    help="What the agent could not do for proxied requests, which went on all the same.",
)
PROXY_WAITING = Metric(
    name="llm_agent_proxy_waiting_records",
    kind=Kind.GAUGE,
    help="Records of proxied requests that wait to be stored.",
)
PROXY_OPEN = Metric(
    name="llm_agent_proxy_open_requests",
    kind=Kind.GAUGE,
    help="Requests that are under way through the proxy.",
)
GPU_FAILURES = Metric(
    name="llm_agent_gpu_failures",
    kind=Kind.COUNTER,
    labels=("reason",),
    help="Readings of GPUs, or of parts of them, that failed, by reason.",
)
FIGURES_MISSING = Metric(
    name="llm_agent_figures_missing",
    kind=Kind.COUNTER,
    labels=("engine", "reason"),
    help="Why figures of use or cost of an engine are unknown or doubtful, once for each reason.",
)
STORE_WAITING = Metric(
    name="llm_agent_store_waiting_rows",
    kind=Kind.GAUGE,
    help="Requests that were received and are not yet committed.",
)
STORE_FAILURES = Metric(
    name="llm_agent_store_failures",
    kind=Kind.COUNTER,
    labels=("what",),
    help="Writes that the database did not take, by what was written.",
)

AGENT_METRICS = tuple(value for value in list(globals().values()) if isinstance(value, Metric))

METRICS = (*AGENT_METRICS, *EFFICIENCY_METRICS, *ENGINE_FACTS, *HOST_FACTS, *GPU_FACTS)
