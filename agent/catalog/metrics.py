"""The metrics of requests, objectives and the agent itself, each declared once."""

from agent.catalog.metric import Merge, Metric, Unit, counter, gauge, histogram
from agent.catalog.own_health import HEALTH_METRICS

# Labels of engines and models: of an unknown one or a model that no engine serves; of one too many.
UNKNOWN, OTHER = "unknown", "other"

# The buckets of semantic-conventions-genai (2026, gen-ai-metrics.md), with more edges in the range
# of usual objectives. At start the agent adds the limit of every objective.
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

_UNTIL_FIRST = "until a request with this time has ended"
_UNTIL_FIRST_PROXIED = "until a request that the proxy or vLLM's plugin measured has ended"

_ENGINE_MODEL = ("engine", "model")
_ENGINE_MODEL_VANTAGE = (*_ENGINE_MODEL, "vantage")

TTFT = histogram(
    "gen_ai_server_time_to_first_token_seconds",
    "Arrival of a request to its first token, queue included, by vantage.",
    *_ENGINE_MODEL_VANTAGE,
    absent=_UNTIL_FIRST,
)
TPOT = histogram(
    "gen_ai_server_time_per_output_token_seconds",
    "First to last token of a request over its output tokens after the first.",
    *_ENGINE_MODEL_VANTAGE,
    absent=_UNTIL_FIRST,
)
DURATION = histogram(
    "gen_ai_server_request_duration_seconds",
    "Arrival of a request to its last token, by vantage.",
    *_ENGINE_MODEL_VANTAGE,
    absent=_UNTIL_FIRST,
)
QUEUE = histogram(
    "llm_request_queue_seconds",
    "Time that a request waited in the engine before it was first scheduled.",
    *_ENGINE_MODEL,
    absent=_UNTIL_FIRST,
)
PREFILL = histogram(
    "llm_request_prefill_seconds",
    "First scheduling of a request to its first token.",
    *_ENGINE_MODEL,
    absent=_UNTIL_FIRST,
)
DECODE = histogram(
    "llm_request_decode_seconds",
    "First to last token of a request.",
    *_ENGINE_MODEL,
    absent=_UNTIL_FIRST,
)
FIRST_VISIBLE = histogram(
    "llm_request_first_visible_token_seconds",
    "Arrival of a request to the first token that is not reasoning, as its user sees it.",
    *_ENGINE_MODEL,
    absent=_UNTIL_FIRST_PROXIED,
)
CHUNK_GAP = histogram(
    "llm_chunk_gap_seconds",
    "Times between chunks with tokens, as users see them, within 0.6 %; a chunk may hold several.",
    *_ENGINE_MODEL,
    absent=_UNTIL_FIRST_PROXIED,
)
MAX_GAP = histogram(
    "llm_request_max_gap_seconds",
    "Longest time between two chunks with tokens of a request, as its user sees it.",
    *_ENGINE_MODEL,
    absent=_UNTIL_FIRST_PROXIED,
)
HOLDBACK = histogram(
    "llm_request_holdback_seconds",
    "Time from the engine's first token to the user's: front, parsers and, by a proxy, network.",
    *_ENGINE_MODEL,
    absent="until a request with both views has ended",
)
REQUESTS = counter(
    "llm_requests",
    "Requests that ended, by status; `invalid` is the client's own mistake (4xx), no failure.",
    *_ENGINE_MODEL,
    "status",
)
INPUT_TOKENS = counter(
    "llm_input_tokens",
    "Input tokens of the requests that ended, cached ones included.",
    *_ENGINE_MODEL,
)
OUTPUT_TOKENS = counter(
    "llm_output_tokens", "Output tokens of the requests that ended.", *_ENGINE_MODEL
)
SLO_REQUESTS = counter(
    "llm_slo_requests",
    "Requests by objective and final verdict: met, missed or undetermined.",
    "objective",
    *_ENGINE_MODEL,
    "verdict",
)
WITHIN, PERHAPS, ABOVE = "yes", "perhaps", "no"
SLO_ENGINE_REQUESTS = counter(
    "llm_slo_engine_requests",
    "Requests by the engine's histogram of a limited latency (ttft, tpot or e2e), and whether they "
    "were within the limit: yes, no, or perhaps, as the limit lies inside their bucket.",
    "objective",
    *_ENGINE_MODEL,
    "measure",
    "within",
    absent="of engines without that histogram, and of objectives for some requests of a model",
)
SLO_OUTPUT_TOKENS = counter(
    "llm_slo_output_tokens",
    "Output tokens of requests by objective and verdict.",
    "objective",
    *_ENGINE_MODEL,
    "verdict",
)
SLO_TARGET = gauge(
    "llm_slo_target_ratio",
    "Share of judged requests that must meet the objective.",
    "objective",
    unit=Unit.RATIO,
    merge=Merge.MAX,
)
SLO_CONFIGURED = gauge(
    "llm_slo_configured",
    "1 if the settings have the objective; 0 for the preset without any, on which no alert is.",
    "objective",
    merge=Merge.MAX,
)
SLO_LIMIT = gauge(
    "llm_slo_limit_seconds",
    "Limit of an objective on one request, by measure: ttft, tpot or e2e.",
    "objective",
    "measure",
    unit=Unit.SECONDS,
    merge=Merge.MAX,
    absent="of limits that are not set",
)
SLO_MISSED_SECONDS = counter(
    "llm_slo_missed_seconds",
    "Seconds of missed requests over a limit (ttft, tpot or e2e) of an objective, by cause.",
    "objective",
    *_ENGINE_MODEL,
    "limit",
    "cause",
    unit=Unit.SECONDS,
    absent="until a request has missed for the cause",
)
_OF_OBJECTIVE = ("objective", *_ENGINE_MODEL)
SLO_P90_TO_LIMIT = gauge(
    "llm_slo_p90_to_limit_ratio",
    "Worst 90th percentile of a limited latency over its limit, of the last minute or 5 minutes.",
    *_OF_OBJECTIVE,
    "window",
    unit=Unit.RATIO,
    merge=Merge.MAX,
    absent="of windows in which no latency was measured",
)
ARRIVAL_RATE = gauge(
    "llm_engine_arrival_rate",
    "Requests per second that came to the engine in the last minute, by its own counters.",
    *_ENGINE_MODEL,
    merge=Merge.MAX,
    absent="until 5 s of samples, and of engines that do not count finished requests or their load",
)
LIMIT_FOUND, LIMIT_OPEN = "found", "open"
_UNTIL_HELD = "until a minute has held the objective; they are judged 5 minutes later"
SLO_HELD_RATE = gauge(
    "llm_slo_held_rate",
    "Requests per second that the engine was seen to hold within the objective; its limit is "
    "`found` if minutes with more missed it, else `open`: it may hold more.",
    *_OF_OBJECTIVE,
    "limit",
    merge=Merge.MAX,
    absent=_UNTIL_HELD,
)
SLO_HELD_RATE_AGE = gauge(
    "llm_slo_held_rate_age_seconds",
    "Time since the last minute in which the engine held about that rate.",
    *_OF_OBJECTIVE,
    unit=Unit.SECONDS,
    merge=Merge.MAX,
    absent=_UNTIL_HELD,
)
SLO_HELD_RATE_CONFIDENCE = gauge(
    "llm_slo_held_rate_confidence_ratio",
    "Least share of minutes at about that rate that hold the objective, with 95 % confidence.",
    *_OF_OBJECTIVE,
    unit=Unit.RATIO,
    merge=Merge.MAX,
    absent=_UNTIL_HELD,
)
SLO_REPLICAS_NEEDED = gauge(
    "llm_slo_replicas_needed",
    "Replicas that the load of this engine needs within the objective, as a fraction: the sum over "
    "all engines is the number to run.",
    *_OF_OBJECTIVE,
    merge=Merge.MAX,
    absent="while neither a rate that is held nor a latency is known",
)
_ONE_RANK = "of engines with one data-parallel rank in their exposition"
_OF_RANK = (*_ENGINE_MODEL, "rank")
RANK_REQUESTS_RUNNING = gauge(
    "llm_engine_rank_requests_running",
    "Requests in the running batch of a data-parallel rank now.",
    *_OF_RANK,
    merge=Merge.MAX,
    absent=_ONE_RANK,
)
RANK_REQUESTS_WAITING = gauge(
    "llm_engine_rank_requests_waiting",
    "Requests that wait for a place in the batch of a data-parallel rank now.",
    *_OF_RANK,
    merge=Merge.MAX,
    absent=_ONE_RANK,
)
RANK_KV_CACHE_USAGE = gauge(
    "llm_engine_rank_kv_cache_usage_ratio",
    "Share of a data-parallel rank's KV cache held by live requests, 0 to 1.",
    *_OF_RANK,
    unit=Unit.RATIO,
    merge=Merge.MAX,
    absent=_ONE_RANK,
)
RANK_STEP_TIME = gauge(
    "llm_engine_rank_step_seconds",
    "Mean time between two outputs of a request in a data-parallel rank, over 5 minutes.",
    *_OF_RANK,
    unit=Unit.SECONDS,
    merge=Merge.MAX,
    absent=f"{_ONE_RANK}, of idle ranks, and of engines other than vllm",
)
RANK_SKEW = gauge(
    "llm_engine_rank_skew_ratio",
    "Highest of the data-parallel ranks over their mean, each a mean over 5 minutes, by measure: "
    "requests (running and waiting), running, waiting, kv_cache_usage or step_time. 1 is even.",
    *_ENGINE_MODEL,
    "measure",
    unit=Unit.RATIO,
    merge=Merge.MAX,
    absent=f"{_ONE_RANK}, and of measures that are 0 on all ranks",
)
ENGINE_UP = gauge(
    "llm_engine_up",
    "1 when the last scrape of the engine succeeded, 0 when it failed.",
    "engine",
    merge=Merge.MAX,
)
ENGINE_STATE = gauge(
    "llm_engine_state",
    "1 for the state of the engine that its probes report, such as ok, saturated or stalled.",
    "engine",
    "state",
    merge=Merge.MAX,
)
ENGINE_ROLE = gauge(
    "llm_engine_role",
    "Always 1; the phases that the engine does by its settings, prefill or decode.",
    "engine",
    "role",
    merge=Merge.MAX,
    absent="of engines that do both",
)
ENGINE_START = gauge(
    "llm_engine_start_seconds",
    "Time of each phase of the engine's last start, from its spans; phases add up to the start.",
    "engine",
    "phase",
    unit=Unit.SECONDS,
    merge=Merge.MAX,
    absent="until the agent has seen a start whose spans it got",
)
PLUGIN_UP = gauge(
    "llm_engine_plugin_up",
    "1 when the engine's plugin was heard of in the last 30 s, else 0 (as with a Rust frontend).",
    "engine",
    merge=Merge.MAX,
    absent="until the plugin is heard, without plugin_socket",
)
PLUGIN_LAST_STEP = gauge(
    "llm_engine_plugin_last_step_timestamp_seconds",
    "Unix time at which the last step of the engine came from its plugin.",
    "engine",
    unit=Unit.SECONDS,
    merge=Merge.MAX,
    absent="until the first step",
)
_NO_OPEN_REQUESTS = "while no live front has a file"
OPEN_REQUESTS = gauge(
    "llm_engine_open_requests",
    "Open requests of the engine's fronts, as its plugin keeps them in a file.",
    "engine",
    absent=_NO_OPEN_REQUESTS,
)
STALLED_REQUESTS = gauge(
    "llm_engine_stalled_requests",
    "Open requests whose response began, and has had no event for 10 s.",
    "engine",
    absent=_NO_OPEN_REQUESTS,
)
PLUGIN_RECORDS = counter(
    "llm_engine_plugin_records",
    "Records that came from the engine's plugin, by kind: step or request.",
    "engine",
    "kind",
)
PLUGIN_DROPPED = counter(
    "llm_engine_plugin_dropped",
    "Records of the engine's plugin that were dropped, by it or by the agent, by reason.",
    "engine",
    "reason",
)
ENGINE_RESPONSES = counter(
    "llm_engine_responses",
    "Responses of the engine's front on routes without rows, as embeddings, by class of status.",
    "engine",
    "route",
    "status",
    absent="until a front with the middleware has such a response",
)
ENGINE_EVENTS = counter("llm_engine_events", "Events of an engine by kind.", "engine", "kind")
AGENT_INFO = gauge(
    "llm_agent_info",
    "Always 1; the labels are the agent's name and version, and whether it is a simulation.",
    "agent",
    "version",
    "simulated",
    merge=Merge.MAX,
)
SPANS = counter(
    "llm_agent_spans",
    "Spans received: stored, duplicate, passed (not a request of an engine) or rejected.",
    "outcome",
)
SPANS_REJECTED = counter(
    "llm_agent_spans_rejected", "Spans that were rejected, by reason.", "reason"
)
EXPORTS_REFUSED = counter(
    "llm_agent_exports_refused", "Whole OTLP bodies that were refused, by reason.", "reason"
)
VALUES_DROPPED = counter(
    "llm_agent_values_dropped",
    "Impossible values that were stored as unknown, by field and reason.",
    "field",
    "reason",
)
SCRAPES = counter(
    "llm_agent_scrapes",
    "Scrapes of an engine by outcome: ok, or the reason of the failure.",
    "engine",
    "outcome",
)
FORWARDED = counter("llm_agent_forwarded", "OTLP bodies that the forwarding destination accepted.")
FORWARD_DROPPED = counter(
    "llm_agent_forward_dropped", "OTLP bodies that were not forwarded, by reason.", "reason"
)
FORWARD_QUEUE = gauge(
    "llm_agent_forward_queue_bytes",
    "Bytes of OTLP bodies that wait to be forwarded.",
    unit=Unit.BYTES,
    absent="without otlp.forward_to",
)
PROXY_FAILURES = counter(
    "llm_agent_proxy_failures",
    "Failures to measure or store requests of the proxy and of vLLM's plugin, by reason; the "
    "requests themselves went on, but for relay and worker_died.",
    "reason",
)
CLIENTS_CUT = counter(
    "llm_agent_clients_cut",
    "Clients of a listening socket, by its setting, that were cut off or refused, by reason.",
    "setting",
    "reason",
)
LABELS_REPLACED = counter(
    "llm_agent_labels_replaced",
    "Requests counted as `unknown` (model) or `other`, by label: model, tenant, or series beyond "
    "storage.max_series.",
    "label",
)
PROXY_WAITING = gauge(
    "llm_agent_proxy_waiting_records",
    "Records of proxied requests that wait to be stored.",
    absent="without a proxy",
)
PROXY_OPEN = gauge(
    "llm_agent_proxy_open_requests",
    "Requests in flight through the proxy.",
    absent="without a proxy",
)
PROXY_IN_ROTATION = gauge(
    "llm_proxy_engine_in_rotation",
    "Share of the proxy's workers that send new requests to the engine.",
    "engine",
    merge=Merge.MAX,
    absent="without a proxy before several engines",
)
PROXY_EJECTIONS = counter(
    "llm_proxy_engine_ejections",
    "Times that a worker of the proxy stopped sending new requests to the engine, by reason.",
    "engine",
    "reason",
    absent="without a proxy before several engines",
)
PROXY_RETRIED = counter(
    "llm_proxy_requests_retried",
    "Requests that the engine did not answer and that the proxy sent to another one.",
    "engine",
    absent="without a proxy before several engines",
)
PROXY_RESPONSES = counter(
    "llm_proxy_responses",
    "Responses of the engine that the proxy passed on without a row, as of embeddings, by class of "
    "status.",
    "engine",
    "route",
    "status",
    absent="until the proxy passed such a response on",
)
PROXY_FORCED = counter(
    "llm_proxy_requests_forced",
    "Requests that went to an engine out of the rotation, because none that serves them was in.",
    absent="without a proxy before several engines",
)
GPU_FAILURES = counter(
    "llm_agent_gpu_failures",
    "Failed reads of GPUs, or of parts of them, by reason.",
    "reason",
)
FIGURES_MISSING = counter(
    "llm_agent_figures_missing",
    "Reasons why an engine's efficiency or cost is unknown or doubtful, each counted once.",
    "engine",
    "reason",
)
STORE_WAITING = gauge(
    "llm_agent_store_waiting_rows", "Requests that were received and are not yet committed."
)
STORE_FAILURES = counter(
    "llm_agent_store_failures",
    "Writes that the database refused, by kind of row.",
    "what",
)
_NOT_PUBLISHED = "without storage.publish_to"
UNPUBLISHED_ROWS = gauge(
    "llm_agent_unpublished_rows",
    "Rows of the agent's file that the shared database does not have yet.",
    absent=_NOT_PUBLISHED,
)
PUBLISH_LAG = gauge(
    "llm_agent_publish_lag_seconds",
    "Time since the shared database had everything; 0 while it has.",
    unit=Unit.SECONDS,
    merge=Merge.MAX,
    absent=_NOT_PUBLISHED,
)
FILE_BYTES = gauge(
    "llm_agent_file_bytes",
    "Bytes of the agent's file that hold rows.",
    unit=Unit.BYTES,
    absent=_NOT_PUBLISHED,
)
PUBLISHED_ROWS = counter(
    "llm_agent_published_rows",
    "Rows that the shared database took; one that changed counts again.",
    absent=_NOT_PUBLISHED,
)
LOST_ROWS = counter(
    "llm_agent_lost_rows",
    "Rows that the shared database will never have, by reason.",
    "reason",
    absent=_NOT_PUBLISHED,
)

AGENT_METRICS = (
    *(value for value in list(globals().values()) if isinstance(value, Metric)),
    *HEALTH_METRICS,
)
