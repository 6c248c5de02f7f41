"""What an engine's own page can tell, in our words: one row per fact, whatever the engine calls it.

Every fact is published with the labels `engine` and `model` before its own. A label that an engine
does not tell is the empty string. `merge` says how the values of data-parallel ranks become one.
"""

from agent.catalog.metric import Kind, Merge, Metric, Unit


def _gauge(name: str, text: str, *labels: str, merge: Merge = Merge.SUM) -> Metric:
    return Metric(name=name, kind=Kind.GAUGE, help=text, labels=labels, merge=merge)


def _counter(name: str, text: str, *labels: str, unit: Unit = Unit.NONE) -> Metric:
    return Metric(name=name, kind=Kind.COUNTER, help=text, labels=labels, unit=unit)


def _seconds(name: str, text: str) -> Metric:
    return Metric(name=name, kind=Kind.HISTOGRAM, help=text, unit=Unit.SECONDS)


# Load
REQUESTS_RUNNING = _gauge(
    "llm_engine_requests_running", "Requests in the engine's running batch now."
)
REQUESTS_WAITING = _gauge(
    "llm_engine_requests_waiting", "Requests that wait for a place in the batch now."
)
REQUESTS_WAITING_BY_REASON = _gauge(
    "llm_engine_requests_waiting_by_reason",
    "Requests that wait now, by what they wait for in the engine's own words.",
    "reason",
)
AWAKE = _gauge(
    "llm_engine_awake",
    "1 while the engine is ready to generate, 0 while it sleeps with its memory given back.",
    merge=Merge.MAX,
)
DATA_PARALLEL_RANKS = _gauge(
    "llm_engine_data_parallel_ranks",
    "Data-parallel ranks on the engine's page; facts named per GPU are sums over these.",
)

# KV cache
KV_CACHE_USAGE = Metric(
    name="llm_engine_kv_cache_usage_ratio",
    kind=Kind.GAUGE,
    help="Share of the KV cache held by live requests, 0 to 1, of the fullest rank.",
    unit=Unit.RATIO,
    merge=Merge.MAX,
)
KV_BLOCKS = _gauge("llm_engine_kv_blocks", "Blocks in the KV cache of all ranks.")
KV_BLOCK_TOKENS = _gauge(
    "llm_engine_kv_block_tokens", "Tokens that one block of the KV cache holds.", merge=Merge.MAX
)
KV_CAPACITY_TOKENS = _gauge(
    "llm_engine_kv_capacity_tokens", "Tokens that the KV cache of all ranks holds."
)
KV_VALUE_BYTES = Metric(
    name="llm_engine_kv_value_bytes",
    kind=Kind.GAUGE,
    help="Bytes of one value in the KV cache, where the engine was told how to keep it.",
    unit=Unit.BYTES,
    merge=Merge.MAX,
)
PREEMPTIONS = _counter(
    "llm_engine_preemptions", "Times a running request was thrown back for want of KV cache."
)

# Tokens
INPUT_TOKENS = _counter(
    "llm_engine_input_tokens", "Prompt tokens taken in, those found in a cache included."
)
INPUT_TOKENS_BY_SOURCE = _counter(
    "llm_engine_input_tokens_by_source",
    "Prompt tokens by where their KV values came from, in the engine's own words.",
    "source",
)
CACHED_INPUT_TOKENS = _counter(
    "llm_engine_cached_input_tokens", "Prompt tokens that a cache served instead of computation."
)
OUTPUT_TOKENS = _counter("llm_engine_output_tokens", "Tokens generated.")
PREFIX_CACHE_QUERY_TOKENS = _counter(
    "llm_engine_prefix_cache_query_tokens", "Tokens looked up in the prefix cache."
)
PREFIX_CACHE_HIT_TOKENS = _counter(
    "llm_engine_prefix_cache_hit_tokens", "Tokens found in the prefix cache."
)

# Requests
REQUESTS_FINISHED = _counter(
    "llm_engine_requests_finished",
    "Requests that the engine finished, by its own finish reason where it tells one.",
    "finish_reason",
)
REQUESTS_FAILED = _counter(
    "llm_engine_requests_failed",
    "Requests that the engine answered with an error, by its own reason or HTTP status.",
    "reason",
)
REQUESTS_ABORTED = _counter(
    "llm_engine_requests_aborted", "Requests that ended early because they were given up."
)
ADMISSION_REJECTIONS = _counter(
    "llm_engine_admission_rejections",
    "Requests turned away before they reached the scheduler, by the limit that was full.",
    "reason",
)

