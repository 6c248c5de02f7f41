"""vLLM 0.8 to 0.33. Names and their history: vllm/v1/metrics/loggers.py of those releases.

The option --custom-histogram-buckets changes the bucket edges."""

from agent.catalog import engine_facts as fact
from agent.catalog.engines.dialect import (
    OFTEN_ABSENT,
    PROCESS_FACTS,
    RAY_REPLICAS,
    Dialect,
    Spelling,
)
from agent.catalog.metric import Merge

TTFT_EDGES_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TPOT_EDGES_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
DURATION_EDGES_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip

# Bytes of a value by --kv-cache-dtype (vllm/config/cache.py, 0.32). The last two store a
# token of latent attention, 576 values, in that number of bytes
# (model_executor/layers/attention/mla_attention.py). NVFP4 has a scale of one byte for each 16
# values, UltraQuant for each 32. The types per token and head have a scale of four bytes for each
# head (v1/attention/backends/triton_attn.py), which is taken to have 128 values. `auto` is the type
# in the model's files. TurboQuant keeps some layers in 16 bits: its width is not one number.
_HEAD_SCALE = 4 / 128
_CACHE_BYTES = {
    "float16": 2.0,
    "bfloat16": 2.0,
    "fp8": 1.0,
    "fp8_e4m3": 1.0,
    "fp8_e5m2": 1.0,
    "fp8_inc": 1.0,
    "fp8_per_token_head": 1.0 + _HEAD_SCALE,
    "int8_per_token_head": 1.0 + _HEAD_SCALE,
    "int4_per_token_head": 0.5 + _HEAD_SCALE,
    "nvfp4": 9 / 16,
    "nvfp4_4over6": 9 / 16,
    "ultraquant_4bit": 0.5 + 1 / 32,
    "fp8_ds_mla": 656 / 576,
    "nvfp4_ds_mla": 352 / 576,
}
_LOADS = {"transfer_type": ("CPU_to_GPU",)}

