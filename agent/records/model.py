"""The shape of a language model, as needed for its memory, FLOPs and bytes."""

from dataclasses import dataclass
from enum import StrEnum

from agent.catalog.hardware import Precision


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """The stored form of weights. `bits` is the size of one weight with its share of scales.

    `compute` is the precision of the products, not of the weights: weight-only quantisation
    multiplies in 16 bits.
    """

    bits: float
    compute: Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBlock:
    """Matrices that a token passes through. Experts are `copies`; a token uses `used` of them.
    Tables that a token looks up, and layers that text skips, have `used` 0.

    `parameters` counts one copy's matrices. `vectors` counts its biases and norms, which need
    memory and take part in no matrix product.
    """

    name: str
    parameters: int
    format: WeightFormat
    vectors: int = 0
    copies: int = 1
    used: int = 1


class Reach(StrEnum):
    """What a window limits: the last tokens, those of the same chunk, or those that are selected.

    Of a selection all tokens stay in the cache.
    """

    WINDOW = "window"
    CHUNK = "chunk"
    SELECTION = "selection"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The attention of one layer.

    `values_per_kv_head` is the cache size of one token per KV head, in values: keys and values, or
    the latent of latent attention, which has one KV head. FLOPs are for one query token and one
    context token. `expand_flops` are those of a prefill for each token that was cached before it.
    A prefill longer than a selection takes the FLOPs of decode, and expands nothing.
    `window` limits the context, as `reach` says. `value_bits` is the size of a cached value, None
    if it is the model's. A layer that `stores` nothing reads what an earlier one stored.
    """

    kv_heads: int
    values_per_kv_head: int
    prefill_flops_per_pair: int
    decode_flops_per_pair: int
    expand_flops: int = 0
    window: int | None = None
    reach: Reach = Reach.WINDOW
    value_bits: float | None = None
    stores: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentState:
    """What one layer stores of a request, however long it is, and the FLOPs of a token with it."""

    bits: int
    flops_per_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Equal layers, with any number of attentions. `vectors` counts the norms of one layer."""

    layers: int
    attentions: tuple[Attention, ...]
    blocks: tuple[WeightBlock, ...]
    vectors: int
    state: RecurrentState | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A model. `head` is None if the embedding is also the output matrix.

    `stored_bytes` is the size of its files, if known. `remarks` are sentences about what the
    figures leave out or assume.
    """

    architecture: str
    embedding: WeightBlock
    head: WeightBlock | None
    groups: tuple[LayerGroup, ...]
    vectors: int
    precision: Precision
    compute: Precision
    cache_bits: float
    max_context: int | None = None
    stored_bytes: int | None = None
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """What the files of a model tell if its architecture is unknown.

    `parameters` are those of its text part, None if weights are packed. `step_bytes` are those that
    a step reads, None if they depend on the experts that tokens choose, or on sizes that are
    unknown. `why_unknown` says why, and `remarks` what the figures leave out.
    """

    architecture: str
    stored_bytes: int
    parameters: int | None = None
    step_bytes: int | None = None
    why_unknown: str | None = None
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """How a model is split over GPUs. Replicas of a data-parallel engine share experts."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1

    def __post_init__(self) -> None:
        for name, ways in (("tensor", self.tensor), ("pipeline", self.pipeline)):
            if ways < 1:
                raise ValueError(f"{name} parallelism is {ways}; it is 1 or more")
        if self.data < 1:
            raise ValueError(f"data parallelism is {self.data}; it is 1 or more")

    @property
    def gpus(self) -> int:
        """The number of GPUs."""
        return self.tensor * self.pipeline * self.data


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs and bytes moved, which add up over requests or steps."""

    flops: float
    bytes_moved: float

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.bytes_moved + other.bytes_moved)
