"""The facts of engines' expositions under the agent's own names: one metric per fact.

Each is published with the labels `engine` and `model` before its own. A label that the engine does
not have is the empty string. `merge` says how the values of data-parallel ranks become one.
"""

from agent.catalog.metric import Merge, Metric, Unit, counter, gauge, histogram

_WHILE_DOWN = "while the engine does not answer"
_UNKNOWN_LIMIT = "if neither the exposition, the settings nor the command line has it"

# Load
REQUESTS_RUNNING = gauge(
    "llm_engine_requests_running", "Requests in the engine's running batch now."
)
REQUESTS_WAITING = gauge(
    "llm_engine_requests_waiting", "Requests that wait for a place in the batch now."
)
REQUESTS_WAITING_BY_REASON = gauge(
    "llm_engine_requests_waiting_by_reason",
    "Requests that wait now, by the engine's own reasons.",
    "reason",
)
AWAKE = gauge(
    "llm_engine_awake",
    "1 while the engine is ready to generate, 0 while it sleeps with its memory released.",
    merge=Merge.MAX,
)
FRONTEND = gauge(
    "llm_engine_frontend",
    "Always 1; the frontend of vLLM, python or rust. Only rust counts requests that their clients "
    "aborted as finished.",
    "frontend",
    merge=Merge.MAX,
)
FACT_MISSING = gauge(
    "llm_engine_fact_missing",
    "1 for each fact that the engine gave before and gives no more: its series may be renamed.",
    "fact",
    merge=Merge.MAX,
    absent="while no fact is missing",
)
SCRAPE_DURATION = gauge(
    "llm_engine_scrape_duration_seconds",
    "Time that the agent waited for the engine's exposition.",
    unit=Unit.SECONDS,
    merge=Merge.MAX,
    absent=_WHILE_DOWN,
)
DATA_PARALLEL_RANKS = gauge(
    "llm_engine_data_parallel_ranks",
    "Data-parallel ranks in the engine's exposition; facts per GPU are sums over them.",
    absent=_WHILE_DOWN,
)

# KV cache
KV_CACHE_USAGE = gauge(
    "llm_engine_kv_cache_usage_ratio",
    "Share of the KV cache held by live requests, 0 to 1, of the fullest rank.",
    unit=Unit.RATIO,
    merge=Merge.MAX,
)
KV_BLOCKS = gauge("llm_engine_kv_blocks", "Blocks in the KV cache of all ranks.")
KV_BLOCK_TOKENS = gauge(
    "llm_engine_kv_block_tokens", "Tokens that one block of the KV cache holds.", merge=Merge.MAX
)
KV_CAPACITY_TOKENS = gauge(
    "llm_engine_kv_capacity_tokens", "Tokens that the KV cache of all ranks holds."
)
KV_VALUE_BYTES = gauge(
    "llm_engine_kv_value_bytes",
    "Bytes of one value in the KV cache, if the engine's settings give its type.",
    unit=Unit.BYTES,
    merge=Merge.MAX,
)
KV_OFFLOAD_CAPACITY_TOKENS = gauge(
    "llm_engine_kv_offload_capacity_tokens",
    "Tokens that the host memory for offloaded KV values of all ranks holds.",
)
KV_OFFLOAD_CAPACITY_BYTES = gauge(
    "llm_engine_kv_offload_capacity_bytes",
    "Host memory for offloaded KV values of all ranks.",
    unit=Unit.BYTES,
)
KV_OFFLOAD_LOAD_TIME = counter(
    "llm_engine_kv_offload_load_seconds",
    "Time of loading offloaded KV values into the GPU, summed over workers; LMCache's included.",
    unit=Unit.SECONDS,
)
KV_OFFLOAD_LOAD_BYTES = counter(
    "llm_engine_kv_offload_load_bytes",
    "Offloaded KV values loaded into the GPU.",
    unit=Unit.BYTES,
)
KV_OFFLOAD_TIER_READ_TIME = counter(
    "llm_engine_kv_offload_tier_read_seconds",
    "Time of reading KV values from a slower tier into host memory.",
    "tier",
    unit=Unit.SECONDS,
)
KV_OFFLOAD_TIER_QUERIES = counter(
    "llm_engine_kv_offload_tier_queries", "Chunks of KV values looked up in a slower tier.", "tier"
)
KV_OFFLOAD_TIER_HITS = counter(
    "llm_engine_kv_offload_tier_hits", "Chunks of KV values found in a slower tier.", "tier"
)
KV_TRANSFER_BYTES = counter(
    "llm_engine_kv_transfer_bytes", "KV values transferred between engines.", unit=Unit.BYTES
)
KV_TRANSFERS_FAILED = counter(
    "llm_engine_kv_transfers_failed", "Transfers of KV values between engines that failed."
)
PREEMPTIONS = counter(
    "llm_engine_preemptions",
    "Times a running request lost its place because the KV cache was full.",
)

