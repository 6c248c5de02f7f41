"""The keys of a config.json that a model's shape depends on, and the errors of reading it."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict

from agent.errors import AgentError
from agent.records.model import WeightBlock

# Makes a block of a matrix's name, rows, columns and the number of its biases and norms.
Block = Callable[..., WeightBlock]


class ModelConfigInvalid(AgentError):
    """A config.json cannot be parsed, or a number in it is missing or impossible."""


class ArchitectureUnknown(AgentError):
    """This version does not know how the model computes."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(
            f"the model architecture {name!r} is unknown: {why}; its figures are not guessed. "
            "docs/estimate.md lists those that are known; for others, put the model's safetensors "
            "files or their index beside the config, or use the engine's own counters "
            "(vLLM: --enable-mfu-metrics)"
        )
        self.name = name


class QuantisationUnknown(AgentError):
    """The weights are stored in a format whose size this version does not know."""

    def __init__(self, method: str, why: str) -> None:
        super().__init__(
            f"the quantisation {method!r} is unknown: {why}; set how the weights are stored "
            "and multiplied, with --dtype or the engine's setting `dtype`"
        )
        self.method = method


class CacheUnknown(AgentError):
    """The KV cache is stored in a format whose size this version does not know."""

    def __init__(self, value: object) -> None:
        super().__init__(
            f"the KV cache of the config is {value!r}, which is unknown; set how it is stored, "
            "with --kv-dtype or the engine's setting `kv_dtype`"
        )


# No model is as large, and products of such numbers are still numbers of a double.
_LARGEST = 10**9
_MOST_LAYERS = 10_000

# As in transformers, neither "128" nor true is a number.
_Int = Annotated[int, Strict(), Field(le=_LARGEST)]
_Bool = Annotated[bool, Strict()]
Count = Annotated[_Int, Field(gt=0)]
WholeNumber = Annotated[_Int, Field(ge=0)]


def _same_in_all(value: object) -> object:
    """The one number of a list with a number for each layer; a list of several stays one."""
    if isinstance(value, list) and value and value.count(value[0]) == len(value):
        return value[0]
    return value


_SAME = BeforeValidator(_same_in_all)

# Our name of each key that model types name differently.
RENAMES = {
    "torch_dtype": "dtype",
    "qkv_bias": "attention_bias",
    "layers_block_type": "layer_types",
    "num_local_experts": "experts",
    "num_experts": "experts",
    "n_routed_experts": "experts",
    "moe_num_experts": "experts",
    "num_experts_per_tok": "experts_per_token",
    "num_experts_per_token": "experts_per_token",
    "top_k_experts": "experts_per_token",
    "moe_top_k": "experts_per_token",
    "moe_k": "experts_per_token",
    "moe_topk": "experts_per_token",
    "n_shared_experts": "shared_experts",
    "moe_num_shared_experts": "shared_experts",
    "num_shared_experts": "shared_experts",
    "shared_expert_intermediate_size": "shared_width",
    "shared_intermediate_size": "shared_width",
    "moe_shared_expert_intermediate_size": "shared_width",
    "share_expert_dim": "shared_width",
    "share_expert_dims": "shared_width",
    "num_attention_groups": "num_key_value_heads",
    "num_mtp_layers": "num_nextn_predict_layers",
    "intermediate_size_mlp": "dense_width",
    "dense_intermediate_size": "dense_width",
    "routed_expert_hidden_size": "moe_latent_size",
    "interleave_moe_layer_step": "decoder_sparse_step",
    "moe_layer_interval": "decoder_sparse_step",
    "moe_layer_start_index": "first_k_dense_replace",
    "num_dense_layers": "first_k_dense_replace",
    "global_attn_every_n_layers": "full_attention_interval",
    "moe_router_enable_expert_bias": "use_expert_bias",
    "linear_conv_kernel_dim": "conv_kernel",
    "mamba_d_conv": "conv_kernel",
    "conv_L_cache": "conv_kernel",
    "conv_bias": "use_conv_bias",
    "mamba_n_heads": "mamba_num_heads",
    "mamba_d_head": "mamba_head_dim",
    "mamba_d_state": "ssm_state_size",
    "mamba_n_groups": "n_groups",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_ssm_dtype": "mamba_ssm_cache_dtype",
}


