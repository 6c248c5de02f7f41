"""FLOPs and bytes of a model's work, and the roofline of GPUs.

The formulas are those of vLLM's estimator (vllm/v1/metrics/perf.py, 0.33) with three changes:
causal scores, expected instead of possible experts, and KV heads as they are replicated.

FLOPs are exact for what a model must compute. They add up over requests and over the chunks of a
prefill, but for latent attention: each chunk expands the latents of all tokens before it again
(`kv_b_proj`), and those of a selection only while all tokens fit in it. Norms, activations, softmax
and the lookup in the input embedding are left out: far below 1 %.

Bytes are a lower bound: activations stay on the chip, and a step reads each weight once.

Roofline: Williams, Waterman and Patterson, "Roofline", CACM 52(4), 2009.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import floor

from agent.catalog.hardware import Precision
from agent.records.model import (
    Attention,
    ModelShape,
    Parallelism,
    Reach,
    RecurrentState,
    WeightBlock,
    Work,
)


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
    stores: bool = True


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
        stores=attention.stores,
    )


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
    return sum(part.layers * part.token_bytes for part in model.attentions if part.stores)


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
        if part.stores
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
        * (cached_tokens(cached, part.window, part.reach) + (2 if part.stores else 1) * new)
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
        * (attended_pairs(steps, prompt, part.window, part.reach) + steps * part.stores)
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
    if block.copies == block.used:
        return float(block.copies)
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


class Bound(StrEnum):
    """What limits some work: a roof of the GPU, or the memory that caps the batch."""

    COMPUTE = "compute-bound"
    BANDWIDTH = "bandwidth-bound"
    CAPACITY = "memory-capacity-bound"


# What to do about each bound, best first.
ACTIONS = {
    Bound.COMPUTE: (
        "quantise weights and activations to FP8, if the GPU has it",
        "serve repeated prefixes from the prefix cache",
        "spread the model over more GPUs, or add replicas",
    ),
    Bound.BANDWIDTH: (
        "run more requests at once: raise the limit on running sequences",
        "quantise the weights, and the KV cache for long contexts",
        "decode speculatively while few requests run",
    ),
    Bound.CAPACITY: (
        "keep the KV cache in FP8",
        "quantise the weights, which leaves more room for cache",
        "spread the model over more GPUs, or take GPUs with more memory",
        "lower the longest context that is allowed",
    ),
}


@dataclass(frozen=True, slots=True)
class Roof:
    """Peak and bandwidth of all GPUs that share the work."""

    flops_per_s: float
    bytes_per_s: float

    @property
    def ridge(self) -> float:
        """FLOPs per byte; work of a higher intensity is compute-bound."""
        return self.flops_per_s / self.bytes_per_s

    def attainable_flops_per_s(self, intensity: float) -> float:
        """The highest FLOP/s that work of this intensity can reach."""
        return min(self.flops_per_s, intensity * self.bytes_per_s)

    def seconds(self, work: Work) -> float:
        """The least time of the work, with computing and moving at the same time."""
        return max(work.flops / self.flops_per_s, work.bytes_moved / self.bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflinePosition:
    """Intensity of some work (FLOPs per byte), its FLOP/s, and the FLOP/s that it allows."""

    intensity: float
    ridge: float
    achieved_flops_per_s: float
    attainable_flops_per_s: float

    @property
    def share(self) -> float:
        """Achieved over attainable FLOP/s. Far below 1, something other than the GPU waits."""
        return self.achieved_flops_per_s / self.attainable_flops_per_s


def intensity(work: Work) -> float | None:
    """FLOPs per byte; None if nothing was moved."""
    return work.flops / work.bytes_moved if work.bytes_moved > 0 else None


def position(work: Work, seconds: float, roof: Roof) -> RooflinePosition | None:
    """The position of work that took `seconds`; None without time or work."""
    found = intensity(work)
    if not found or seconds <= 0:
        return None
    return RooflinePosition(
        intensity=found,
        ridge=roof.ridge,
        achieved_flops_per_s=work.flops / seconds,
        attainable_flops_per_s=roof.attainable_flops_per_s(found),
    )


def bound(work: Work, roof: Roof, *, cache_full: bool = False) -> Bound | None:
    """What bounds the work; None if it moved nothing.

    Below the ridge a larger batch would help. With a full KV cache no more requests can run, so
    memory capacity is the bound and not bandwidth.
    """
    found = intensity(work)
    if found is None:
        return None
    if found >= roof.ridge:
        return Bound.COMPUTE
    return Bound.CAPACITY if cache_full else Bound.BANDWIDTH
