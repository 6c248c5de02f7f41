"""Configurations whose modules are compared: published ones and variants.

Few layers are enough: they differ in kind.
"""

import json
from collections.abc import Iterator
from typing import Any

from agent.catalog.architectures import ARCHITECTURES, model_classes
from tests.sources.model_config.published import FOREIGN_CONFIGS, PUBLISHED

Config = dict[str, Any]

LAYERS = 6
ALTERNATING = ["sliding_attention", "full_attention"] * (LAYERS // 2)

# What a class cannot do without.
REQUIRED: dict[str, Config] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    # Its parts are divided by the rates of its caches.
    "deepseek_v4": {"head_dim": 512, "index_topk": 512},
    "gemma3n_text": {"num_kv_shared_layers": 2, "layer_types": ALTERNATING},
    "hunyuan_v1_dense": {"head_dim": 128},
    "minimax_m3_vl_text": {
        "moe_layer_freq": [0, *[1] * (LAYERS - 1)],
        "sparse_attention_config": {"sparse_attention_freq": [0, *[1] * (LAYERS - 1)]},
    },
    "dots1": {
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1408,
        "layer_types": ["full_attention"] * LAYERS,
    },
    "glm_ocr_text": {"architectures": ["GlmOcrTextModel"]},
    "hunyuan_vl_text": {"head_dim": 128, "architectures": ["HunYuanVLTextModel"]},
    "ministral": {"head_dim": 128},
    "glm4v_text": {"architectures": ["Glm4vTextModel"]},
    "glm4v_moe_text": {"architectures": ["Glm4vMoeTextModel"]},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 8, "moe_topk": [2] * LAYERS},
    "nemotron_h": {"hybrid_override_pattern": "M-M*EM"},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "nemotron": {"num_key_value_heads": 8},
    "olmoe": {"head_dim": 128},
    # Only their wrappers generate.
    "qwen2_vl_text": {"architectures": ["Qwen2VLTextModel"]},
    "qwen2_5_vl_text": {"architectures": ["Qwen2_5_VLTextModel"]},
    "qwen3_vl_text": {"architectures": ["Qwen3VLTextModel"]},
    "qwen3_vl_moe_text": {"architectures": ["Qwen3VLMoeTextModel"]},
}

# Only their wrappers are built.
WRAPPED = {"mllama_text_model", "qwen2_5_omni_text", "qwen3_omni_moe_text", "step3p5"}

# Keys whose absence a class fills in, or that it derives from others.
LEFT_OUT = (
    *("head_dim", "num_key_value_heads", "sliding_window", "tie_word_embeddings", "layer_types"),
    *("moe_intermediate_size", "num_experts", "num_local_experts", "num_experts_per_tok"),
    *("n_routed_experts", "n_shared_experts", "first_k_dense_replace", "vocab_size"),
    *("shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank", "v_head_dim"),
    *("attention_bias", "use_qk_norm"),
)

# Keys that most classes do not have.
FOREIGN: Config = {
    "n_shared_experts": 3,
    "shared_expert_intermediate_size": 640,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 2,
    "attention_bias": True,
    "mlp_bias": True,
    "use_qk_norm": True,
    "full_attention_interval": 3,
    "sliding_window_pattern": 3,
    "index_topk": 64,
    "moe_latent_size": 256,
    "head_dim": 96,
    "num_local_experts": 24,
}

