"""Describes model classes of transformers: defaults of configurations, modules, and their FLOPs.

The engine's Python runs this script. Models are built on the meta device, without values. The input
is a JSON object with `configs`, `types`, `keys`, `latent` and `chunks`; prints one JSON object.
"""

import dataclasses
import importlib
import inspect
import json
import logging
import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch  # type: ignore[import-not-found]
from huggingface_hub.errors import (  # type: ignore[import-not-found]
    StrictDataclassFieldValidationError,
)
from torch.utils.flop_counter import FlopCounterMode  # type: ignore[import-not-found]
from transformers import AutoConfig  # type: ignore[import-not-found]
from transformers.models.auto import (  # type: ignore[import-not-found]
    configuration_auto,
    modeling_auto,
)
from transformers.models.deepseek_v3 import (  # type: ignore[import-not-found]
    modeling_deepseek_v3,
)
from transformers.models.nemotron_h import (  # type: ignore[import-not-found]
    modeling_nemotron_h,
)
from transformers.models.qwen3_next import (  # type: ignore[import-not-found]
    modeling_qwen3_next,
)

# Keys that the code of a class reads without a field for them.
READ = (
    re.compile(r'getattr\((?:self\.)?config, "(\w+)"'),
    re.compile(r'kwargs\.(?:pop|get)\("(\w+)"'),
    re.compile(r'"(\w+)" in kwargs'),
)
HEADS = (
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    modeling_auto.MODEL_MAPPING,
)


def main() -> None:
    """Answers the input."""
    logging.disable(logging.WARNING)
    asked = json.load(sys.stdin)
    defaults = {
        "classes": dict(classes(asked["types"], set(asked["keys"]))),
        "wrappers": dict(wrappers(set(asked["types"]))),
    }
    models = {name: described(config) for name, config in asked["configs"].items()}
    found = {
        "defaults": defaults,
        "models": models,
        "latent": latent(asked["latent"]),
        "recurrent": recurrent(asked["chunks"]),
    }
    sys.stdout.write(json.dumps(found))


# Configurations


def classes(types: list[str], keys: set[str]) -> Iterator[tuple[str, Any]]:
    """(type, facts) of each type: its keys with their defaults, without one, and refusing null."""
    for name in types:
        if name not in configuration_auto.CONFIG_MAPPING:
            continue
        cls = configuration_auto.CONFIG_MAPPING[name]
        fields = {field.name: plain(field.default) for field in dataclasses.fields(cls)}
        names = {*cls.attribute_map, *cls.attribute_map.values()}
        others = {*names, *read_keys(cls)} - fields.keys()
        yield (
            name,
            {
                "defaults": {key: fields[key] for key in sorted(fields.keys() & keys)},
                "others": sorted(others & keys),
                "not_null": sorted(key for key in fields.keys() & keys if refuses_null(cls, key)),
            },
        )


def refuses_null(cls: Any, key: str) -> bool:
    try:
        cls(**{key: None})
    except StrictDataclassFieldValidationError as error:
        return f"'{key}'" in str(error)
    except Exception:
        # The class accepts null here, and its other checks raise any exception.
        return False
    return False


def plain(default: Any) -> Any:
    return default if isinstance(default, (bool, int, float, str)) else None


def read_keys(cls: type) -> set[str]:
    module = cls.__module__
    names = (module, module.replace("configuration_", "modeling_"))
    text = "".join(inspect.getsource(importlib.import_module(name)) for name in names)
    return {key for pattern in READ for key in pattern.findall(text)}


def wrappers(types: set[str]) -> Iterator[tuple[str, Any]]:
    """For each multimodal type of which the text part is known, when its embeddings are tied."""
    for name in configuration_auto.CONFIG_MAPPING:
        try:
            cls = configuration_auto.CONFIG_MAPPING[name]
            if "text_config" not in cls.sub_configs:
                continue
            text = cls().text_config.model_type
        except Exception:
            # Classes that need arguments raise anything; none of them wraps a type of ours.
            continue
        if text in types:
            yield name, {"text": text, **ties(cls, text)}


def ties(cls: Any, text: str) -> dict[str, bool]:
    """Whether a wrapper ties: by default, by default over a tied text part, and against its own."""

    def tied(inner: bool, **outer: bool) -> bool:
        config = cls(text_config={"model_type": text, "tie_word_embeddings": inner}, **outer)
        return bool(getattr(config, "tie_word_embeddings", False))

    return {
        "tied": tied(False),
        "tied_over_tied": tied(True),
        "untied_over_tied": tied(True, tie_word_embeddings=False),
    }


# Modules


