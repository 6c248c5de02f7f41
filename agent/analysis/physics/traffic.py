"""Bytes that memory must move: KV cache by request, weights by step of the engine.

A lower bound: activations stay on the chip, and a step reads each weight once.
"""

from agent.analysis.physics.coefficients import Coefficients, LayerAttention
from agent.analysis.physics.context import attended_pairs, cached_tokens
from agent.analysis.physics.parameters import placed_blocks
from agent.records.model import ModelShape, WeightBlock, Work


def kv_bytes_per_token(model: Coefficients) -> float:
    """Bytes of KV cache of one more token in all layers, while no sliding window is full."""
    return sum(part.layers * part.token_bytes for part in model.attentions)


def kv_bytes(model: Coefficients, context: int, tensor: int = 1) -> float:
    """Bytes of KV cache of one request on one GPU of a tensor-parallel group, over all stages.

    With the states of recurrent layers, whose heads are divided.
    """
    cache = sum(
        part.layers
        * part.token_bytes
        * cached_tokens(context, part.window, part.reach)
        * kv_share(part, tensor)
        for part in model.attentions
    )
    return cache + model.state_bytes / tensor


def kv_share(part: LayerAttention, tensor: int) -> float:
    """The share of a layer's cache that each GPU of a tensor-parallel group holds.

    KV heads are divided until each GPU has one. With more GPUs they are replicated.
    """
    return -(-part.kv_heads // tensor) / part.kv_heads


def prefill_kv_bytes(model: Coefficients, new: int, cached: int = 0, tensor: int = 1) -> float:
    """Bytes of KV cache that a prefill in one chunk reads and writes, over a group's GPUs.

    States are read after a prefix, and written at the end.
    """
    cache = sum(
        part.layers
        * _group_bytes(part, tensor)
        * (cached_tokens(cached, part.window, part.reach) + 2 * new)
        for part in model.attentions
    )
    return cache + model.state_bytes * ((1 if cached else 0) + (1 if new else 0))


def decode_kv_bytes(model: Coefficients, prompt: int, output: int, tensor: int = 1) -> float:
    """Bytes of KV cache that decode reads and writes, over a group's GPUs.

    Decode computes all output tokens but the first. Each reads and writes the states.
    """
    steps = max(output - 1, 0)
    cache = sum(
        part.layers
        * _group_bytes(part, tensor)
        * (attended_pairs(steps, prompt, part.window, part.reach) + steps)
        for part in model.attentions
    )
    return cache + 2 * steps * model.state_bytes


def _group_bytes(part: LayerAttention, tensor: int) -> float:
    """Bytes that all GPUs of a group store of one token in one layer, replicas included."""
    return part.token_bytes * kv_share(part, tensor) * tensor


def step_weight_bytes(model: ModelShape, tokens: float) -> float:
    """Bytes of weights that a step of `tokens` reads: all but those of unused experts."""
    head = model.head or model.embedding
    in_layers = sum(
        layers * block.parameters * block.format.bits / 8 * _expected_copies(block, tokens)
        for layers, block in placed_blocks(model)
    )
    return in_layers + head.parameters * head.format.bits / 8


def expert_work(model: ModelShape, tokens: int) -> Work:
    """The work of the experts in a step of `tokens`."""
    parameters = sum(
        layers * block.used * block.parameters
        for layers, block in placed_blocks(model)
        if block.copies > 1
    )
    weights = step_weight_bytes(model, tokens) - step_weight_bytes(model, 0)
    return Work(2 * parameters * tokens, weights)


def _expected_copies(block: WeightBlock, tokens: float) -> float:
    """How many different experts `tokens` use, if each token chooses at random."""
    if block.copies == 1:
        return 1.0
    unused: float = (1 - block.used / block.copies) ** tokens
    return block.copies * (1 - unused)