FAMILIES: dict[str, Config] = {
    "llama4-maverick": {
        "model_type": "llama4_text",
        "interleave_moe_layer_step": 2,
        "num_local_experts": 128,
        "no_rope_layers": [1, 1, 0, 1, 1, 0],
    },
    "granite-4-dense": {
        "model_type": "granitemoehybrid",
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 8192,
        "layer_types": ["mamba", "attention", "mamba", "mamba", "attention", "mamba"],
        "hidden_size": 2048,
        "mamba_n_heads": 64,
        "num_key_value_heads": 8,
    },
    "granite-4-moe": {
        "model_type": "granitemoehybrid",
        "layers_block_type": ["mamba"] * 5 + ["attention"],
        "mamba_proj_bias": True,
        "mamba_conv_bias": False,
    },
    "nemotron-3": {
        "model_type": "nemotron_h",
        "hidden_size": 2688,
        "layers_block_type": ["mamba", "moe", "attention", "moe", "mamba", "mlp"],
        "n_routed_experts": 128,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "num_key_value_heads": 2,
        "mamba_num_heads": 64,
        "num_experts_per_tok": 6,
        "moe_latent_size": 1024,
        "use_bias": True,
    },
    "glm-4.7-flash": {
        "model_type": "glm4_moe_lite",
        "mlp_layer_types": ["dense", "dense", *["sparse"] * 4],
    },
    "cohere-qk": {"model_type": "cohere", "use_qk_norm": True, "num_key_value_heads": 8},
    "cohere2-pattern": {"model_type": "cohere2", "sliding_window_pattern": 2},
    "exaone-no-window": {"model_type": "exaone4", "layer_types": ["full_attention"] * LAYERS},
    "seed-biased": {"model_type": "seed_oss", "attention_out_bias": True, "mlp_bias": True},
    "ernie-biased": {"model_type": "ernie4_5", "use_bias": True},
    "ernie-moe-end": {"model_type": "ernie4_5_moe", "moe_layer_end_index": 3},
    "qwen3-next-heads": {"model_type": "qwen3_next", "linear_num_value_heads": 48},
    "granite-biased": {"model_type": "granite", "mlp_bias": True, "attention_bias": True},
    "deepseek-biased": {"model_type": "deepseek_v3", "attention_bias": True},
    # As in the files of Qwen2-VL-2B, without a text part.
    "qwen2-vl-2b": {
        "model_type": "qwen2_vl",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
    },
    "qwen2.5-vl-7b": {
        "model_type": "qwen2_5_vl",
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "nemotron-tied": {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M-M*-M",
        "tie_word_embeddings": True,
    },
    # As transformers saves a Qwen3-MoE.
    "qwen3-moe-saved": {"model_type": "qwen3_moe", "num_local_experts": 64},
    "no-shared-expert": {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 0},
    "no-experts": {"model_type": "qwen3_next", "num_experts": 0},
    "glm-5.2": {"model_type": "glm_moe_dsa", "index_topk_freq": 4, "index_skip_topk_offset": 3},
    "deepseek-v4-pro": {
        "model_type": "deepseek_v4",
        "compress_ratios": [128, 128, 4, 128, 4, 0],
        "num_hash_layers": 1,
        "compress_rate_hca": 64,
        "num_attention_heads": 128,
        "o_groups": 16,
        "q_lora_rank": 1536,
    },
    "gemma-4-e2b": {
        "model_type": "gemma4_text",
        "num_kv_shared_layers": 2,
        "layer_types": ALTERNATING,
        "use_double_wide_mlp": True,
        "num_key_value_heads": 1,
        "hidden_size_per_layer_input": 256,
    },
    "gemma-4-moe": {
        "model_type": "gemma4_text",
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 2,
        "enable_moe_block": True,
        "num_experts": 16,
        "top_k_experts": 4,
        "moe_intermediate_size": 704,
        "hidden_size_per_layer_input": 0,
    },
    "gemma-3n-widths": {
        "model_type": "gemma3n_text",
        "intermediate_size": [8192, 8192, 16384, 16384, 16384, 16384],
        **REQUIRED["gemma3n_text"],
    },
    "kimi-linear": {
        "model_type": "kimi_linear",
        "q_lora_rank": 768,
        "first_k_dense_replace": 2,
        "num_shared_experts": 2,
        "num_experts": 32,
        "linear_attn_config": {
            "full_attn_layers": [4],
            "kda_layers": [1, 2, 3, 5, 6],
            "head_dim": 64,
            "num_heads": 24,
            "short_conv_kernel_size": 4,
        },
    },
    "step-3.5": {
        "model_type": "step3p7",
        "text_config": {
            "model_type": "step3p5",
            "num_hidden_layers": LAYERS,
            "layer_types": ALTERNATING,
            "sliding_window": 512,
            "moe_layers_enum": "4,5",
            "num_attention_groups": 4,
            "moe_num_experts": 32,
            "moe_top_k": 4,
            "share_expert_dims": 640,
            "attention_other_setting": {"num_attention_heads": 96},
        },
        "tie_word_embeddings": False,
    },
    "llama-3.2-vision": {
        "model_type": "mllama",
        "text_config": {
            "model_type": "mllama_text_model",
            "num_hidden_layers": LAYERS,
            "cross_attention_layers": [1, 3],
        },
        "tie_word_embeddings": False,
    },
    "laguna-xs": {
        "model_type": "laguna",
        "layer_types": [*["full_attention", *["sliding_attention"] * 3], *ALTERNATING[:2]],
        "num_attention_heads_per_layer": [48, 64, 64, 64, 48, 64],
    },
    "lfm2-convolution": {
        "model_type": "lfm2",
        "full_attn_idxs": [2, 5],
        "conv_bias": True,
        "block_ff_dim": 10240,
        "block_ffn_dim_multiplier": 1.3,
    },
    "lfm2-8b-a1b": {
        "model_type": "lfm2_moe",
        "num_dense_layers": 2,
        "use_expert_bias": False,
        **REQUIRED["lfm2_moe"],
    },
    "falcon-h1-norm": {
        "model_type": "falcon_h1",
        "mamba_d_ssm": 3072,
        "mamba_n_heads": 24,
        "mamba_d_head": 128,
        "mamba_rms_norm": True,
    },
    "bamba-attention": {"model_type": "bamba", "attn_layer_indices": [1, 4]},
    "jamba-periods": {
        "model_type": "jamba",
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "expert_layer_period": 3,
        "expert_layer_offset": 2,
        "mamba_dt_rank": "auto",
    },
    "afmoe-trinity": {
        "model_type": "afmoe",
        "num_dense_layers": 2,
        "global_attn_every_n_layers": 3,
        "num_shared_experts": 1,
    },
    "cohere2-dense-first": {
        "model_type": "cohere2_moe",
        "first_k_dense_replace": 2,
        "prefix_dense_sliding_window_pattern": 2,
        "num_shared_experts": 1,
    },
    "hy-v4": {"model_type": "hy_v4", "hc_mult": 2},
    "phi-3.5-moe": {"model_type": "phimoe", "attention_bias": True, "lm_head_bias": True},
    "qwen3-omni": {
        "model_type": "qwen3_omni_moe_thinker",
        "text_config": {
            "model_type": "qwen3_omni_moe_text",
            "num_hidden_layers": LAYERS,
            "head_dim": 128,
            "vocab_size": 152_064,
        },
        "tie_word_embeddings": False,
    },
    "qwen2.5-omni": {
        "model_type": "qwen2_5_omni_thinker",
        "text_config": {"model_type": "qwen2_5_omni_text", "num_hidden_layers": LAYERS},
        "tie_word_embeddings": False,
    },
    "granite-shared": {"model_type": "granitemoeshared", "shared_intermediate_size": 1024},
    "gemma3-pattern": {"model_type": "gemma3_text", "sliding_window_pattern": 3},
}

HEADS = (
    "LlamaForCausalLM",
    "LlamaForSequenceClassification",
    "LlamaModel",
    "Qwen3ForSequenceClassification",
    "MistralModel",
)
_TYPE_OF = {"Llama": "llama", "Qwen3": "qwen3", "Mistral": "mistral"}

WRAPPERS = (
    *("gemma3", "idefics3", "internvl", "llama4", "llava", "llava_onevision", "mistral3"),
    *("paligemma", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl"),
    *("qwen3_vl_moe", "smolvlm"),
)


def shortened(config: Config) -> Config:
    """The configuration with few layers, and without what transformers would look for."""
    kinds = config.get("layer_types")
    short = {**config, "num_hidden_layers": LAYERS}
    short.pop("quantization_config", None)
    return short if kinds is None else {**short, "layer_types": kinds[:LAYERS]}


def configurations() -> dict[str, Config]:
    """All configurations. Each key names the model or the variant."""
    listed = (_of_types(), _of_families(), _of_published(), _of_heads(), _of_wrappers())
    return dict([pair for pairs in (*listed, _of_files()) for pair in pairs])


def _of_types() -> Iterator[tuple[str, Config]]:
    for name in sorted((ARCHITECTURES.keys() & model_classes().classes.keys()) - WRAPPED):
        config = {"model_type": name, "num_hidden_layers": LAYERS, **REQUIRED.get(name, {})}
        yield name, config
        yield f"{name} with keys of others", {**FOREIGN, **config}


def _of_families() -> Iterator[tuple[str, Config]]:
    for name, config in FAMILIES.items():
        yield name, config if "text_config" in config else {**config, "num_hidden_layers": LAYERS}


def _of_published() -> Iterator[tuple[str, Config]]:
    for name, model in PUBLISHED.items():
        config = model["config"]
        # transformers has no class of some names.
        if "text_config" in config or config["model_type"] not in model_classes().classes:
            continue
        short = shortened(config)
        yield f"{name} short", short
        for key in LEFT_OUT:
            if key in short and key not in REQUIRED.get(config["model_type"], {}):
                left = {each: value for each, value in short.items() if each != key}
                yield f"{name} without {key}", left


def _of_heads() -> Iterator[tuple[str, Config]]:
    for architecture in HEADS:
        family = next(name for name in _TYPE_OF if architecture.startswith(name))
        config = {"model_type": _TYPE_OF[family], "architectures": [architecture]}
        yield architecture, {**config, "num_hidden_layers": LAYERS}
    classifier = {
        "model_type": "llama",
        "architectures": ["LlamaForSequenceClassification"],
        "num_hidden_layers": LAYERS,
    }
    yield "seven labels", {**classifier, "id2label": {str(n): str(n) for n in range(7)}}
    yield "one label by number", {**classifier, "num_labels": 1}


def _of_wrappers() -> Iterator[tuple[str, Config]]:
    for name in WRAPPERS:
        text = {
            "model_type": model_classes().wrappers[name].text,
            "num_hidden_layers": LAYERS,
            "vocab_size": 50_000,
        }
        yield f"{name} by default", {"model_type": name, "text_config": text}
        # Llama 4 builds its text part as a model of its own; vLLM goes by the wrapper there too.
        for inner, outer in () if name == "llama4" else ((True, False), (False, True)):
            yield (
                f"{name} tied {outer}, its text part {inner}",
                {
                    "model_type": name,
                    "text_config": {**text, "tie_word_embeddings": inner},
                    "tie_word_embeddings": outer,
                },
            )


# Files of models whose class transformers has, in full.
FILES = (
    *("XiaomiMiMo--MiMo-V2-Flash", "deepseek-ai--DeepSeek-V4-Flash"),
    *("deepseek-ai--DeepSeek-V4-Pro", "google--gemma-4-26B-A4B", "llama-3.2-11b-vision"),
    *("zai-org--GLM-5", "zai-org--GLM-5.2-FP8", "nvidia--Qwen3.6-27B-NVFP4"),
)


def _of_files() -> Iterator[tuple[str, Config]]:
    for name in FILES:
        config = json.loads((FOREIGN_CONFIGS / f"{name}.json").read_text())
        yield name, {key: config[key] for key in config if key != "quantization_config"}
    m3 = json.loads((FOREIGN_CONFIGS / "MiniMaxAI--MiniMax-M3.json").read_text())
    text = "minimax_m3_vl_text"
    yield "MiniMax-M3", {**m3, "model_type": text, "architectures": ["MiniMaxM3VLTextModel"]}


CONFIGURATIONS = configurations()
