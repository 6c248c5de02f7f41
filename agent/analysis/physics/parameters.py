"""Counts a model's parameters and their bytes."""

from collections.abc import Iterator

from agent.catalog.hardware import Precision
from agent.records.model import ModelShape, WeightBlock


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
    """Bytes of all weights: the size of the model's files where it is known, else counted."""
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
