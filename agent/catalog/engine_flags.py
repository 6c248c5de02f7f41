"""Limits that an engine is given at its start and that its page does not tell.

vLLM 0.32 `vllm/engine/arg_utils.py`, `vllm/config/scheduler.py`. All are those of one data-parallel
rank. Of several flags for one limit the first that was given holds, being the narrower one.
"""

from collections.abc import Mapping, Sequence

from agent.catalog import engine_facts as fact
from agent.catalog.metric import Metric

LIMIT_FLAGS: Mapping[Metric, Sequence[str]] = {
    fact.MAX_RUNNING_REQUESTS: ("--max-num-active-seqs", "--max-num-seqs"),
    fact.MAX_STEP_TOKENS: ("--max-num-scheduled-tokens", "--max-num-batched-tokens"),
    fact.MAX_CONTEXT_TOKENS: ("--max-model-len",),
}
