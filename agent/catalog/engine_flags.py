"""Command-line flags of engines for limits that their expositions do not contain.

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