VLLM = Dialect(
    engine="vllm",
    # Under Ray the colon, which OpenTelemetry forbids, becomes an underscore, and Ray's own page
    # puts `ray_` before it (vllm/v1/metrics/ray_wrappers.py; Ray's dashboards).
    prefixes=("vllm:", "vllm_", "ray_vllm_", "ray_vllm:"),
    # Triton has the name of its own model in another label.
    model_labels=("model_name", "model"),
    replicas=RAY_REPLICAS,
    merged_ranks=("engine",),
    # The router of production-stack publishes gauges under the engine's names, per `server`.
    foreign="server",
    own="engine",
    occasional=OFTEN_ABSENT,
    facts={
        fact.REQUESTS_RUNNING: (Spelling("vllm:num_requests_running"),),
        fact.REQUESTS_WAITING: (Spelling("vllm:num_requests_waiting"),),
        fact.REQUESTS_WAITING_BY_REASON: (Spelling("vllm:num_requests_waiting_by_reason"),),
        # The frontend in Rust has no cache_config_info. It has the series of every connector, those
        # of NIXL too, which the frontend in Python has only with that connector.
        fact.FRONTEND: (
            Spelling("vllm:cache_config_info", implies={"frontend": "python"}),
            Spelling("vllm:nixl_num_failed_notifications_total", implies={"frontend": "rust"}),
        ),
        fact.AWAKE: (Spelling("vllm:engine_sleep_state", only={"sleep_state": ("awake",)}),),
        fact.KV_CACHE_USAGE: (
            Spelling("vllm:kv_cache_usage_perc"),
            Spelling("vllm:gpu_cache_usage_perc"),
        ),
        # Each rank's series already holds the blocks of all ranks, but only its own tokens
        # (vllm/v1/engine/core_client.py).
        fact.KV_BLOCKS: (
            Spelling("vllm:cache_config_info", number_in="num_gpu_blocks", merge=Merge.MAX),
        ),
        fact.KV_BLOCK_TOKENS: (Spelling("vllm:cache_config_info", number_in="block_size"),),
        fact.KV_CAPACITY_TOKENS: (
            Spelling("vllm:cache_config_info", number_in="kv_cache_size_tokens"),
        ),
        fact.KV_VALUE_BYTES: (
            Spelling("vllm:cache_config_info", number_in="cache_dtype", words=_CACHE_BYTES),
        ),
        # Since 0.33: each rank's series has its own tier.
        fact.KV_OFFLOAD_CAPACITY_TOKENS: (
            Spelling("vllm:kv_offload_config_info", number_in="cpu_kv_cache_size_tokens"),
        ),
        fact.KV_OFFLOAD_CAPACITY_BYTES: (
            Spelling("vllm:kv_offload_config_info", number_in="cpu_kv_cache_size_bytes"),
        ),
        # The older names are of the releases 0.16 to 0.23. LMCache in the engine's process has its
        # own (lmcache/observability.py).
        fact.KV_OFFLOAD_LOAD_TIME: (
            Spelling("vllm:kv_offload_load_time_total", also=("lmcache:time_to_retrieve_sum",)),
            Spelling("vllm:kv_offload_total_time_total", only=_LOADS),
        ),
        fact.KV_OFFLOAD_LOAD_BYTES: (
            Spelling("vllm:kv_offload_load_bytes_total"),
            Spelling("vllm:kv_offload_total_bytes_total", only=_LOADS),
        ),
        fact.KV_OFFLOAD_TIER_READ_TIME: (Spelling("vllm:kv_offload_tiering_read_time_total"),),
        fact.KV_OFFLOAD_TIER_QUERIES: (Spelling("vllm:kv_offload_tiering_chunk_queries_total"),),
        fact.KV_OFFLOAD_TIER_HITS: (Spelling("vllm:kv_offload_tiering_chunk_hits_total"),),
        fact.KV_TRANSFER_BYTES: (
            Spelling(
                "vllm:nixl_bytes_transferred_sum", also=("vllm:mooncake_bytes_transferred_sum",)
            ),
        ),
        fact.KV_TRANSFERS_FAILED: (
            Spelling(
                "vllm:nixl_num_failed_transfers_total",
                also=("vllm:mooncake_num_failed_transfers_total",),
            ),
        ),
        fact.PREEMPTIONS: (Spelling("vllm:num_preemptions_total"),),
        fact.INPUT_TOKENS: (Spelling("vllm:prompt_tokens_total"),),
        fact.INPUT_TOKENS_BY_SOURCE: (Spelling("vllm:prompt_tokens_by_source_total"),),
        fact.CACHED_INPUT_TOKENS: (Spelling("vllm:prompt_tokens_cached_total"),),
        fact.OUTPUT_TOKENS: (Spelling("vllm:generation_tokens_total"),),
        # Release 0.8 counts blocks, not tokens, under the older names: only its hit rate is right.
        fact.PREFIX_CACHE_QUERY_TOKENS: (
            Spelling("vllm:prefix_cache_queries_total"),
            Spelling("vllm:gpu_prefix_cache_queries_total"),
        ),
        fact.PREFIX_CACHE_HIT_TOKENS: (
            Spelling("vllm:prefix_cache_hits_total"),
            Spelling("vllm:gpu_prefix_cache_hits_total"),
        ),
        fact.EXTERNAL_CACHE_QUERY_TOKENS: (Spelling("vllm:external_prefix_cache_queries_total"),),
        fact.EXTERNAL_CACHE_HIT_TOKENS: (Spelling("vllm:external_prefix_cache_hits_total"),),
        # Despite its name this counts every finish reason.
        fact.REQUESTS_FINISHED: (
            Spelling("vllm:request_success_total", labels={"finish_reason": "finished_reason"}),
        ),
        # A stream that breaks after its 200 is not a 5xx, so this is a lower bound.
        fact.REQUESTS_FAILED: (
            Spelling(
                "http_requests_total",
                labels={"reason": "status"},
                only={"status": ("5xx",)},
                shared=True,
            ),
        ),
        fact.ADMISSION_REJECTIONS: (Spelling("vllm:admission_rejections_total"),),
        # A histogram whose own name ends in `_total`.
        fact.STEPS: (Spelling("vllm:iteration_tokens_total_count"),),
        fact.STEP_TOKENS: (Spelling("vllm:iteration_tokens_total_sum"),),
        fact.SPEC_DECODE_DRAFTS: (Spelling("vllm:spec_decode_num_drafts_total"),),
        fact.SPEC_DECODE_DRAFT_TOKENS: (Spelling("vllm:spec_decode_num_draft_tokens_total"),),
        fact.SPEC_DECODE_ACCEPTED_TOKENS: (Spelling("vllm:spec_decode_num_accepted_tokens_total"),),
        fact.SPEC_DECODE_ACCEPTED_BY_POSITION: (
            Spelling("vllm:spec_decode_num_accepted_tokens_per_pos_total"),
        ),
        # Every exposition has these; they stay 0 without --enable-mfu-metrics.
        fact.ESTIMATED_GPU_FLOPS: (
            Spelling("vllm:estimated_flops_per_gpu_total", zero_means_off=True),
        ),
        fact.ESTIMATED_GPU_READ_BYTES: (
            Spelling("vllm:estimated_read_bytes_per_gpu_total", zero_means_off=True),
        ),
        fact.ESTIMATED_GPU_WRITE_BYTES: (
            Spelling("vllm:estimated_write_bytes_per_gpu_total", zero_means_off=True),
        ),
        fact.TIME_TO_FIRST_TOKEN: (Spelling("vllm:time_to_first_token_seconds"),),
        # The older name always meant the gap between outputs, not the mean per token.
        fact.INTER_TOKEN_LATENCY: (
            Spelling("vllm:inter_token_latency_seconds"),
            Spelling("vllm:time_per_output_token_seconds"),
        ),
        fact.TIME_PER_OUTPUT_TOKEN: (Spelling("vllm:request_time_per_output_token_seconds"),),
        fact.REQUEST_DURATION: (Spelling("vllm:e2e_request_latency_seconds"),),
        fact.QUEUE_TIME: (Spelling("vllm:request_queue_time_seconds"),),
        fact.PREFILL_TIME: (Spelling("vllm:request_prefill_time_seconds"),),
        fact.DECODE_TIME: (Spelling("vllm:request_decode_time_seconds"),),
        fact.KV_TRANSFER_TIME: (
            Spelling("vllm:nixl_xfer_time_seconds", also=("vllm:mooncake_xfer_time_seconds",)),
        ),
        fact.KV_OFFLOAD_PROMOTION_TIME: (
            Spelling("vllm:kv_offload_tiering_promotion_latency_seconds"),
        ),
        **PROCESS_FACTS,
    },
)
