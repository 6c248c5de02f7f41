"""TensorRT-LLM behind trtllm-serve. Names: tensorrt_llm/metrics/collector.py.

Before 1.3 it had five metrics, without a prefix. Other programs have such names too, so that only
its label `engine_type` shows whose they are.
"""

from agent.catalog import engine_facts as fact
from agent.catalog.engines.dialect import OFTEN_ABSENT, PROCESS_FACTS, Dialect, Spelling

_UNPREFIXED = {"engine_type": ("undefined", "trtllm")}
# Its one caller counts requests that it cannot parse, the mistakes of clients:
# tensorrt_llm/serve/openai_server.py of 2026 and pull request 12636.
_SERVER_ERRORS = {"http_code": tuple(str(code) for code in range(500, 600))}

TRTLLM = Dialect(
    engine="trtllm",
    # Dynamo 0.7 writes the second one, from 0.9 on the first (docs/backends/trtllm/prometheus.md).
    prefixes=("trtllm_", "trtllm:"),
    # Its `/metrics` is JSON, and each read removes it.
    metrics_path="/prometheus/metrics",
    model_labels=("model_name",),
    counted_at_end=frozenset({fact.INPUT_TOKENS, fact.OUTPUT_TOKENS}),
    no_models=frozenset({"undefined"}),
    occasional=OFTEN_ABSENT | {fact.CACHED_INPUT_TOKENS, fact.TIME_PER_OUTPUT_TOKEN},
    facts={
        fact.REQUESTS_RUNNING: (Spelling("trtllm_num_requests_running"),),
        fact.REQUESTS_WAITING: (Spelling("trtllm_num_requests_waiting"),),
        fact.KV_CACHE_USAGE: (Spelling("trtllm_kv_cache_utilization"),),
        fact.KV_BLOCKS: (Spelling("trtllm_kv_cache_max_blocks"),),
        fact.KV_BLOCK_TOKENS: (Spelling("trtllm_kv_cache_tokens_per_block"),),
        fact.INPUT_TOKENS: (Spelling("trtllm_prompt_tokens_total"),),
        fact.CACHED_INPUT_TOKENS: (Spelling("trtllm_prompt_cached_tokens_total"),),
        fact.OUTPUT_TOKENS: (Spelling("trtllm_generation_tokens_total"),),
        fact.REQUESTS_FINISHED: (
            Spelling("trtllm_request_success_total", labels={"finish_reason": "finished_reason"}),
            Spelling(
                "request_success_total",
                labels={"finish_reason": "finished_reason"},
                only=_UNPREFIXED,
            ),
        ),
        fact.REQUESTS_FAILED: (
            Spelling(
                "trtllm_request_error_total", labels={"reason": "http_code"}, only=_SERVER_ERRORS
            ),
        ),
        fact.SPEC_DECODE_DRAFT_TOKENS: (Spelling("trtllm_spec_decode_num_draft_tokens_total"),),
        fact.SPEC_DECODE_ACCEPTED_TOKENS: (
            Spelling("trtllm_spec_decode_num_accepted_tokens_total"),
        ),
        fact.MAX_RUNNING_REQUESTS: (Spelling("trtllm_max_num_active_requests"),),
        fact.MAX_STEP_TOKENS: (Spelling("trtllm_max_num_tokens_runtime"),),
        fact.TIME_TO_FIRST_TOKEN: (
            Spelling("trtllm_time_to_first_token_seconds"),
            Spelling("time_to_first_token_seconds", only=_UNPREFIXED),
        ),
        fact.TIME_PER_OUTPUT_TOKEN: (
            Spelling("trtllm_time_per_output_token_seconds"),
            Spelling("time_per_output_token_seconds", only=_UNPREFIXED),
        ),
        fact.REQUEST_DURATION: (
            Spelling("trtllm_e2e_request_latency_seconds"),
            Spelling("e2e_request_latency_seconds", only=_UNPREFIXED),
        ),
        fact.QUEUE_TIME: (
            Spelling("trtllm_request_queue_time_seconds"),
            Spelling("request_queue_time_seconds", only=_UNPREFIXED),
        ),
        fact.PREFILL_TIME: (Spelling("trtllm_request_prefill_time_seconds"),),
        fact.DECODE_TIME: (Spelling("trtllm_request_decode_time_seconds"),),
        **PROCESS_FACTS,
    },
)
