"""Bytes that memory must deliver: the KV cache by request, the weights by step of the engine.

A lower bound: activations are taken to stay on the chip, and weights to be read once a step.
"""

from agent.analysis.physics.coefficients import Coefficients, LayerAttention
from agent.analysis.physics.context import attended_pairs, kept
from agent.analysis.physics.parameters import placed_blocks
from agent.records.model import ModelShape, WeightBlock


def kv_bytes_per_token(model: Coefficients) -> float:
    """Bytes that the cache takes for one more token, in all layers, while no window is full."""
    return sum(part.layers * part.token_bytes for part in model.attentions)


def kv_bytes(model: Coefficients, context: int, tensor: int = 1) -> float:
    """Bytes of cache of one request on one GPU of a tensor-parallel group, over all stages."""
    return sum(
        part.layers * part.token_bytes * kept(context, part.window) * kv_share(part, tensor)
        for part in model.attentions
    )


def kv_share(part: LayerAttention, tensor: int) -> float:
    """The share of a layer's cache that each GPU of a tensor-parallel group holds.

    KV heads are divided until each GPU has one, and replicated from there on.
    """
    return -(-part.kv_heads // tensor) / part.kv_heads


def prefill_kv_bytes(model: Coefficients, new: int, cached: int = 0, tensor: int = 1) -> float:
    """Bytes of cache that a prefill in one chunk reads once and writes, over a group's GPUs."""
    return sum(
        part.layers * _group_bytes(part, tensor) * (kept(cached, part.window) + 2 * new)
        for part in model.attentions
    )


def decode_kv_bytes(model: Coefficients, prompt: int, output: int, tensor: int = 1) -> float:
    """Bytes of cache that all output tokens but the first read and write, over a group's GPUs."""
    steps = max(output - 1, 0)
    return sum(
        part.layers
        * _group_bytes(part, tensor)
        * (attended_pairs(steps, prompt, part.window) + steps)
        for part in model.attentions
    )


def _group_bytes(part: LayerAttention, tensor: int) -> float:
    """Bytes that all GPUs of a group keep of one token in one layer, replicas included."""
    return part.token_bytes * kv_share(part, tensor) * tensor


def step_weight_bytes(model: ModelShape, tokens: float) -> float:
    """Bytes of weights that one step over so many tokens reads: all matrices but unused experts."""
    head = model.head or model.embedding
    in_layers = sum(
        layers * block.parameters * block.format.bits / 8 * _expected_copies(block, tokens)
        for layers, block in placed_blocks(model)
    )
    return in_layers + head.parameters * head.format.bits / 8


def _expected_copies(block: WeightBlock, tokens: float) -> float:
    """How many different experts so many tokens use, if each chooses freely."""
    if block.copies == 1:
        return 1.0
    unused: float = (1 - block.used / block.copies) ** tokens
    return block.copies * (1 - unused)
