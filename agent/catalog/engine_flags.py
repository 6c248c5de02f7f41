"""Command-line flags of engines, for what their expositions do not contain.

Source: vLLM 0.32 `vllm/engine/arg_utils.py`, `vllm/config/scheduler.py`. Each limit is that of one
data-parallel rank. The flags of a limit are ordered narrowest first; the first one given counts.
"""

from collections.abc import Mapping, Sequence

from agent.catalog import engine_facts as fact
from agent.catalog.metric import Metric

LIMIT_FLAGS: Mapping[Metric, Sequence[str]] = {
    fact.MAX_RUNNING_REQUESTS: ("--max-num-active-seqs", "--max-num-seqs"),
    fact.MAX_STEP_TOKENS: ("--max-num-scheduled-tokens", "--max-num-batched-tokens"),
    fact.MAX_CONTEXT_TOKENS: ("--max-model-len",),
}

# Short names of flags.
FLAG_ALIASES: Mapping[str, str] = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-sc": "--speculative-config",
}
TRACES_ENDPOINT = "--otlp-traces-endpoint"
NO_STATISTICS = "--disable-log-stats"
# The flags that an audit reads. None of their values is a secret.
AUDITED_FLAGS = frozenset(
    {
        *FLAG_ALIASES.values(),
        NO_STATISTICS,
        "--dtype",
        "--enforce-eager",
        "--kv-cache-dtype",
        "--no-enable-chunked-prefill",
        "--no-enable-prefix-caching",
        TRACES_ENDPOINT,
        "--quantization",
        "--shutdown-timeout",
    }
)
# With this flag a file gives flags, too.
FLAGS_FILE = "--config"

# Values of --kv-cache-dtype with less than 8 bits, whose answers differ most from the model's.
# Source: vLLM 0.32 `vllm/config/cache.py`, CacheDType.
NARROW_CACHES = frozenset(
    {
        "int4_per_token_head",
        "nvfp4",
        "nvfp4_4over6",
        "turboquant_3bit_nc",
        "turboquant_4bit_nc",
        "turboquant_k3v4_nc",
        "ultraquant_4bit",
    }
)
# What vLLM chooses without the flags, from the smallest GPU to the largest; on a CPU 128.
# Source: vLLM 0.32 `vllm/engine/arg_utils.py`, get_batch_defaults.
DEFAULT_RUNNING, DEFAULT_STEP_TOKENS = (256, 1024), (2048, 16_384)