# Steps and speculative decoding
STEPS = _counter("llm_engine_steps", "Engine steps that gave output.")
STEP_TOKENS = _counter("llm_engine_step_tokens", "Tokens computed in those steps.")
SPEC_DECODE_DRAFTS = _counter("llm_engine_spec_decode_drafts", "Drafts put up for verification.")
SPEC_DECODE_DRAFT_TOKENS = _counter(
    "llm_engine_spec_decode_draft_tokens", "Tokens in the drafts put up for verification."
)
SPEC_DECODE_ACCEPTED_TOKENS = _counter(
    "llm_engine_spec_decode_accepted_tokens", "Draft tokens that verification accepted."
)

# The engine's own estimate of its work
ESTIMATED_GPU_FLOPS = _counter(
    "llm_engine_estimated_gpu_flops",
    "Floating-point operations per GPU by the engine's own estimate, summed over ranks.",
)
ESTIMATED_GPU_READ_BYTES = _counter(
    "llm_engine_estimated_gpu_read_bytes",
    "Bytes read from memory per GPU by the engine's own estimate, summed over ranks.",
    unit=Unit.BYTES,
)
ESTIMATED_GPU_WRITE_BYTES = _counter(
    "llm_engine_estimated_gpu_write_bytes",
    "Bytes written to memory per GPU by the engine's own estimate, summed over ranks.",
    unit=Unit.BYTES,
)

# Limits and the process
MAX_RUNNING_REQUESTS = _gauge(
    "llm_engine_max_running_requests", "Requests that the engine lets run at once."
)
MAX_STEP_TOKENS = _gauge(
    "llm_engine_max_step_tokens", "Tokens that one step may compute.", merge=Merge.MAX
)
MAX_CONTEXT_TOKENS = _gauge(
    "llm_engine_max_context_tokens", "Tokens that one request may span.", merge=Merge.MAX
)
PROCESS_START_TIME = Metric(
    name="llm_engine_process_start_time_seconds",
    kind=Kind.GAUGE,
    help="When the process behind the engine's page started, in Unix time.",
    unit=Unit.SECONDS,
    merge=Merge.MAX,
)

# Latency, in each engine's own buckets
TIME_TO_FIRST_TOKEN = _seconds(
    "llm_engine_time_to_first_token_seconds", "Arrival to first token, as the engine saw it."
)
INTER_TOKEN_LATENCY = _seconds(
    "llm_engine_inter_token_latency_seconds", "Gap between two outputs of one request."
)
TIME_PER_OUTPUT_TOKEN = _seconds(
    "llm_engine_time_per_output_token_seconds", "Mean time per output token of one request."
)
REQUEST_DURATION = _seconds(
    "llm_engine_request_duration_seconds", "Arrival to last token, as the engine saw it."
)
QUEUE_TIME = _seconds("llm_engine_queue_time_seconds", "Time a request waited for its first step.")
PREFILL_TIME = _seconds(
    "llm_engine_prefill_time_seconds", "First step of a request to its first token."
)
DECODE_TIME = _seconds(
    "llm_engine_decode_time_seconds", "First token of a request to its last token."
)

ENGINE_FACTS: tuple[Metric, ...] = (
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    REQUESTS_WAITING_BY_REASON,
    AWAKE,
    DATA_PARALLEL_RANKS,
    KV_CACHE_USAGE,
    KV_BLOCKS,
    KV_BLOCK_TOKENS,
    KV_CAPACITY_TOKENS,
    KV_VALUE_BYTES,
    PREEMPTIONS,
    INPUT_TOKENS,
    INPUT_TOKENS_BY_SOURCE,
    CACHED_INPUT_TOKENS,
    OUTPUT_TOKENS,
    PREFIX_CACHE_QUERY_TOKENS,
    PREFIX_CACHE_HIT_TOKENS,
    REQUESTS_FINISHED,
    REQUESTS_FAILED,
    REQUESTS_ABORTED,
    ADMISSION_REJECTIONS,
    STEPS,
    STEP_TOKENS,
    SPEC_DECODE_DRAFTS,
    SPEC_DECODE_DRAFT_TOKENS,
    SPEC_DECODE_ACCEPTED_TOKENS,
    ESTIMATED_GPU_FLOPS,
    ESTIMATED_GPU_READ_BYTES,
    ESTIMATED_GPU_WRITE_BYTES,
    MAX_RUNNING_REQUESTS,
    MAX_STEP_TOKENS,
    MAX_CONTEXT_TOKENS,
    PROCESS_START_TIME,
    TIME_TO_FIRST_TOKEN,
    INTER_TOKEN_LATENCY,
    TIME_PER_OUTPUT_TOKEN,
    REQUEST_DURATION,
    QUEUE_TIME,
    PREFILL_TIME,
    DECODE_TIME,
)
