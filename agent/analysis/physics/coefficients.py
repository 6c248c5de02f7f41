"""The numbers of a model that the formulas need, summed over its layers once."""

from dataclasses import dataclass

from agent.analysis.physics.parameters import placed_blocks
from agent.records.model import Attention, ModelShape, Reach, RecurrentState


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
    reach: Reach = Reach.WINDOW


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """A model in the numbers of the formulas.

    `linear_parameters` are the matrix parameters that one token is multiplied with in the layers,
    `head_parameters` those of the output matrix. `state_bytes` are those of one request in all
    recurrent layers, `state_flops` those of a token with them.
    """

    linear_parameters: int
    head_parameters: int
    attentions: tuple[LayerAttention, ...]
    state_bytes: float = 0.0
    state_flops: int = 0


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
        state_bytes=sum(layers * state.bits for layers, state in _states(model)) / 8,
        state_flops=sum(layers * state.flops_per_token for layers, state in _states(model)),
    )


def _states(model: ModelShape) -> list[tuple[int, RecurrentState]]:
    """The states of recurrent layers, each after the number of layers that have it."""
    return [(group.layers, group.state) for group in model.groups if group.state is not None]


def _alike(model: ModelShape) -> dict[Attention, int]:
    """How many layers have each attention."""
    layers: dict[Attention, int] = {}
    for group in model.groups:
        for attention in group.attentions:
            layers[attention] = layers.get(attention, 0) + group.layers
    return layers


def _layer_attention(layers: int, attention: Attention, cache_bits: float) -> LayerAttention:
    bits = attention.value_bits or cache_bits
    return LayerAttention(
        layers=layers,
        window=attention.window,
        reach=attention.reach,
        kv_heads=attention.kv_heads,
        token_bytes=attention.kv_heads * attention.values_per_kv_head * bits / 8,
        prefill_flops_per_pair=attention.prefill_flops_per_pair,
        decode_flops_per_pair=attention.decode_flops_per_pair,
        expand_flops=attention.expand_flops,
    )
