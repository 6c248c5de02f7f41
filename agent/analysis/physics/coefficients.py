"""The numbers of a model that the formulas need: parameters, bytes, and sums over its layers."""

from collections.abc import Iterator
from dataclasses import dataclass

from agent.catalog.hardware import Precision
from agent.records.model import Attention, ModelShape, Reach, RecurrentState, WeightBlock


def attended_pairs(new: int, cached: int, window: int | None, reach: Reach = Reach.WINDOW) -> int:
    """Pairs of a query token and a token that it attends to, itself included.

    Of `new` consecutive tokens after `cached` ones, causally, no further than the window lets it.
    The sum over consecutive pieces equals that of the whole.
    """
    if window is None:
        return new * cached + new * (new + 1) // 2
    if reach is Reach.CHUNK:
        return _pairs_in_chunks(cached + new, window) - _pairs_in_chunks(cached, window)
    growing = min(max(window - cached, 0), new)
    return growing * cached + growing * (growing + 1) // 2 + (new - growing) * window


def _pairs_in_chunks(tokens: int, size: int) -> int:
    """Pairs of the first tokens, each with those before it in its chunk."""
    whole, rest = divmod(tokens, size)
    return whole * size * (size + 1) // 2 + rest * (rest + 1) // 2


def cached_tokens(context: int, window: int | None, reach: Reach = Reach.WINDOW) -> int:
    """How many tokens of a context a layer's KV cache stores."""
    if window is None or reach is Reach.SELECTION:
        return context
    if reach is Reach.CHUNK:
        return (context - 1) % window + 1 if context else 0
    return min(context, window)


def placed_blocks(model: ModelShape) -> Iterator[tuple[int, WeightBlock]]:
    """Each block of the layers, after the number of layers that have it."""
    for group in model.groups:
        for block in group.blocks:
            yield group.layers, block


def parameters(model: ModelShape) -> int:
    """All parameters, input embedding included; a tied output matrix is counted once."""
    in_layers = sum(
        layers * block.copies * (block.parameters + block.vectors)
        for layers, block in placed_blocks(model)
    )
    return in_layers + _outside_blocks(model)


def active_parameters(model: ModelShape) -> int:
    """All parameters without the experts that one token does not use."""
    in_layers = sum(
        layers * block.used * (block.parameters + block.vectors)
        for layers, block in placed_blocks(model)
    )
    return in_layers + _outside_blocks(model)


def _outside_blocks(model: ModelShape) -> int:
    head = 0 if model.head is None else model.head.parameters
    return model.embedding.parameters + head + _norms(model)


def _norms(model: ModelShape) -> int:
    return model.vectors + sum(group.layers * group.vectors for group in model.groups)


def weight_bytes(model: ModelShape) -> int:
    """Bytes of all weights: the size of the model's files if it is known, else counted."""
    if model.stored_bytes is not None:
        return model.stored_bytes
    return shared_weight_bytes(model) + expert_bytes(model)


def expert_bytes(model: ModelShape) -> int:
    """Bytes of the experts among which tokens choose, counted from the model's shape."""
    return sum(
        layers * copies_bytes(block, model.precision)
        for layers, block in placed_blocks(model)
        if block.copies > 1
    )


def shared_weight_bytes(model: ModelShape) -> int:
    """Bytes of all other weights, counted from the model's shape."""
    in_layers = sum(
        layers * copies_bytes(block, model.precision)
        for layers, block in placed_blocks(model)
        if block.copies == 1
    )
    outside = (model.embedding, *(() if model.head is None else (model.head,)))
    return (
        in_layers
        + sum(copies_bytes(block, model.precision) for block in outside)
        + _norms(model) * model.precision.bits // 8
    )


def copies_bytes(block: WeightBlock, precision: Precision) -> int:
    """Bytes of all copies of a block, whose vectors are in the model's own precision."""
    bits = block.parameters * block.format.bits + block.vectors * precision.bits
    return round(block.copies * bits / 8)


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