# Tokens
INPUT_TOKENS = counter("llm_engine_input_tokens", "Prompt tokens, those found in a cache included.")
INPUT_TOKENS_BY_SOURCE = counter(
    "llm_engine_input_tokens_by_source",
    "Prompt tokens by the origin of their KV values, in the engine's own words.",
    "source",
)
CACHED_INPUT_TOKENS = counter(
    "llm_engine_cached_input_tokens", "Prompt tokens that a cache served instead of computation."
)
OUTPUT_TOKENS = counter("llm_engine_output_tokens", "Tokens generated.")
PREFIX_CACHE_QUERY_TOKENS = counter(
    "llm_engine_prefix_cache_query_tokens", "Tokens looked up in the prefix cache."
)
PREFIX_CACHE_HIT_TOKENS = counter(
    "llm_engine_prefix_cache_hit_tokens", "Tokens found in the prefix cache."
)
EXTERNAL_CACHE_QUERY_TOKENS = counter(
    "llm_engine_external_cache_query_tokens",
    "Tokens looked up outside the GPU: in offload tiers, LMCache or another engine.",
)
EXTERNAL_CACHE_HIT_TOKENS = counter(
    "llm_engine_external_cache_hit_tokens",
    "Tokens found outside the GPU and loaded instead of computed.",
)

# Requests
REQUESTS_FINISHED = counter(
    "llm_engine_requests_finished",
    "Requests that the engine finished, by its own finish reason if it has one.",
    "finish_reason",
)
REQUESTS_FAILED = counter(
    "llm_engine_requests_failed",
    "Requests that failed in the engine, by its own reason or HTTP status; no mistakes of clients.",
    "reason",
)
REQUESTS_ABORTED = counter(
    "llm_engine_requests_aborted",
    "Requests that ended early because they were aborted.",
)
ADMISSION_REJECTIONS = counter(
    "llm_engine_admission_rejections",
    "Requests rejected before they reached the scheduler, by the limit that was full.",
    "reason",
)

# Steps and speculative decoding
STEPS = counter("llm_engine_steps", "Engine steps that gave output.")
STEP_TOKENS = counter("llm_engine_step_tokens", "Tokens computed in those steps.")
SPEC_DECODE_DRAFTS = counter("llm_engine_spec_decode_drafts", "Drafts that went to verification.")
SPEC_DECODE_DRAFT_TOKENS = counter(
    "llm_engine_spec_decode_draft_tokens", "Tokens in the drafts that went to verification."
)
SPEC_DECODE_ACCEPTED_TOKENS = counter(
    "llm_engine_spec_decode_accepted_tokens", "Draft tokens that verification accepted."
)
SPEC_DECODE_ACCEPTED_BY_POSITION = counter(
    "llm_engine_spec_decode_accepted_tokens_by_position",
    "Draft tokens that verification accepted, by their position in the draft, from 0.",
    "position",
)

# The engine's own estimate of its work
ESTIMATED_GPU_FLOPS = counter(
    "llm_engine_estimated_gpu_flops",
    "Floating-point operations per GPU by the engine's own estimate, summed over ranks.",
)
ESTIMATED_GPU_READ_BYTES = counter(
    "llm_engine_estimated_gpu_read_bytes",
    "Bytes read from memory per GPU by the engine's own estimate, summed over ranks.",
    unit=Unit.BYTES,
)
ESTIMATED_GPU_WRITE_BYTES = counter(
    "llm_engine_estimated_gpu_write_bytes",
    "Bytes written to memory per GPU by the engine's own estimate, summed over ranks.",
    unit=Unit.BYTES,
)

# Limits and the process
MAX_RUNNING_REQUESTS = gauge(
    "llm_engine_max_running_requests",
    "Most requests that may run at once.",
    absent=_UNKNOWN_LIMIT,
)
MAX_STEP_TOKENS = gauge(
    "llm_engine_max_step_tokens",
    "Most tokens that one step may compute.",
    merge=Merge.MAX,
    absent=_UNKNOWN_LIMIT,
)
MAX_CONTEXT_TOKENS = gauge(
    "llm_engine_max_context_tokens",
    "Most tokens of one request, input and output.",
    merge=Merge.MAX,
    absent=_UNKNOWN_LIMIT,
)
PROCESS_START_TIME = gauge(
    "llm_engine_process_start_time_seconds",
    "Start of the process that serves the engine's exposition, in Unix time.",
    unit=Unit.SECONDS,
    merge=Merge.MAX,
)

# Latency, in each engine's own buckets
TIME_TO_FIRST_TOKEN = histogram(
    "llm_engine_time_to_first_token_seconds", "Arrival to first token, measured by the engine."
)
# Samples are stored without histograms, but with this count of one.
FIRST_TOKENS = f"{TIME_TO_FIRST_TOKEN.name}_count"
# And with what is kept in each counter, whose name is the first label.
KEPT = "llm_engine_kept"
INTER_TOKEN_LATENCY = histogram(
    "llm_engine_inter_token_latency_seconds", "Gap between two outputs of one request."
)
TIME_PER_OUTPUT_TOKEN = histogram(
    "llm_engine_time_per_output_token_seconds", "Mean time per output token of one request."
)
REQUEST_DURATION = histogram(
    "llm_engine_request_duration_seconds", "Arrival to last token, measured by the engine."
)
QUEUE_TIME = histogram("llm_engine_queue_time_seconds", "Time a request waited for its first step.")
PREFILL_TIME = histogram(
    "llm_engine_prefill_time_seconds", "First step of a request to its first token."
)
DECODE_TIME = histogram(
    "llm_engine_decode_time_seconds", "First token of a request to its last token."
)
KV_TRANSFER_TIME = histogram(
    "llm_engine_kv_transfer_seconds", "Time of one transfer of KV values between engines."
)
KV_OFFLOAD_PROMOTION_TIME = histogram(
    "llm_engine_kv_offload_promotion_seconds",
    "Time to fetch KV values from a slower tier into host memory, failed attempts included.",
)

ENGINE_FACTS = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
