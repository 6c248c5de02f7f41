"""FLOPs of prefill and decode, and the bytes that memory must hold and move.

FLOPs are exact for what a model must compute. They add up over requests and over the chunks of a
prefill, but for latent attention: each chunk expands the latents of all tokens before it again
(`kv_b_proj`), and those of a selection only while all tokens fit in it. Norms, activations, softmax
and the lookup in the input embedding are left out: far below 1 %.

Bytes are a lower bound: activations stay on the chip, and a step reads each weight once.
"""

from math import floor

from agent.analysis.physics.coefficients import (
    Coefficients,
    LayerAttention,
    attended_pairs,
    cached_tokens,
    expert_bytes,
    placed_blocks,
    shared_weight_bytes,
    weight_bytes,
)
from agent.records.model import ModelShape, Parallelism, Reach, WeightBlock, Work


def chunk_flops(model: Coefficients, new: int, cached: int = 0) -> int:
    """FLOPs of `new` prompt tokens after `cached` ones, without the output matrix."""
    if new == 0:
        return 0
    scores = sum(part.layers * _score_flops(part, new, cached) for part in model.attentions)
    return (2 * model.linear_parameters + model.state_flops) * new + scores


def _score_flops(part: LayerAttention, new: int, cached: int) -> int:
    """FLOPs of the scores of one layer.

    With sparse attention, engines gather the latents of the selected tokens and attend to these, as
    in decode. While the selection holds all tokens, a prefill expands the latents instead
    (`sparse_mla_attention.py` of vLLM 0.32).
    """
    pairs = attended_pairs(new, cached, part.window, part.reach)
    selected = part.window if part.reach is Reach.SELECTION else None
    if selected is not None and cached + new > selected:
        return part.decode_flops_per_pair * pairs
    return part.prefill_flops_per_pair * pairs + part.expand_flops * cached


def prefill_flops(model: Coefficients, prompt: int, cached: int = 0) -> int:
    """FLOPs from a prompt to its first output token, without its first `cached` tokens."""
    return chunk_flops(model, prompt - cached, cached) + 2 * model.head_parameters


def decode_flops(model: Coefficients, prompt: int, output: int) -> int:
    """FLOPs of all output tokens but the first, which prefill computes."""
    steps = max(output - 1, 0)
    scores = sum(
        part.layers
        * part.decode_flops_per_pair
        * attended_pairs(steps, prompt, part.window, part.reach)
        for part in model.attentions
    )
    parameters = model.linear_parameters + model.head_parameters
    return (2 * parameters + model.state_flops) * steps + scores


def decode_token_flops(model: Coefficients, context: int) -> int:
    """FLOPs of one output token whose context, itself included, is this long."""
    return decode_flops(model, context - 1, 2)


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


def gpu_weight_bytes(model: ModelShape, parallelism: Parallelism) -> float:
    """Bytes of weights on one GPU, with pipeline stages of equal size.

    Tensor and pipeline parallelism divide all weights, data parallelism only the experts.
    """
    divided = parallelism.tensor * parallelism.pipeline
    shared, experts = shared_weight_bytes(model), expert_bytes(model)
    # The files give the true sum, the shape the experts' part of it.
    scale = weight_bytes(model) / (shared + experts)
    return scale * (shared + experts / parallelism.data) / divided


def requests_that_fit(
    model: Coefficients, context: int, parallelism: Parallelism, *, cache_bytes: float
) -> int:
    """How many requests of this length fit on all replicas; `cache_bytes` are those of one GPU."""
    per_request = kv_bytes(model, context, parallelism.tensor) / parallelism.pipeline
    return parallelism.data * floor(max(cache_bytes, 0.0) / per_request)
