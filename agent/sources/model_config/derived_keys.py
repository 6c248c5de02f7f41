"""Keys that a model's class derives from others, such as lists of layers from patterns.

Each function returns keys by our names, from the file's keys over the class's defaults.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from agent.sources.model_config.config import ModelConfigInvalid

Keys = Mapping[str, Any]

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def derived_keys(architecture: str, keys: Keys) -> dict[str, Any]:
    """The derived keys of an architecture. Raises ModelConfigInvalid if they cannot be read."""
    derive = _DERIVE.get(architecture)
    if derive is None:
        return {}
    try:
        return derive(keys)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelConfigInvalid(
            f"the lists of layers of the architecture {architecture!r} cannot be read ({error!r})"
        ) from error


# No model has more, and a wrong number must not fill the memory.
_MOST_LAYERS = 10_000


def _layers(keys: Keys) -> range:
    count = keys["num_hidden_layers"]
    if not 0 < count <= _MOST_LAYERS:
        raise ValueError(f"num_hidden_layers is {count}")
    return range(count)


def _renamed(given: Keys, names: Mapping[str, str]) -> dict[str, Any]:
    """The keys that a file gives under other names, by our names."""
    return {ours: given[theirs] for theirs, ours in names.items() if given.get(theirs) is not None}


def _experts_after(keys: Keys, first: int) -> list[str]:
    return ["dense" if number < first else "sparse" for number in _layers(keys)]


def _by_frequency(keys: Keys, name: str = "moe_layer_freq") -> dict[str, Any]:
    """The kinds of feed-forward parts from a list of ones and zeros."""
    listed = keys.get(name)
    if keys.get("mlp_layer_types") is not None or not isinstance(listed, list):
        return {}
    return {"mlp_layer_types": ["sparse" if each else "dense" for each in listed]}


def _per_layer(keys: Keys, of_layer: Mapping[int, Keys]) -> dict[str, Any]:
    """What single layers have; what a file of transformers' own says wins."""
    given = {int(number): own for number, own in (keys.get("per_layer_config") or {}).items()}
    numbers = of_layer.keys() | given.keys()
    return {
        "per_layer_config": {
            number: {**of_layer.get(number, {}), **given.get(number, {})} for number in numbers
        }
    }


def _glm_dsa(keys: Keys) -> dict[str, Any]:
    if keys.get("indexer_types") is not None:
        return {}
    pattern = keys.get("index_topk_pattern")
    if pattern is not None:
        return {"indexer_types": [{"F": "full", "S": "shared"}.get(each, each) for each in pattern]}
    every = max(keys.get("index_topk_freq") or 1, 1)
    offset = keys.get("index_skip_topk_offset", 2)
    skips = [max(number - offset + 1, 0) % every for number in _layers(keys)]
    return {"indexer_types": ["shared" if skip else "full" for skip in skips]}


_COMPRESSED = {
    0: SLIDING,
    1: SLIDING,
    4: "compressed_sparse_attention",
    128: "heavily_compressed_attention",
}


def _deepseek_v4(keys: Keys) -> dict[str, Any]:
    rates = keys.get("compress_rates") or {}
    hashed = keys.get("num_hash_layers", 3)
    found: dict[str, Any] = {
        "compressed_sparse_rate": keys.get("compress_rate_csa")
        or rates.get("compressed_sparse_attention", 4),
        "heavily_compressed_rate": keys.get("compress_rate_hca")
        or rates.get("heavily_compressed_attention", 128),
    }
    if keys.get("mlp_layer_types") is None:
        found["mlp_layer_types"] = ["hash_moe" if n < hashed else "moe" for n in _layers(keys)]
    if keys.get("layer_types") is None:
        given = keys.get("compress_ratios") or [
            128 if number < 2 or number % 2 == 0 else 4 for number in _layers(keys)
        ]
        found["layer_types"] = [_COMPRESSED[rate] for rate in given]
    return found


def _kimi_linear(keys: Keys) -> dict[str, Any]:
    given = keys.get("linear_attn_config") or {}
    names = {
        "head_dim": "linear_head_dim",
        "num_heads": "linear_num_heads",
        "short_conv_kernel_size": "conv_kernel",
        "use_full_rank_gate": "use_full_rank_gate",
    }
    found = _renamed(given, names)
    if keys.get("mlp_layer_types") is None:
        found["mlp_layer_types"] = _experts_after(keys, keys.get("first_k_dense_replace", 1))
    if keys.get("layer_types") is None:
        found["layer_types"] = _kimi_layers(keys, given)
    return found


