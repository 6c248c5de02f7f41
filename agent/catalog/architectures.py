"""The model architectures that this version knows: one row per `model_type` of a config.json.

Rows are from the model classes of transformers 5.19. The rows of model_classes.json, the keys and
defaults of their configurations, are generated: `tests/sources/model_config/test_transformers.py`
compares both with the classes, and prints what model_classes.json should be."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from importlib.resources import files

_ALL = ("q", "k", "v", "o")
_INPUTS = ("q", "k", "v")


class LayerKind(StrEnum):
    """What a layer does, in the words of `layer_types`."""

    FULL = "full_attention"
    SLIDING = "sliding_attention"
    CHUNKED = "chunked_attention"
    INDEXED = "indexed_attention"
    # To the tokens that an earlier layer's index selected.
    SELECTED = "selected_attention"
    # With the keys and values of an earlier layer.
    REUSING = "reusing_attention"
    REUSING_SLIDING = "reusing_sliding_attention"
    # To images alone.
    CROSS = "cross_attention"
    COMPRESSED_SPARSE = "compressed_sparse_attention"
    HEAVILY_COMPRESSED = "heavily_compressed_attention"
    NO_ATTENTION = "no_attention"
    LINEAR = "linear_attention"
    # Attention and a recurrence side by side.
    HYBRID = "hybrid"
    MLP = "mlp"
    MOE = "moe"


class QkNorm(StrEnum):
    """Norms of queries and keys with weights: none, one for all heads, or of all heads' width."""

    NONE = "none"
    HEAD = "head"
    WIDTH = "width"


class AttentionType(StrEnum):
    """Attention to keys and values of heads, to a latent, or to a compressed cache."""

    GROUPED = "grouped"
    LATENT = "latent"
    COMPRESSED = "compressed"


class OutputGate(StrEnum):
    """What gates the heads' output: a part of the query's matrix, or a matrix of its own with one
    value for each head or of all heads' width."""

    NONE = "none"
    IN_QUERY = "in query"
    HEAD = "head"
    WIDTH = "width"


