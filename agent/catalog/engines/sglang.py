"""SGLang 0.4 and 0.5.

Names: sglang/srt/observability/metrics_collector.py; in 0.4 sglang/srt/metrics/collector.py.
"""

from agent.catalog import engine_facts as fact
from agent.catalog.engines.dialect import (
    OFTEN_ABSENT,
    PROCESS_FACTS,
    RAY_REPLICAS,
    Dialect,
    Spelling,
)

_HITS = ("device_hit", "host_hit", "storage_hit")
# Where prefill and decode are apart, requests also wait in these, for memory and for KV on its way.
_APART_QUEUES = (
    "sglang:num_prefill_bootstrap_queue_reqs",
    "sglang:num_prefill_inflight_queue_reqs",
    "sglang:num_decode_prealloc_queue_reqs",
    "sglang:num_decode_transfer_queue_reqs",
)
_REALTIME_LOOKUPS = ("prefill_cache", "prefill_compute")

SGLANG = Dialect(
    engine="sglang",
    # Ray Serve's collector writes its own prefix, and an underscore for each colon.
    prefixes=("sglang:", "ray_sglang_"),
    model_labels=("model_name",),
    replicas=RAY_REPLICAS,
    merged_ranks=("dp_rank",),
    counted_at_end=frozenset({fact.INPUT_TOKENS, fact.OUTPUT_TOKENS}),
    # With attention data parallelism the lowest tensor rank of a data rank above 0 is not 0.
    mirrored_ranks=("tp_rank", "pp_rank", "moe_ep_rank"),
    # With priority scheduling a gauge with the empty priority is the total. Counters and histograms
    # of requests have no total: there the empty priority stands for requests that set none
    # (SchedulerMetricsCollector and managers/tokenizer_manager.py).
    totals={"priority": ""},
    # Labelled counters and histograms exist from their first value on.
    occasional=OFTEN_ABSENT
    | {
        fact.PREEMPTIONS,
        fact.CACHED_INPUT_TOKENS,
        fact.PREFIX_CACHE_HIT_TOKENS,
        fact.INTER_TOKEN_LATENCY,
        fact.TIME_PER_OUTPUT_TOKEN,
    },
    facts={
        fact.REQUESTS_RUNNING: (Spelling("sglang:num_running_reqs"),),
        fact.REQUESTS_WAITING: (Spelling("sglang:num_queue_reqs", also=_APART_QUEUES),),
        fact.KV_CACHE_USAGE: (Spelling("sglang:token_usage"),),
        fact.KV_BLOCKS: (Spelling("sglang:num_pages"),),
        fact.KV_BLOCK_TOKENS: (Spelling("sglang:page_size"),),
        fact.KV_CAPACITY_TOKENS: (Spelling("sglang:max_total_num_tokens"),),
        fact.PREEMPTIONS: (Spelling("sglang:num_retracted_requests_total"),),
        fact.INPUT_TOKENS: (Spelling("sglang:prompt_tokens_total"),),
        fact.CACHED_INPUT_TOKENS: (Spelling("sglang:cached_tokens_total"),),
        fact.OUTPUT_TOKENS: (Spelling("sglang:generation_tokens_total"),),
        fact.PREFIX_CACHE_QUERY_TOKENS: (
            Spelling("sglang:prefill_effective_tokens_total"),
            Spelling("sglang:realtime_tokens_total", only={"mode": _REALTIME_LOOKUPS}),
        ),
        fact.PREFIX_CACHE_HIT_TOKENS: (
            Spelling("sglang:prefill_effective_tokens_total", only={"mode": _HITS}),
            Spelling("sglang:realtime_tokens_total", only={"mode": ("prefill_cache",)}),
        ),
        fact.REQUESTS_FINISHED: (Spelling("sglang:num_requests_total"),),
        fact.REQUESTS_ABORTED: (Spelling("sglang:num_aborted_requests_total"),),
        fact.SPEC_DECODE_DRAFTS: (Spelling("sglang:spec_verify_calls_total"),),
        fact.ESTIMATED_GPU_FLOPS: (
            Spelling("sglang:estimated_flops_per_gpu_total", zero_means_off=True),
        ),
        fact.ESTIMATED_GPU_READ_BYTES: (
            Spelling("sglang:estimated_read_bytes_per_gpu_total", zero_means_off=True),
        ),
        fact.ESTIMATED_GPU_WRITE_BYTES: (
            Spelling("sglang:estimated_write_bytes_per_gpu_total", zero_means_off=True),
        ),
        fact.MAX_CONTEXT_TOKENS: (Spelling("sglang:context_len"),),
        fact.TIME_TO_FIRST_TOKEN: (Spelling("sglang:time_to_first_token_seconds"),),
        fact.INTER_TOKEN_LATENCY: (Spelling("sglang:inter_token_latency_seconds"),),
        # Before 0.5 one observation at each output: the mean per token of the request so far.
        fact.TIME_PER_OUTPUT_TOKEN: (
            Spelling("sglang:request_time_per_output_token_seconds"),
            Spelling("sglang:time_per_output_token_seconds"),
        ),
        fact.REQUEST_DURATION: (Spelling("sglang:e2e_request_latency_seconds"),),
        fact.QUEUE_TIME: (Spelling("sglang:queue_time_seconds"),),
        **PROCESS_FACTS,
    },
)