class LayerConfig(BaseModel):
    """What one layer has in place of the model's own."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    num_attention_heads: Count | None = None
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    v_head_dim: Count | None = None
    intermediate_size: WholeNumber | None = None
    attends: _Bool | None = None


class TextConfig(BaseModel):
    """The text part of a model's configuration. Keys that it lacks are None."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    # Named `model_type` in the file; pydantic reserves names that begin with `model_`.
    architecture: str = Field(alias="model_type")
    architectures: tuple[str, ...] | None = None
    id2label: dict[str, Any] | None = None
    num_labels: Count | None = None
    hidden_size: Count
    # Zero if a layer has no feed-forward part.
    intermediate_size: WholeNumber | None = None
    num_hidden_layers: Annotated[Count, Field(le=_MOST_LAYERS)]
    num_attention_heads: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    vocab_size: Count
    # Rows of the embedding that the output matrix does not have.
    extra_embeddings: WholeNumber = 0
    tie_word_embeddings: _Bool = False
    attention_bias: _Bool | None = None
    attention_out_bias: _Bool | None = None
    mlp_bias: _Bool | None = None
    use_qk_norm: _Bool | None = None
    dtype: str | None = None
    max_position_embeddings: Count | None = None

    # Kinds of layers, and windows
    layer_types: tuple[str, ...] | None = None
    hybrid_override_pattern: str | None = None
    full_attention_interval: Count | None = None
    sliding_window: _Int | None = None
    use_sliding_window: _Bool | None = None
    sliding_window_pattern: Count | str | None = None
    attention_chunk_size: Count | None = None
    no_rope_layers: tuple[_Int, ...] | None = None
    no_rope_layer_interval: Count | None = None
    # Layers that differ from the others, by number.
    per_layer_config: dict[_Int, LayerConfig] | None = None
    attends: _Bool = True
    # The last layers, which attend to what an earlier one cached.
    num_kv_shared_layers: WholeNumber = 0
    attention_k_eq_v: _Bool | None = None

    # Experts
    experts: Annotated[WholeNumber | None, _SAME] = None
    # Zero if there are no experts.
    experts_per_token: Annotated[WholeNumber | None, _SAME] = None
    moe_intermediate_size: Count | None = None
    moe_latent_size: Count | None = None
    dense_width: Count | None = None
    shared_experts: WholeNumber | None = None
    shared_width: WholeNumber | None = None
    first_k_dense_replace: WholeNumber | None = None
    moe_layer_end_index: _Int | None = None
    # Zero if no layer has experts, as in Llama Guard 4.
    decoder_sparse_step: WholeNumber | None = None
    mlp_only_layers: tuple[_Int, ...] | None = None
    moe_layers: tuple[_Int, ...] | None = None
    mlp_layer_types: tuple[Literal["dense", "sparse", "hash_moe", "moe"], ...] | None = None
    enable_moe_block: _Bool | None = None
    use_double_wide_mlp: _Bool | None = None
    latent_moe_use_norm: _Bool | None = None
    expert_dtype: str | None = None
    use_expert_bias: _Bool | None = None
    lm_head_bias: _Bool | None = None

    # Latent attention, and the selection of its tokens
    q_lora_rank: Count | None = None
    kv_lora_rank: Count | None = None
    qk_nope_head_dim: Count | None = None
    qk_rope_head_dim: Count | None = None
    v_head_dim: Count | None = None
    index_topk: Count | None = None
    index_head_dim: Count | None = None
    index_n_heads: Count | None = None
    index_block_size: Count | None = None
    index_topk_blocks: Count | None = None
    indexer_types: tuple[Literal["full", "shared"], ...] | None = None
    mla_use_output_gate: _Bool | None = None

    # DeepSeek-V4: output in groups, tokens for each entry of a compressed cache, and streams
    o_groups: Count | None = None
    o_lora_rank: Count | None = None
    compressed_sparse_rate: Count | None = None
    heavily_compressed_rate: Count | None = None
    hc_mult: Count | None = None

    # Beside the layers: embeddings of each layer, and residuals with weights
    hidden_size_per_layer_input: WholeNumber | None = None
    vocab_size_per_layer_input: Count | None = None
    altup_num_inputs: Count | None = None
    laurel_rank: Count | None = None
    attn_res_block_size: Count | None = None

    # Layers with a state
    linear_num_key_heads: Count | None = None
    linear_num_value_heads: Count | None = None
    linear_key_head_dim: Count | None = None
    linear_value_head_dim: Count | None = None
    linear_num_heads: Count | None = None
    linear_head_dim: Count | None = None
    use_full_rank_gate: _Bool | None = None
    mamba_num_heads: Count | None = None
    mamba_head_dim: Count | Literal["auto"] | None = None
    mamba_expand: Count | None = None
    mamba_d_ssm: Count | None = None
    mamba_dt_rank: Count | Literal["auto"] | None = None
    mamba_rms_norm: _Bool | None = None
    ssm_state_size: Count | None = None
    n_groups: Count | None = None
    conv_kernel: Count | None = None
    use_conv_bias: _Bool | None = None
    state_projection_bias: _Bool | None = None
    mamba_ssm_cache_dtype: str | None = None

    # Multi-token prediction; engines load these layers only for speculative decoding
    num_nextn_predict_layers: WholeNumber = 0

    quantization_config: dict[str, Any] | None = None


# Keys that mean the same in every class, also if the class has no field for them.
EVERYWHERE = frozenset(
    {
        "model_type",
        "architectures",
        "id2label",
        "num_labels",
        "num_hidden_layers",
        "dtype",
        "torch_dtype",
        "layer_types",
        "num_nextn_predict_layers",
        "quantization_config",
    }
)


def needed(config: TextConfig, key: str) -> int:
    """A number that the architecture needs. Raises ModelConfigInvalid if it is missing."""
    value: int | None = getattr(config, key)
    if value is None:
        spelled = [name for name, ours in RENAMES.items() if ours == key] or [key]
        raise ModelConfigInvalid(
            f"the architecture {config.architecture!r} needs {' or '.join(spelled)}, which its "
            "config.json lacks"
        )
    return value


def entry(config: TextConfig, key: str, layer: int) -> Any:
    """What a list has for a layer. Raises ModelConfigInvalid if the list is too short."""
    listed = getattr(config, key)
    if layer >= len(listed):
        raise ModelConfigInvalid(
            f"{key} has {len(listed)} entries for {config.num_hidden_layers} layers"
        )
    return listed[layer]


def kv_heads(config: TextConfig) -> int:
    """The heads of keys and values: as many as queries have, unless fewer are given."""
    return config.num_key_value_heads or config.num_attention_heads


def head_dim(config: TextConfig) -> int:
    """The size of a head: the given one, else an equal part of the hidden size.

    Raises ModelConfigInvalid if that is nothing.
    """
    size = config.head_dim or config.hidden_size // config.num_attention_heads
    if size == 0:
        raise ModelConfigInvalid(
            f"hidden_size {config.hidden_size} is too small for num_attention_heads "
            f"{config.num_attention_heads}"
        )
    return size
