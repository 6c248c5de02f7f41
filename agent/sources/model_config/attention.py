"""The attention of a layer: the sizes of its matrices, of its cache and of its products."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from agent.catalog.architectures import Architecture, LayerKind, QkNorm
from agent.records.model import Attention, Reach, WeightBlock
from agent.sources.model_config.config import TextConfig
from agent.sources.model_config.needed import head_dim, kv_heads, needed

Block = Callable[..., WeightBlock]

# Engines cache the keys of the selection in 8 bits, with a 32-bit scale for 128 of them.
_INDEX_BITS = 8 + 32 / 128


def attention_blocks(
    config: TextConfig, row: Architecture, kind: LayerKind, block: Block
) -> Iterator[WeightBlock]:
    """Every matrix of the attention; `block` makes one of its name and size."""
    if row.latent_attention:
        yield from _latent_blocks(config, block)
    else:
        yield from _grouped_blocks(config, row, block)
    if kind is LayerKind.INDEXED:
        yield from _index_blocks(config, block)


def attentions(config: TextConfig, row: Architecture, kind: LayerKind) -> Iterator[Attention]:
    """What the layer attends to, and what it caches."""
    if not row.latent_attention:
        yield _grouped(config, kind)
    elif kind is LayerKind.INDEXED:
        yield _selected(config)
        yield _index(config)
    else:
        yield _latent(config)


def _grouped_blocks(config: TextConfig, row: Architecture, block: Block) -> Iterator[WeightBlock]:
    hidden, size = config.hidden_size, head_dim(config)
    query, key = config.num_attention_heads * size, kv_heads(config) * size
    of_query, of_key = _norms(config, row, query, key)
    sinks = config.num_attention_heads if row.sinks else 0
    for name, rows, columns, other in (
        ("q", hidden, 2 * query if row.gated_query else query, of_query + sinks),
        ("k", hidden, key, of_key),
        ("v", hidden, key, 0),
        ("o", query, hidden, 0),
    ):
        bias = columns if _has_bias(config, row, name) else 0
        yield block(f"self_attn.{name}_proj", rows, columns, bias + other)


def _norms(config: TextConfig, row: Architecture, query: int, key: int) -> tuple[int, int]:
    """The weights of the norms of queries and of keys."""
    if config.use_qk_norm is False or row.qk_norm is QkNorm.NONE:
        return 0, 0
    return (query, key) if row.qk_norm is QkNorm.WIDTH else (head_dim(config), head_dim(config))


def _has_bias(config: TextConfig, row: Architecture, matrix: str) -> bool:
    if matrix == "o" and config.attention_out_bias is not None:
        return config.attention_out_bias
    configured = config.attention_bias
    biased = row.attention_bias if configured is None else configured
    return biased and matrix in row.biased


def _grouped(config: TextConfig, kind: LayerKind) -> Attention:
    # Products with the keys and with the values, two FLOPs each.
    pair = 4 * config.num_attention_heads * head_dim(config)
    window = {
        LayerKind.SLIDING: config.sliding_window,
        LayerKind.CHUNKED: config.attention_chunk_size,
    }.get(kind)
    return Attention(
        kv_heads=kv_heads(config),
        values_per_kv_head=2 * head_dim(config),
        prefill_flops_per_pair=pair,
        decode_flops_per_pair=pair,
        window=window or None,
        reach=Reach.CHUNK if kind is LayerKind.CHUNKED else Reach.WINDOW,
    )


def _latent_blocks(config: TextConfig, block: Block) -> Iterator[WeightBlock]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    rank, rope = needed(config, "kv_lora_rank"), needed(config, "qk_rope_head_dim")
    nope, value = needed(config, "qk_nope_head_dim"), needed(config, "v_head_dim")
    biased, query_rank = bool(config.attention_bias), config.q_lora_rank
    query = heads * (nope + rope)
    if query_rank is None:
        yield block("self_attn.q_proj", hidden, query)
    else:
        bias = query_rank if biased else 0
        yield block("self_attn.q_a_proj", hidden, query_rank, query_rank + bias)
        yield block("self_attn.q_b_proj", query_rank, query)
    bias = rank + rope if biased else 0
    yield block("self_attn.kv_a_proj_with_mqa", hidden, rank + rope, rank + bias)
    yield block("self_attn.kv_b_proj", rank, heads * (nope + value))
    yield block("self_attn.o_proj", heads * value, hidden, hidden if biased else 0)


def _latent(config: TextConfig) -> Attention:
    heads = config.num_attention_heads
    rank, rope = needed(config, "kv_lora_rank"), needed(config, "qk_rope_head_dim")
    nope, value = needed(config, "qk_nope_head_dim"), needed(config, "v_head_dim")
    return Attention(
        kv_heads=1,
        values_per_kv_head=rank + rope,
        prefill_flops_per_pair=2 * heads * (nope + rope + value),
        # Engines cache the latent alone, and a prefill attends to keys and values.
        expand_flops=2 * rank * heads * (nope + value),
        # Its matrices are absorbed into query and output.
        decode_flops_per_pair=2 * heads * ((rank + rope) + rank),
    )


def _selected(config: TextConfig) -> Attention:
    """Latent attention to the tokens that the index selects."""
    return replace(_latent(config), window=needed(config, "index_topk"), reach=Reach.SELECTION)


def _index(config: TextConfig) -> Attention:
    """The scores by which tokens are selected: one key for each token, cached in 8 bits."""
    size = needed(config, "index_head_dim")
    pair = 2 * needed(config, "index_n_heads") * size
    return Attention(
        kv_heads=1,
        values_per_kv_head=size,
        value_bits=_INDEX_BITS,
        prefill_flops_per_pair=pair,
        decode_flops_per_pair=pair,
    )


def _index_blocks(config: TextConfig, block: Block) -> Iterator[WeightBlock]:
    heads, size = needed(config, "index_n_heads"), needed(config, "index_head_dim")
    yield block("self_attn.indexer.wq_b", needed(config, "q_lora_rank"), heads * size)
    # The norm of the keys has a bias.
    yield block("self_attn.indexer.wk", config.hidden_size, size, 2 * size)
    yield block("self_attn.indexer.weights_proj", config.hidden_size, heads)