def _kimi_layers(keys: Keys, given: Keys) -> list[str]:
    if "full_attn_layers" not in given:
        return [FULL if n and n % 4 == 0 else LINEAR for n in _layers(keys)]
    # They are numbered from 1.
    full, linear = set(given["full_attn_layers"]), set(given["kda_layers"])
    if full & linear or full | linear != {number + 1 for number in _layers(keys)}:
        raise ValueError("full_attn_layers and kda_layers are not all layers")
    return [FULL if number + 1 in full else LINEAR for number in _layers(keys)]


def _minimax_m3(keys: Keys) -> dict[str, Any]:
    sparse = keys.get("sparse_attention_config") or {}
    names = {
        "sparse_num_index_heads": "index_n_heads",
        "sparse_index_dim": "index_head_dim",
        "sparse_block_size": "index_block_size",
        "sparse_topk_blocks": "index_topk_blocks",
    }
    found = _renamed(sparse, names)
    if keys.get("layer_types") is None:
        listed = sparse.get("sparse_attention_freq") or [0 for _ in _layers(keys)]
        found["layer_types"] = ["minimax_m3_sparse" if each else FULL for each in listed]
    kinds = _by_frequency(keys) or {"mlp_layer_types": _experts_after(keys, 0)}
    return {**found, **(kinds if keys.get("mlp_layer_types") is None else {})}


def _mimo_v2(keys: Keys) -> dict[str, Any]:
    found = _by_frequency(keys)
    if not found and keys.get("mlp_layer_types") is None:
        found["mlp_layer_types"] = _experts_after(keys, 1)
    layers = keys.get("layer_types")
    if layers is None and keys.get("hybrid_layer_pattern") is not None:
        layers = [SLIDING if each else FULL for each in keys["hybrid_layer_pattern"]]
    if layers is None:
        layers = [FULL if n == 0 or (n + 1) % 6 == 0 else SLIDING for n in _layers(keys)]
    own = {
        "num_attention_heads": keys.get("swa_num_attention_heads"),
        "num_key_value_heads": keys.get("swa_num_key_value_heads")
        or 2 * keys["num_key_value_heads"],
        "head_dim": keys.get("swa_head_dim"),
        "v_head_dim": keys.get("swa_v_head_dim"),
    }
    return {**found, "layer_types": layers, **_per_layer(keys, _of_kind(layers, SLIDING, own))}


def _of_kind(layers: Iterable[str], kind: str, own: Keys) -> dict[int, Keys]:
    """The same for all layers of a kind."""
    own = {key: value for key, value in own.items() if value is not None}
    return {number: own for number, each in enumerate(layers) if each == kind}


def _step3p5(keys: Keys) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if keys.get("mlp_layer_types") is None:
        given = keys.get("moe_layers_enum")
        listed = given.split(",") if isinstance(given, str) else given
        sparse = None if listed is None else {int(each) for each in listed}
        found["mlp_layer_types"] = [
            "sparse" if (n >= 3 if sparse is None else n in sparse) else "dense"
            for n in _layers(keys)
        ]
    layers = keys.get("layer_types") or [FULL for _ in _layers(keys)]
    other = keys.get("attention_other_setting") or {}
    heads = keys.get("num_sliding_attention_heads") or other.get("num_attention_heads")
    own = {"num_attention_heads": heads}
    return {**found, "layer_types": layers, **_per_layer(keys, _of_kind(layers, SLIDING, own))}


def _gemma4(keys: Keys) -> dict[str, Any]:
    layers = keys.get("layer_types") or _every(keys, 6)
    # Its class forces the last one.
    layers = [*layers[:-1], FULL]
    own = {"head_dim": keys.get("global_head_dim", 512)}
    if keys.get("attention_k_eq_v"):
        own["num_key_value_heads"] = keys.get("num_global_key_value_heads")
    of_layer = _of_kind(layers, FULL, own)
    first = len(layers) - (keys.get("num_kv_shared_layers") or 0)
    if keys.get("use_double_wide_mlp") and first > 0:
        wide = {"intermediate_size": 2 * keys["intermediate_size"]}
        of_layer |= {n: {**of_layer.get(n, {}), **wide} for n in range(first, len(layers))}
    return {"layer_types": layers, **_per_layer(keys, of_layer)}


