"""What a language model is made of, as far as its memory, its FLOPs and its bytes depend on it."""

from dataclasses import dataclass

from agent.catalog.precision import Precision


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How weights are kept. `bits` is what one weight takes, its share of scales included.

    `compute` is the precision of the products, not of the weights: weight-only quantisation
    multiplies in 16 bits.
    """

    bits: float
    compute: Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBlock:
    """Matrices that a token passes through. Experts are `copies` of which a token uses `used`.

    `parameters` are those of one copy's matrices; `vectors` are its biases and norms, which take
    memory and enter no matrix product.
    """

    name: str
    parameters: int
    format: WeightFormat
    vectors: int = 0
    copies: int = 1
    used: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The attention of one layer.

    `values_per_kv_head` is what the cache keeps of one token for each KV head: keys and values
    where there are both, or the latent of latent attention, which is one KV head for all. The FLOPs
    are those of one query token and one token of its context. `window` bounds that context.
    """

    kv_heads: int
    values_per_kv_head: int
    prefill_flops_per_pair: int
    decode_flops_per_pair: int
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers that are alike. `vectors` are the norms of one layer."""

    layers: int
    attention: Attention
    blocks: tuple[WeightBlock, ...]
    vectors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A model. `head` is None where the embedding serves as output matrix too.

    `stored_bytes` is the size of its files where that was seen. `remarks` are sentences on what the
    figures leave out or take for granted.
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
class Parallelism:
    """Over how many GPUs a model is spread. Replicas of a data-parallel engine share experts."""

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
        """How many GPUs there are in all."""
        return self.tensor * self.pipeline * self.data


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs and bytes moved. Works of several requests or steps add up."""

    flops: float
    bytes_moved: float

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.bytes_moved + other.bytes_moved)
