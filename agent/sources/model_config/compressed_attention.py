"""The attention of DeepSeek-V4: a window of tokens, and a compressed cache of all earlier ones.

Keys are the values too: one vector for each token of the window, and one for each `rate` tokens of
the compressed cache. The last are divided by the rate here, so that formulas count them by token.
"""

from collections.abc import Iterator

from agent.catalog.architectures import LayerKind
from agent.records.model import Attention, Reach, WeightBlock
from agent.sources.model_config.attention import INDEX_BITS
from agent.sources.model_config.config import (
    Block,
    ModelConfigInvalid,
    TextConfig,
    head_dim,
    needed,
)

# 448 values in 8 bits with 8 bytes of scales, and 64 rotated ones in 16 bits: 584 bytes for 512
# values in vLLM and SGLang, also if the engine was asked for no cache type.
_CACHE_BITS = 584 * 8 / 512


def compressed_blocks(config: TextConfig, kind: LayerKind, block: Block) -> Iterator[WeightBlock]:
    """Every matrix of the attention."""
    hidden, size, rank = config.hidden_size, head_dim(config), needed(config, "q_lora_rank")
    groups, heads = needed(config, "o_groups"), config.num_attention_heads
    grouped = groups * needed(config, "o_lora_rank")
    yield block("self_attn.wq_a", hidden, rank, rank)
    # A sink for each head.
    yield block("self_attn.wq_b", rank, heads * size, heads)
    yield block("self_attn.wkv", hidden, size, size)
    yield block("self_attn.wo_a", heads * size // groups, grouped)
    yield block("self_attn.wo_b", grouped, hidden)
    if kind is LayerKind.SLIDING:
        return
    yield from _compressor("compressor", config, kind, size, block)
    if kind is LayerKind.COMPRESSED_SPARSE:
        index_heads = needed(config, "index_n_heads")
        index_size = needed(config, "index_head_dim")
        yield from _compressor("indexer.compressor", config, kind, index_size, block)
        yield block("self_attn.indexer.wq_b", rank, index_heads * index_size)
        yield block("self_attn.indexer.weights_proj", hidden, index_heads)


def _compressor(
    name: str, config: TextConfig, kind: LayerKind, size: int, block: Block
) -> Iterator[WeightBlock]:
    # Entries of the sparse cache overlap, and have two halves.
    width = 2 * size if kind is LayerKind.COMPRESSED_SPARSE else size
    # A norm, and a bias for each position within an entry.
    others = size + _rate(config, kind) * width
    yield block(f"self_attn.{name}.wkv", config.hidden_size, width, others)
    yield block(f"self_attn.{name}.wgate", config.hidden_size, width)


def compressed_attentions(config: TextConfig, kind: LayerKind) -> Iterator[Attention]:
    """What the layer attends to, and what it caches."""
    size, heads = head_dim(config), config.num_attention_heads
    pair = 4 * heads * size
    yield _attention(size, pair, 1, window=needed(config, "sliding_window"), reach=Reach.WINDOW)
    if kind is LayerKind.SLIDING:
        return
    rate, selected = _rate(config, kind), None
    if kind is LayerKind.COMPRESSED_SPARSE:
        selected = rate * needed(config, "index_topk")
        index_size = needed(config, "index_head_dim")
        scores = 2 * needed(config, "index_n_heads") * index_size
        yield _attention(index_size, scores, rate, bits=INDEX_BITS)
    reach = Reach.WINDOW if selected is None else Reach.SELECTION
    yield _attention(size, pair, rate, window=selected, reach=reach)


def _attention(
    size: int,
    pair: int,
    rate: int,
    *,
    window: int | None = None,
    reach: Reach = Reach.WINDOW,
    bits: float = _CACHE_BITS,
) -> Attention:
    if size % rate or pair % rate:
        raise ModelConfigInvalid(f"a cache of {size} values is not divisible by the rate {rate}")
    return Attention(
        kv_heads=1,
        values_per_kv_head=size // rate,
        value_bits=bits,
        prefill_flops_per_pair=pair // rate,
        decode_flops_per_pair=pair // rate,
        window=window,
        reach=reach,
    )


def _rate(config: TextConfig, kind: LayerKind) -> int:
    sparse = kind is LayerKind.COMPRESSED_SPARSE
    return needed(config, "compressed_sparse_rate" if sparse else "heavily_compressed_rate")