def _every(keys: Keys, interval: int) -> list[str]:
    return [FULL if (number + 1) % interval == 0 else SLIDING for number in _layers(keys)]


def _gemma3n(keys: Keys) -> dict[str, Any]:
    found = {"layer_types": keys.get("layer_types") or _every(keys, 5)}
    widths = keys.get("intermediate_size")
    if not isinstance(widths, Sequence):
        return found
    if len(widths) != len(_layers(keys)):
        raise ValueError(f"intermediate_size has {len(widths)} entries")
    own = {number: {"intermediate_size": width} for number, width in enumerate(widths)}
    return {**found, "intermediate_size": max(widths), **_per_layer(keys, own)}


def _mllama(keys: Keys) -> dict[str, Any]:
    crossing = keys.get("cross_attention_layers") or [3, 8, 13, 18, 23, 28, 33, 38]
    return {
        "layer_types": ["cross_attention" if n in crossing else FULL for n in _layers(keys)],
        # Its embedding has 8 rows more than its output matrix.
        "extra_embeddings": 8,
    }


def _nemotron_nas(keys: Keys) -> dict[str, Any]:
    blocks = keys["block_configs"]
    if len(blocks) < len(_layers(keys)):
        raise ValueError(f"block_configs has {len(blocks)} entries")
    own = {number: dict(_of_block(keys, blocks[number])) for number in _layers(keys)}
    return {
        "per_layer_config": own,
        "intermediate_size": max(each["intermediate_size"] for each in own.values()),
    }