class Recurrence(StrEnum):
    """How layers with a state compute."""

    DELTA_NET = "gated delta net"
    # The same, with four input matrices for two.
    DELTA_NET_APART = "gated delta net with matrices apart"
    KIMI_DELTA = "Kimi delta attention"
    LIGHTNING = "lightning attention"
    SHORT_CONVOLUTION = "short convolution"
    MAMBA1 = "mamba"
    MAMBA2 = "mamba2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What a model type fixes beyond the numbers of its config.json.

    `biased` are the attention matrices that have a bias with `attention_bias`. `norms` counts the
    norms of one layer over the hidden size. Every n-th layer (`full_attention_every`) attends to
    all tokens and the rest are of the kind `others`; None means that all layers attend to all, 0
    that none does. Models of rows with `without_experts` may have no experts: they are dense then.
    `renames` are keys of the class under other names of ours, none if the class does not use it;
    `class_of` is the type whose class is used if transformers has none. `more_keys` are keys that
    the class does not read, but engines do.
    """

    attention: AttentionType = AttentionType.GROUPED
    attention_bias: bool = False
    biased: tuple[str, ...] = _ALL
    qk_norm: QkNorm = QkNorm.NONE
    output_gate: OutputGate = OutputGate.NONE
    # Values of heads have a size of their own.
    value_size: bool = False
    sinks: frozenset[LayerKind] = frozenset()
    norms: int = 2
    norm_bias: bool = False
    # Parameters of a layer's activation.
    of_activation: int = 0
    full_attention_every: int | None = None
    others: LayerKind = LayerKind.SLIDING
    kinds: frozenset[LayerKind] = frozenset({LayerKind.FULL, LayerKind.SLIDING})
    recurrence: Recurrence | None = None
    parts_apart: bool = False
    gated_mlp: bool = True
    experts: bool = False
    without_experts: bool = False
    dense_layers: int = 0
    expert_bias: bool = False
    router_bias: bool = False
    shared_as_wide_as_expert: bool = False
    shared_beside_dense: bool = False
    dense_beside_experts: bool = False
    stream_products: bool = True
    latent_names: tuple[str, str] = ("fc1_latent_proj", "fc2_latent_proj")
    shared_gate: bool = False
    feed_forward: str = "mlp"
    # Before the number of an expert.
    expert: str = "mlp.experts"
    shared_expert: str = "mlp.shared_experts"
    renames: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    class_of: str | None = None
    more_keys: frozenset[str] = frozenset()


_LLAMA = Architecture()
_QWEN2 = Architecture(attention_bias=True, biased=_INPUTS)
# Its heads are parts of the hidden size; only its positions would know another size.
_QWEN2_VL = replace(_QWEN2, renames={"head_dim": ()})
_QWEN3 = Architecture(qk_norm=QkNorm.HEAD)
_QWEN3_MOE = replace(_QWEN3, experts=True, without_experts=True)
_QWEN3_5 = Architecture(
    qk_norm=QkNorm.HEAD,
    output_gate=OutputGate.IN_QUERY,
    full_attention_every=4,
    others=LayerKind.LINEAR,
    kinds=frozenset({LayerKind.FULL, LayerKind.LINEAR}),
    recurrence=Recurrence.DELTA_NET_APART,
)
_QWEN3_5_MOE = replace(_QWEN3_5, experts=True, shared_gate=True, shared_expert="mlp.shared_expert")
_DEEPSEEK_V3 = Architecture(attention=AttentionType.LATENT, experts=True, router_bias=True)
_SELECTING = replace(
    _DEEPSEEK_V3,
    full_attention_every=0,
    others=LayerKind.INDEXED,
    kinds=frozenset({LayerKind.INDEXED}),
    # Its matrices have none, although its class has the key.
    renames={"mlp_bias": ()},
)
_MINIMAX_M3 = Architecture(
    qk_norm=QkNorm.HEAD,
    kinds=frozenset({LayerKind.FULL, LayerKind.INDEXED}),
    experts=True,
    router_bias=True,
)
_GEMMA3 = Architecture(norms=4, qk_norm=QkNorm.HEAD, full_attention_every=6)
_OLMO2 = Architecture(qk_norm=QkNorm.WIDTH)
_GRANITE_MOE = Architecture(
    experts=True, feed_forward="block_sparse_moe", expert="block_sparse_moe.experts"
)
_COHERE = Architecture(norms=1, qk_norm=QkNorm.WIDTH)
_ERNIE = Architecture(renames={"use_bias": ("attention_bias", "mlp_bias")})
_FULL_AND_LINEAR = frozenset({LayerKind.FULL, LayerKind.LINEAR})
_LFM2 = Architecture(
    qk_norm=QkNorm.HEAD,
    kinds=_FULL_AND_LINEAR,
    recurrence=Recurrence.SHORT_CONVOLUTION,
    feed_forward="feed_forward",
    expert="feed_forward.experts",
)
_MINIMAX = Architecture(kinds=_FULL_AND_LINEAR, recurrence=Recurrence.LIGHTNING, experts=True)
_SINKS = frozenset({LayerKind.FULL, LayerKind.SLIDING})
_BAILING = Architecture(
    qk_norm=QkNorm.HEAD,
    experts=True,
    router_bias=True,
    renames={
        "use_bias": ("attention_bias", "mlp_bias"),
        "use_qkv_bias": ("attention_bias",),
    },
)
_HUNYUAN = Architecture(qk_norm=QkNorm.HEAD)

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": _LLAMA,
    "mistral": Architecture(full_attention_every=0),
    "ministral": Architecture(full_attention_every=0),
    "ministral3": _LLAMA,
    "mistral4": replace(_DEEPSEEK_V3, router_bias=False),
    "arcee": Architecture(gated_mlp=False),
    "apertus": Architecture(gated_mlp=False, qk_norm=QkNorm.HEAD, of_activation=2),
    "cwm": _LLAMA,
    "nemotron": Architecture(gated_mlp=False, norm_bias=True),
    "phi4mm": Architecture(full_attention_every=0, class_of="phi3"),
    "phimoe": Architecture(full_attention_every=0, norm_bias=True, experts=True),
    "mixtral": Architecture(full_attention_every=0, experts=True),
    "qwen2": _QWEN2,
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen2_5_omni_text": _QWEN2_VL,
    "qwen2_moe": replace(
        _QWEN2,
        experts=True,
        without_experts=True,
        shared_gate=True,
        shared_expert="mlp.shared_expert",
    ),
    "qwen3": _QWEN3,
    "qwen3_vl_text": _QWEN3,
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_vl_moe_text": _QWEN3_MOE,
    "qwen3_omni_moe_text": _QWEN3_MOE,
    "qwen3_next": replace(_QWEN3_5_MOE, without_experts=True, recurrence=Recurrence.DELTA_NET),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5_MOE,
    "phi3": Architecture(full_attention_every=0),
    "gemma": _LLAMA,
    "gemma2": Architecture(norms=4, full_attention_every=2),
    "gemma3_text": _GEMMA3,
    "gemma3n_text": _GEMMA3,
    "gemma4_unified_text": _GEMMA3,
    "gemma4_text": replace(_GEMMA3, experts=True, dense_beside_experts=True, expert="experts"),
    "gpt_oss": Architecture(
        sinks=frozenset({LayerKind.FULL, LayerKind.SLIDING}),
        full_attention_every=2,
        experts=True,
        expert_bias=True,
        router_bias=True,
    ),
    "deepseek_v2": Architecture(attention=AttentionType.LATENT, experts=True),
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": _SELECTING,
    "deepseek_v4": Architecture(
        attention=AttentionType.COMPRESSED,
        kinds=frozenset(
            {LayerKind.SLIDING, LayerKind.COMPRESSED_SPARSE, LayerKind.HEAVILY_COMPRESSED}
        ),
        experts=True,
        router_bias=True,
        shared_as_wide_as_expert=True,
        more_keys=frozenset({"expert_dtype"}),
    ),
    "kimi_k2": replace(_DEEPSEEK_V3, class_of="deepseek_v3"),
    "kimi_linear": replace(
        _DEEPSEEK_V3,
        kinds=frozenset({LayerKind.FULL, LayerKind.LINEAR}),
        recurrence=Recurrence.KIMI_DELTA,
        latent_names=("routed_expert_down_proj", "routed_expert_up_proj"),
        more_keys=frozenset(
            {
                *("attn_res_block_size", "latent_moe_use_norm", "mla_use_output_gate"),
                "routed_expert_hidden_size",
            }
        ),
    ),
    "glm_moe_dsa": _SELECTING,
    "flex_olmo": replace(_OLMO2, experts=True),
    "mellum": replace(_QWEN3, experts=True),
    "minicpm3": Architecture(attention=AttentionType.LATENT),
    "jais2": Architecture(gated_mlp=False, norm_bias=True),
    "cohere2_moe": replace(_COHERE, qk_norm=QkNorm.NONE, full_attention_every=4, experts=True),
    "hy_v4": replace(
        _SELECTING,
        output_gate=OutputGate.WIDTH,
        sinks=frozenset({LayerKind.INDEXED, LayerKind.SELECTED}),
        dense_layers=1,
        # Its streams are mixed without their products.
        stream_products=False,
    ),
    "youtu": Architecture(attention=AttentionType.LATENT),
    "dots1": Architecture(qk_norm=QkNorm.HEAD, experts=True, router_bias=True),
    "afmoe": Architecture(
        norms=4,
        qk_norm=QkNorm.HEAD,
        output_gate=OutputGate.WIDTH,
        full_attention_every=4,
        experts=True,
        router_bias=True,
    ),
    "laguna": Architecture(
        qk_norm=QkNorm.HEAD,
        output_gate=OutputGate.HEAD,
        experts=True,
        router_bias=True,
        dense_layers=1,
        shared_expert="mlp.shared_expert",
    ),
    "solar_open": Architecture(biased=_INPUTS, experts=True, router_bias=True),
    "glm4v_text": Architecture(
        norms=4, biased=_INPUTS, attention_bias=True, renames={"head_dim": ()}
    ),
    "glm_ocr_text": Architecture(norms=4),
    "glm4v_moe_text": Architecture(biased=_INPUTS, experts=True, router_bias=True),
    "bailing_moe": _BAILING,
    "bailing_moe_v2": _BAILING,
    "glm": Architecture(biased=_INPUTS, attention_bias=True),
    "glm4": Architecture(norms=4, biased=_INPUTS),
    "glm4_moe": Architecture(biased=_INPUTS, qk_norm=QkNorm.HEAD, experts=True, router_bias=True),
    "glm4_moe_lite": replace(
        _DEEPSEEK_V3, dense_layers=1, renames={"head_dim": ("qk_rope_head_dim",)}
    ),
    "olmo2": _OLMO2,
    "olmo3": replace(_OLMO2, full_attention_every=4),
    "granite": _LLAMA,
    "granitemoe": _GRANITE_MOE,
    "granitemoehybrid": replace(
        _GRANITE_MOE,
        full_attention_every=0,
        others=LayerKind.LINEAR,
        kinds=frozenset({LayerKind.FULL, LayerKind.LINEAR}),
        recurrence=Recurrence.MAMBA2,
        shared_beside_dense=True,
        without_experts=True,
        shared_expert="shared_mlp",
        renames={"mamba_proj_bias": ("state_projection_bias",)},
    ),
    "granitemoeshared": replace(_GRANITE_MOE, shared_beside_dense=True, shared_expert="shared_mlp"),
    "granite_swa": Architecture(sinks=_SINKS),
    "granitemoe_swa": replace(_GRANITE_MOE, sinks=_SINKS, shared_expert="shared_mlp"),
    "bamba": Architecture(
        kinds=_FULL_AND_LINEAR,
        recurrence=Recurrence.MAMBA2,
        feed_forward="feed_forward",
        renames={"mamba_proj_bias": ("state_projection_bias",)},
    ),
    "falcon_h1": Architecture(
        full_attention_every=0,
        others=LayerKind.HYBRID,
        kinds=frozenset({LayerKind.HYBRID}),
        recurrence=Recurrence.MAMBA2,
        feed_forward="feed_forward",
    ),
    "jamba": Architecture(
        kinds=_FULL_AND_LINEAR,
        recurrence=Recurrence.MAMBA1,
        experts=True,
        feed_forward="feed_forward",
        expert="feed_forward.experts",
        renames={"mamba_proj_bias": ("state_projection_bias",)},
    ),
    "lfm2": _LFM2,
    "lfm2_moe": replace(_LFM2, experts=True, router_bias=True),
    "minimax": _MINIMAX,
    "minimax_m1": replace(_MINIMAX, class_of="minimax"),
    "minimax_text_01": replace(_MINIMAX, class_of="minimax"),
    "olmoe": Architecture(qk_norm=QkNorm.WIDTH, experts=True),
    "cohere": _COHERE,
    "cohere2": replace(_COHERE, qk_norm=QkNorm.NONE, full_attention_every=4),
    "smollm3": _LLAMA,
    "llama4_text": Architecture(
        full_attention_every=4,
        others=LayerKind.CHUNKED,
        kinds=frozenset({LayerKind.FULL, LayerKind.CHUNKED}),
        experts=True,
        shared_as_wide_as_expert=True,
        feed_forward="feed_forward",
        expert="feed_forward.experts",
        shared_expert="feed_forward.shared_expert",
    ),
    "mllama_text_model": Architecture(kinds=frozenset({LayerKind.FULL, LayerKind.CROSS})),
    "mimo": replace(_QWEN2, class_of="qwen2"),
    "mimo_v2_flash": Architecture(
        biased=_INPUTS,
        value_size=True,
        sinks=frozenset({LayerKind.SLIDING}),
        experts=True,
        router_bias=True,
    ),
    "minimax_m3_vl_text": _MINIMAX_M3,
    "minimax_m3": replace(_MINIMAX_M3, class_of="minimax_m3_vl_text"),
    "step3p5": Architecture(
        qk_norm=QkNorm.HEAD,
        output_gate=OutputGate.HEAD,
        experts=True,
        router_bias=True,
        # Its class has this key twice, and uses the other.
        renames={"num_local_experts": ()},
    ),
    "minimax_m2": Architecture(qk_norm=QkNorm.WIDTH, experts=True, router_bias=True),
    # As vLLM reads it; its own class is that of Llama with other keys.
    "nemotron-nas": replace(_LLAMA, class_of="llama"),
    "nemotron_h": Architecture(
        norms=1,
        kinds=frozenset({LayerKind.FULL, LayerKind.LINEAR, LayerKind.MLP, LayerKind.MOE}),
        recurrence=Recurrence.MAMBA2,
        parts_apart=True,
        gated_mlp=False,
        experts=True,
        router_bias=True,
        feed_forward="mixer",
        expert="mixer.experts",
        shared_expert="mixer.shared_experts",
        # Its attention has no biases and its output matrix is its own, although its class has the
        # keys.
        renames={
            "use_bias": ("state_projection_bias",),
            "attention_bias": (),
            "tie_word_embeddings": (),
        },
    ),
    "seed_oss": Architecture(biased=_INPUTS),
    "exaone_moe": Architecture(
        qk_norm=QkNorm.HEAD, full_attention_every=4, experts=True, router_bias=True
    ),
    "exaone4": Architecture(qk_norm=QkNorm.HEAD, full_attention_every=4),
    "ernie4_5": _ERNIE,
    "ernie4_5_moe": replace(_ERNIE, experts=True, router_bias=True),
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_vl_text": _HUNYUAN,
    "hy_v3": replace(_HUNYUAN, experts=True, router_bias=True, dense_layers=1),
    "hunyuan_v1_moe": replace(
        _HUNYUAN, experts=True, shared_as_wide_as_expert=True, shared_expert="mlp.shared_mlp"
    ),
}


@dataclass(frozen=True, slots=True)
class ModelClass:
    """One class: the defaults of its keys, null if it derives one, and its keys without any.

    `not_null` are the keys that may not be null in a file.
    """

    defaults: Mapping[str, object]
    others: frozenset[str]
    not_null: frozenset[str]


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A multimodal class: the type of its text part, and whether its embeddings are tied.

    `tied` is its default; `tied_over_tied` that over a text part that ties; `untied_over_tied` what
    becomes of a false of its own over one: some classes take the text part's then.
    """

    text: str
    tied: bool
    tied_over_tied: bool
    untied_over_tied: bool


@dataclass(frozen=True, slots=True)
class ModelClasses:
    """All classes by their model type, and all wrappers by theirs."""

    classes: Mapping[str, ModelClass]
    wrappers: Mapping[str, Wrapper]


@cache
def model_classes() -> ModelClasses:
    """The rows of model_classes.json."""
    text = files("agent.catalog").joinpath("model_classes.json").read_text(encoding="utf-8")
    rows = json.loads(text)
    return ModelClasses(
        {
            name: ModelClass(row["defaults"], frozenset(row["others"]), frozenset(row["not_null"]))
            for name, row in rows["classes"].items()
        },
        {name: Wrapper(**row) for name, row in rows["wrappers"].items()},
    )
