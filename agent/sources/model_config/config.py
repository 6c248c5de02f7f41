"""The keys of a config.json that a model's shape depends on, checked."""

from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

Count = Annotated[int, Field(gt=0)]
WholeNumber = Annotated[int, Field(ge=0)]


class TextConfig(BaseModel):
    """The text part of a model's configuration. Keys that it lacks are None."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    # Named `model_type` in the file; pydantic reserves names that begin with `model_`.
    architecture: str = Field(alias="model_type")
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    vocab_size: Count
    tie_word_embeddings: bool = False
    attention_bias: bool | None = Field(
        default=None, validation_alias=AliasChoices("attention_bias", "qkv_bias")
    )
    mlp_bias: bool = False
    use_qk_norm: bool | None = None
    dtype: str | None = Field(default=None, validation_alias=AliasChoices("dtype", "torch_dtype"))
    max_position_embeddings: Count | None = None

    # Windows
    sliding_window: int | None = None
    use_sliding_window: bool | None = None
    sliding_window_pattern: Count | None = None
    layer_types: tuple[str, ...] | None = None

    # Experts
    experts: Count | None = Field(
        default=None,
        validation_alias=AliasChoices("num_local_experts", "num_experts", "n_routed_experts"),
    )
    experts_per_token: Count | None = Field(
        default=None, validation_alias=AliasChoices("num_experts_per_tok", "experts_per_token")
    )
    moe_intermediate_size: Count | None = None
    shared_experts: WholeNumber = Field(default=0, validation_alias="n_shared_experts")
    shared_expert_intermediate_size: WholeNumber = 0
    first_k_dense_replace: WholeNumber = 0
    decoder_sparse_step: WholeNumber = 1
    moe_layer_freq: Count = 1
    mlp_only_layers: tuple[int, ...] = ()

    # Latent attention
    q_lora_rank: Count | None = None
    kv_lora_rank: Count | None = None
    qk_nope_head_dim: Count | None = None
    qk_rope_head_dim: Count | None = None
    v_head_dim: Count | None = None

    # Multi-token prediction; engines load these layers only for speculative decoding
    num_nextn_predict_layers: WholeNumber = 0

    quantization_config: dict[str, Any] | None = None