def _of_block(keys: Keys, block: Keys) -> Iterable[tuple[str, Any]]:
    attention, forward = block["attention"], block["ffn"]
    for part in (attention, forward):
        if part.get("replace_with_linear") or part.get("sparsify"):
            raise ValueError("parts that are replaced or sparse")
    if attention.get("window_length") or attention.get("num_sink_tokens"):
        raise ValueError("attention with a window or with sink tokens")
    yield "attends", not attention.get("no_op")
    if not attention.get("no_op"):
        yield "num_key_value_heads", keys["num_attention_heads"] // attention["n_heads_in_group"]
    if forward.get("no_op"):
        yield "intermediate_size", 0
    elif forward.get("ffn_mult") is None:
        yield "intermediate_size", forward["intermediate_size"]
    else:
        width = int(2 * forward["ffn_mult"] * keys["hidden_size"] / 3)
        # A whole multiple of 256.
        yield "intermediate_size", -(-width // 256) * 256


def _laguna(keys: Keys) -> dict[str, Any]:
    if keys.get("gating") not in (True, None, "per-head"):
        raise ValueError(f"gating is {keys['gating']!r}")
    listed = keys.get("num_attention_heads_per_layer") or []
    own = {number: {"num_attention_heads": heads} for number, heads in enumerate(listed)}
    return _per_layer(keys, own)


def _lfm2(keys: Keys) -> dict[str, Any]:
    found = _tied_as_before(keys)
    if keys.get("layer_types") is None:
        full = keys.get("full_attn_idxs")
        numbers = _layers(keys) if full is None else full
        found["layer_types"] = [FULL if n in numbers else "conv" for n in _layers(keys)]
    width = keys.get("block_ff_dim") or keys["intermediate_size"]
    if keys.get("block_auto_adjust_ff_dim", True):
        factor = keys.get("block_ffn_dim_multiplier")
        width = int(2 * width / 3)
        multiple = keys.get("block_multiple_of", 256)
        if factor is not None:
            width = multiple * -(-int(factor * width) // multiple)
    return {**found, "intermediate_size": width}


def _tied_as_before(keys: Keys) -> dict[str, Any]:
    tied = keys.get("tie_embedding")
    return {} if tied is None else {"tie_word_embeddings": tied}


def _granite_swa(keys: Keys) -> dict[str, Any]:
    listed = keys.get("layer_types") or [FULL if n % 4 == 0 else SLIDING for n in _layers(keys)]
    return {"layer_types": listed}


def _hy_v4(keys: Keys) -> dict[str, Any]:
    if keys.get("indexer_types") is not None:
        return {}
    full = [number == 0 or (number - 1) % 4 == 0 for number in _layers(keys)]
    return {"indexer_types": ["full" if each else "shared" for each in full]}


def _hy_v3(keys: Keys) -> dict[str, Any]:
    """As in files for vLLM, whose class names these differently."""
    names = {
        "expert_hidden_dim": "moe_intermediate_size",
        "first_k_dense_replace": "first_k_dense_replace",
    }
    return _renamed(keys, names)


def _minicpm3(keys: Keys) -> dict[str, Any]:
    return {
        "v_head_dim": keys.get("v_head_dim") or keys["hidden_size"] // keys["num_attention_heads"]
    }


def _cohere2_moe(keys: Keys) -> dict[str, Any]:
    dense = keys.get("first_k_dense_replace") or 0
    found: dict[str, Any] = {}
    if keys.get("mlp_layer_types") is None:
        found["mlp_layer_types"] = _experts_after(keys, dense)
    if keys.get("layer_types") is None:
        first = keys.get("prefix_dense_sliding_window_pattern", 1)
        others = keys.get("sliding_window_pattern") or 4
        full = [
            (n + 1) % first == 0 if n < dense else (n - dense + 1) % others == 0
            for n in _layers(keys)
        ]
        found["layer_types"] = [FULL if each else SLIDING for each in full]
    return found


def _bailing(keys: Keys) -> dict[str, Any]:
    shared = keys.get("num_shared_experts") or 0
    width = keys.get("moe_shared_expert_intermediate_size") or keys["moe_intermediate_size"]
    return {
        "shared_width": shared * width,
        "use_qk_norm": bool(keys.get("use_qk_norm")),
        "use_expert_bias": bool(keys.get("moe_router_enable_expert_bias")),
    }


def _bamba(keys: Keys) -> dict[str, Any]:
    if keys.get("layer_types") is not None:
        return {}
    full = keys.get("attn_layer_indices") or ()
    return {"layer_types": [FULL if number in full else LINEAR for number in _layers(keys)]}


def _jamba(keys: Keys) -> dict[str, Any]:
    """Layers by periods with an offset."""

    def of(part: str, number: int, period: int, offset: int) -> bool:
        every = keys.get(f"{part}_layer_period") or period
        first = keys.get(f"{part}_layer_offset")
        return bool(number % every == (offset if first is None else first))

    return {
        "layer_types": [FULL if of("attn", n, 8, 4) else LINEAR for n in _layers(keys)],
        "mlp_layer_types": [
            "sparse" if keys.get("num_experts", 16) > 1 and of("expert", n, 2, 1) else "dense"
            for n in _layers(keys)
        ],
    }


def _minimax(keys: Keys) -> dict[str, Any]:
    listed = keys.get("attn_type_list")
    if keys.get("layer_types") is not None:
        return {}
    if listed is None:
        # Its class begins with a full one.
        return {"layer_types": [LINEAR if n % 2 else FULL for n in _layers(keys)]}
    return {"layer_types": [FULL if each else LINEAR for each in listed]}


_DERIVE: Mapping[str, Callable[[Keys], dict[str, Any]]] = {
    "glm_moe_dsa": _glm_dsa,
    "deepseek_v4": _deepseek_v4,
    "kimi_linear": _kimi_linear,
    "minimax_m3": _minimax_m3,
    "minimax_m3_vl_text": _minimax_m3,
    "mimo_v2_flash": _mimo_v2,
    "step3p5": _step3p5,
    "gemma4_text": _gemma4,
    "gemma3n_text": _gemma3n,
    "mllama_text_model": _mllama,
    "gemma4_unified_text": _gemma4,
    "laguna": _laguna,
    "lfm2": _lfm2,
    "lfm2_moe": _tied_as_before,
    "cwm": _granite_swa,
    "granite_swa": _granite_swa,
    "granitemoe_swa": _granite_swa,
    "hy_v4": _hy_v4,
    "hy_v3": _hy_v3,
    "minicpm3": _minicpm3,
    "cohere2_moe": _cohere2_moe,
    "bailing_moe": _bailing,
    "bailing_moe_v2": _bailing,
    "bamba": _bamba,
    "jamba": _jamba,
    "minimax": _minimax,
    "minimax_m1": _minimax,
    "minimax_text_01": _minimax,
    "nemotron-nas": _nemotron_nas,
}
