"""Counts the FLOPs of latent attention (MLA) with torch's counter, and by vLLM's own formula.

The engine's Python runs this script: transformers and vLLM are there. All tensors are on the meta
device, without values. Prints one JSON object.
"""

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch  # type: ignore[import-not-found]
from torch.utils.flop_counter import FlopCounterMode  # type: ignore[import-not-found]
from transformers import AutoConfig  # type: ignore[import-not-found]
from transformers.models.deepseek_v3 import (  # type: ignore[import-not-found]
    modeling_deepseek_v3,
)


def main() -> None:
    """Reads a config, [new, cached] of prefills, contexts, and the size of a selection."""
    asked = json.load(sys.stdin)
    config = AutoConfig.for_model(**asked["config"])
    with torch.device("meta"):
        attention = modeling_deepseek_v3.DeepseekV3Attention(config, 0)
        found = {
            "prefill": [prefill(attention, *lengths) for lengths in asked["prefills"]],
            "decode": [decode(attention, context) for context in asked["contexts"]],
        }
    found["engines_decode"] = [engines_decode(config, context) for context in asked["contexts"]]
    found["engine_expands"] = [
        engine_expands(new + cached, asked["selected"]) for new, cached in asked["prefills"]
    ]
    sys.stdout.write(json.dumps(found))


def prefill(attention: Any, new: int, cached: int) -> int:
    """FLOPs of one layer over `new` tokens, as vLLM computes them: all latents are expanded."""
    config = attention.config
    with FlopCounterMode(display=False) as counter:
        hidden = torch.empty(new, config.hidden_size)
        query = attention.q_b_proj(attention.q_a_proj(hidden))
        attention.kv_a_proj_with_mqa(hidden)
        latents = torch.empty(cached + new, config.kv_lora_rank)
        attention.kv_b_proj(latents)
        heads = config.num_attention_heads
        query = query.view(heads, new, attention.qk_head_dim)
        keys = torch.empty(heads, attention.qk_head_dim, cached + new)
        values = torch.empty(heads, cached + new, config.v_head_dim)
        seen = torch.bmm(torch.bmm(query, keys), values)
        attention.o_proj(seen.view(new, heads * config.v_head_dim))
    return int(counter.get_total_flops())


def decode(attention: Any, context: int) -> int:
    """FLOPs of one layer over one token: `kv_b_proj` is absorbed, and latents are attended to."""
    config = attention.config
    heads, rank = config.num_attention_heads, config.kv_lora_rank
    with FlopCounterMode(display=False) as counter:
        hidden = torch.empty(1, config.hidden_size)
        attention.q_b_proj(attention.q_a_proj(hidden))
        attention.kv_a_proj_with_mqa(hidden)
        into_keys = torch.empty(heads, config.qk_nope_head_dim, rank)
        query = torch.bmm(torch.empty(heads, 1, config.qk_nope_head_dim), into_keys)
        rotated = torch.empty(heads, 1, config.qk_rope_head_dim)
        keys = torch.empty(heads, rank + config.qk_rope_head_dim, context)
        scores = torch.bmm(torch.cat((query, rotated), dim=-1), keys)
        seen = torch.bmm(scores, torch.empty(heads, context, rank))
        values = torch.bmm(seen, torch.empty(heads, rank, config.v_head_dim))
        attention.o_proj(values.view(1, heads * config.v_head_dim))
    return int(counter.get_total_flops())


def engines_decode(config: Any, context: int) -> int:
    """FLOPs of one layer over one token by the counters of `--enable-mfu-metrics`."""
    from vllm.v1.metrics.perf import (  # type: ignore[import-not-found]
        ExecutionContext,
        MLAAttentionMetrics,
    )

    same = ("hidden_size", "num_attention_heads", "kv_lora_rank", "q_lora_rank")
    sizes = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    metrics = MLAAttentionMetrics(
        num_hidden_layers=1,
        activation_byte_size=2,
        weight_byte_size=2,
        cache_byte_size=2,
        tp_size=1,
        pp_size=1,
        **{key: getattr(config, key) for key in (*same, *sizes)},
    )
    step = ExecutionContext()
    step.add(1, context, is_prefill=False)
    return int(sum(metrics.get_num_flops_breakdown(step).values()))


def engine_expands(context: int, selected: int) -> bool:
    """Whether vLLM expands the latents of a prefill that attends to `selected` tokens at most."""
    from vllm.config.attention import AttentionConfig  # type: ignore[import-not-found]
    from vllm.model_executor.layers.attention import (  # type: ignore[import-not-found]
        sparse_mla_attention,
    )

    config = SimpleNamespace(attention_config=AttentionConfig())
    return bool(sparse_mla_attention._use_dense_mha_prefill(config, context, selected))


if __name__ == "__main__":
    main()
