"""The model architectures that this version knows: one row per `model_type` of a config.json.

Rows and defaults are from the model and configuration classes of transformers 5.19. A config.json
may leave out keys that its class has defaults for, so the defaults are part of the architecture.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

_ALL = ("q", "k", "v", "o")


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What a model type fixes beyond the numbers of its config.json.

    `biased` are the attention matrices that have a bias with `attention_bias`. `norms` counts the
    norms of one layer over the hidden size. `full_attention_every` is None where no layer has a
    sliding window, 0 where every layer has one; n means that every n-th layer attends to all.
    """

    latent_attention: bool = False
    attention_bias: bool = False
    biased: tuple[str, ...] = _ALL
    head_norms: bool = False
    sinks: bool = False
    norms: int = 2
    full_attention_every: int | None = None
    experts: bool = False
    expert_bias: bool = False
    router_bias: bool = False
    defaults: Mapping[str, object] = field(default_factory=dict)


_LLAMA = Architecture()
_QWEN2 = Architecture(attention_bias=True, biased=("q", "k", "v"))
_QWEN3 = Architecture(head_norms=True, defaults={"head_dim": 128})
_QWEN3_MOE = Architecture(
    head_norms=True,
    experts=True,
    defaults={"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8},
)
_DEEPSEEK_V3 = Architecture(latent_attention=True, experts=True, router_bias=True)

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": _LLAMA,
    "mistral": Architecture(full_attention_every=0, defaults={"sliding_window": 4096}),
    "mixtral": Architecture(
        full_attention_every=0,
        experts=True,
        defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "qwen2": _QWEN2,
    "qwen2_vl": _QWEN2,
    "qwen2_vl_text": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "qwen2_moe": Architecture(
        attention_bias=True,
        biased=("q", "k", "v"),
        experts=True,
        defaults={"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408},
    ),
    "qwen3": _QWEN3,
    "qwen3_vl_text": _QWEN3,
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_vl_moe_text": _QWEN3_MOE,
    "phi3": Architecture(full_attention_every=0),
    "gemma2": Architecture(
        norms=4,
        full_attention_every=2,
        defaults={
            "head_dim": 256,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
            "vocab_size": 256000,
        },
    ),
    "gemma3_text": Architecture(
        norms=4,
        head_norms=True,
        full_attention_every=6,
        defaults={
            "head_dim": 256,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_attention_heads": 8,
            "num_hidden_layers": 26,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
            "vocab_size": 262208,
        },
    ),
    "gpt_oss": Architecture(
        attention_bias=True,
        sinks=True,
        full_attention_every=2,
        experts=True,
        expert_bias=True,
        router_bias=True,
        defaults={"head_dim": 64, "sliding_window": 128},
    ),
    "deepseek_v2": Architecture(latent_attention=True, experts=True),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "glm4_moe": Architecture(biased=("q", "k", "v"), experts=True, router_bias=True),
}