def described(keys: dict[str, Any]) -> dict[str, Any]:
    """What the modules of a configuration hold and what is saved of it, or why it is refused."""
    try:
        config = AutoConfig.for_model(**keys)
        with torch.device("meta"):
            return {**figures(built(config)), "saved": json.loads(config.to_json_string())}
    except Exception as error:
        # The refusal of a class, whatever it raises, is what a test compares.
        return {"refused": f"{type(error).__name__}: {error}"}


def figures(model: Any) -> dict[str, Any]:
    """Parameters, cached values and states, counted over the modules."""
    text = language_model(model)
    weights = {id(weight): weight for weight in (*text.parameters(), *routers(text))}
    heads = [head for name in ("lm_head", "score") if (head := getattr(model, name, None))]
    heads += (
        [head] if (head := getattr(getattr(model, "language_model", None), "lm_head", None)) else []
    )
    weights |= {id(weight): weight for head in heads for weight in head.parameters()}
    head = sum(weight.numel() for each in heads for weight in each.parameters() if weight.ndim > 1)
    return {
        "parameters": sum(weight.numel() for weight in weights.values()),
        "head": head,
        "linear": sum(multiplied(text, model.config.get_text_config())),
        "cached_values": sum(layer["values"] for layer in attentions(text)),
        "attention_layers": len(list(attentions(text))),
        "layers": sum(not hasattr(layer, "cross_attn") for layer in text.layers),
        "layer_types": getattr(model.config.get_text_config(), "layer_types", None),
        "sliding_window": getattr(model.config.get_text_config(), "sliding_window", None),
        "states": list(states(text)),
    }


def built(config: Any) -> Any:
    """The model by its first architecture, or the one that generates."""
    wanted = (config.architectures or [None])[0]
    for mapping in HEADS:
        if type(config) in mapping:
            cls = mapping[type(config)]
            for each in cls if isinstance(cls, tuple) else (cls,):
                if wanted in (None, each.__name__):
                    return each(config)
    raise ValueError(f"no class {wanted} for {type(config).__name__}")


def language_model(model: Any) -> Any:
    inner = getattr(model, "model", model)
    for name in ("language_model", "text_model"):
        inner = getattr(inner, name, inner)
    return inner.model if hasattr(inner, "lm_head") else inner


def routers(text: Any) -> Iterator[Any]:
    """Biases of routers, which some classes declare as buffers. They are in the files too."""
    for name, buffer in text.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            yield buffer


def multiplied(text: Any, config: Any) -> Iterator[float]:
    """The matrix parameters of the layers that a token is multiplied with."""
    for name, weight in text.named_parameters():
        # Biases of experts have two dimensions, kernels of convolutions three, one of which is 1.
        kernel = (
            "conv1d" in name
            or ".conv.conv" in name
            or name.endswith(("_bias", "e_score_correction_bias"))
        )
        looked_up = name.startswith("embed") or name.endswith("position_bias")
        unused = kernel or looked_up or "norm" in name or name.endswith("A_log")
        if weight.ndim < 2 or unused or is_crossing(text, name):
            continue
        yield weight.numel() * (used_share(text, name, config) if "experts." in name else 1)


def is_crossing(text: Any, name: str) -> bool:
    """Whether the weight is of a layer that requests without images skip."""
    number = re.match(r"layers\.(\d+)\.", name)
    return number is not None and hasattr(text.layers[int(number[1])], "cross_attn")


def used_share(text: Any, name: str, config: Any) -> float:
    weight = text.get_parameter(name)
    if weight.ndim < 3:
        return 1.0
    for key in ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"):
        if (used := getattr(config, key, None)) is not None:
            return float((used[0] if isinstance(used, list) else used) / weight.shape[0])
    raise ValueError(f"how many experts does {name} use?")


def attentions(text: Any) -> Iterator[dict[str, Any]]:
    """Values of keys and values that each attention makes of a token."""
    for module in text.modules():
        if hasattr(module, "forget_gate"):
            continue
        if type(module).__name__.endswith("CrossAttention"):
            continue
        if hasattr(module, "k_proj") and getattr(module, "v_proj", None) is None:
            # An index has no values; keys that are the values too are cached as both.
            copies = 2 if hasattr(module, "use_alternative_attention") else 1
            yield {"values": copies * module.k_proj.out_features}
        elif hasattr(module, "k_proj") and hasattr(module, "v_proj"):
            yield {"values": module.k_proj.out_features + module.v_proj.out_features}
        elif hasattr(module, "qkv_proj") and (
            heads := getattr(getattr(module, "config", None), "num_key_value_heads", None)
        ):
            yield {"values": 2 * heads * module.head_dim}


