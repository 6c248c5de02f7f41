"""The numbers of a model that the formulas need, summed over its layers once."""

from dataclasses import dataclass

from agent.analysis.physics.parameters import placed_blocks
from agent.records.model import Attention, ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAttention:
    """The attention of `layers` layers; `token_bytes` is one layer's KV cache of a token."""

    layers: int
    window: int | None
    kv_heads: int
    token_bytes: float
    prefill_flops_per_pair: int
    decode_flops_per_pair: int
    expand_flops: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """A model in the numbers of the formulas.

    `linear_parameters` are the matrix parameters that one token is multiplied with in the layers,
    `head_parameters` those of the output matrix.
    """

    linear_parameters: int
    head_parameters: int
    attentions: tuple[LayerAttention, ...]


def coefficients(model: ModelShape) -> Coefficients:
    """The coefficients of a model. They are the same for every request, so compute them once."""
    return Coefficients(
        linear_parameters=sum(
            layers * block.used * block.parameters for layers, block in placed_blocks(model)
        ),
        head_parameters=(model.head or model.embedding).parameters,
        attentions=tuple(
            _layer_attention(layers, attention, model.cache_bits)
            for attention, layers in _alike(model).items()
        ),
    )


def _alike(model: ModelShape) -> dict[Attention, int]:
    """How many layers have each attention."""
    layers: dict[Attention, int] = {}
    for group in model.groups:
        layers[group.attention] = layers.get(group.attention, 0) + group.layers
    return layers


def _layer_attention(layers: int, attention: Attention, cache_bits: float) -> LayerAttention:
    return LayerAttention(
        layers=layers,
        window=attention.window,
        kv_heads=attention.kv_heads,
        token_bytes=attention.kv_heads * attention.values_per_kv_head * cache_bits / 8,
        prefill_flops_per_pair=attention.prefill_flops_per_pair,
        decode_flops_per_pair=attention.decode_flops_per_pair,
        expand_flops=attention.expand_flops,
    )