def states(text: Any) -> Iterator[dict[str, int]]:
    """Values of each recurrent layer's state, by vLLM's own shapes."""
    from vllm.model_executor.layers.mamba.mamba_utils import (  # type: ignore[import-not-found]
        MambaStateShapeCalculator,
    )

    for module in text.modules():
        found = with_heads(module, MambaStateShapeCalculator)
        found = found or without_heads(module, MambaStateShapeCalculator)
        if found is not None:
            conv, state = found
            yield {"conv": torch.Size(conv).numel(), "state": torch.Size(state).numel()}


NOTHING = (0,)


def with_heads(module: Any, shapes: Any) -> Any:
    """(convolution, state) of delta nets and of lightning attention; None of other modules."""
    if hasattr(module, "forget_gate"):
        return shapes.kda_state_shape(1, module.num_heads, module.head_dim)
    if hasattr(module, "num_v_heads") and hasattr(module, "conv1d"):
        return shapes.gated_delta_net_state_shape(
            1,
            module.num_k_heads,
            module.num_v_heads,
            module.head_k_dim,
            module.head_v_dim,
            module.conv_kernel_size,
        )
    if hasattr(module, "output_gate") and hasattr(module, "num_attention_heads"):
        heads, size = module.num_attention_heads, module.head_dim
        return NOTHING, *shapes.linear_attention_state_shape(heads, 1, size)
    return None


def without_heads(module: Any, shapes: Any) -> Any:
    """The same of Mamba and of gated convolutions."""
    if hasattr(module, "time_step_rank") and hasattr(module, "conv1d"):
        return shapes.mamba1_state_shape(
            1, module.intermediate_size, module.ssm_state_size, module.conv_kernel_size
        )
    if isinstance(conv := getattr(module, "conv", None), torch.nn.Conv1d):
        return *shapes.short_conv_state_shape(1, conv.in_channels, conv.kernel_size[0]), NOTHING
    if hasattr(module, "ssm_state_size") and hasattr(module, "conv1d"):
        return shapes.mamba2_state_shape(
            1,
            module.intermediate_size,
            module.n_groups,
            module.num_heads,
            module.head_dim,
            module.ssm_state_size,
            module.conv_kernel_size,
        )
    return None


# FLOPs of latent attention (MLA), with torch's counter and by vLLM's own formula


def latent(asked: dict[str, Any]) -> dict[str, Any]:
    """By [new, cached] of prefills, by contexts, and by the size of a selection."""
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
    return found


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


# FLOPs of recurrent layers' states, on transformers' own code
#
# Engines compute a prompt chunk by chunk with the same algorithms.


def recurrent(chunks: list[int]) -> dict[str, list[int]]:
    """The FLOPs of one layer over one chunk of each length."""
    with torch.device("meta"):
        return {
            "qwen3_next": [counted(delta_net, "qwen3_next", tokens) for tokens in chunks],
            "nemotron_h": [counted(mamba, "nemotron_h", tokens) for tokens in chunks],
        }


def counted(layer: Any, model_type: str, tokens: int) -> int:
    """The FLOPs of matrix products; torch's counter knows no others."""
    config = AutoConfig.for_model(model_type)
    with FlopCounterMode(display=False) as counter:
        layer(config, tokens)
    return int(counter.get_total_flops())


def delta_net(config: Any, tokens: int) -> None:
    """The gated delta rule over one chunk, after a state."""
    heads, rows = config.linear_num_value_heads, config.linear_value_head_dim
    columns = config.linear_key_head_dim
    modeling_qwen3_next.torch_chunk_gated_delta_rule(
        query=torch.empty(1, tokens, heads, columns),
        key=torch.empty(1, tokens, heads, columns),
        value=torch.empty(1, tokens, heads, rows),
        g=torch.empty(1, tokens, heads),
        beta=torch.empty(1, tokens, heads),
        chunk_size=tokens,
        initial_state=torch.empty(1, heads, columns, rows),
        output_final_state=True,
    )


def mamba(config: Any, tokens: int) -> None:
    """The scan of Mamba 2 over one chunk, after a state."""
    heads, rows = config.mamba_num_heads, config.mamba_head_dim
    columns = config.ssm_state_size
    modeling_nemotron_h.mamba2_chunk_scan(
        torch.empty(1, tokens, heads, rows),
        torch.empty(1, tokens, heads),
        torch.empty(heads),
        torch.empty(1, tokens, config.n_groups, columns),
        torch.empty(1, tokens, config.n_groups, columns),
        chunk_size=tokens,
        initial_states=torch.empty(1, heads, rows, columns),
        return_final_states=True,
    )


if __name__ == "__main__":
    main()
