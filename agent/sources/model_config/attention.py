"""The attention of a layer: its matrices, what it attends to and what it caches."""

from collections.abc import Iterator
from dataclasses import replace

from agent.catalog.architectures import Architecture, AttentionType, LayerKind, OutputGate, QkNorm
from agent.records.model import Attention, Reach, WeightBlock
from agent.sources.model_config.config import Block, TextConfig, head_dim, kv_heads, needed

# Layers with the keys and values of an earlier one.
REUSING = frozenset({LayerKind.REUSING, LayerKind.REUSING_SLIDING})

# Engines cache the keys of the selection in 8 bits, with a 32-bit scale for 128 of them.
INDEX_BITS = 8 + 32 / 128


def attention_blocks(
    config: TextConfig, row: Architecture, kind: LayerKind, block: Block
) -> Iterator[WeightBlock]:
    """Every matrix of the attention; `block` makes one of its name and size."""
    if row.attention is AttentionType.LATENT:
        yield from _latent_blocks(config, row, kind, block)
    else:
        yield from _grouped_blocks(config, row, kind, block)
    if kind is LayerKind.INDEXED:
        yield from _index_blocks(config, row, block)


def attentions(config: TextConfig, row: Architecture, kind: LayerKind) -> Iterator[Attention]:
    """What the layer attends to, and what it caches."""
    latent = row.attention is AttentionType.LATENT
    attention = _latent(config) if latent else _grouped(config, row, kind)
    if kind in (LayerKind.INDEXED, LayerKind.SELECTED):
        attention = replace(attention, window=_selected(config), reach=Reach.SELECTION)
    yield attention
    if kind is LayerKind.INDEXED:
        yield _index(config, row)


def _value_dim(config: TextConfig, row: Architecture) -> int:
    return needed(config, "v_head_dim") if row.value_size else head_dim(config)


def _grouped_blocks(
    config: TextConfig, row: Architecture, kind: LayerKind, block: Block
) -> Iterator[WeightBlock]:
    for name, rows, columns, other in _grouped_matrices(config, row, kind):
        bias = columns if _has_bias(config, row, name) else 0
        yield block(f"self_attn.{name}_proj", rows, columns, bias + other)


def _grouped_matrices(
    config: TextConfig, row: Architecture, kind: LayerKind
) -> Iterator[tuple[str, int, int, int]]:
    """(name, rows, columns, values of norms and sinks) of each matrix."""
    hidden, size, value_size = config.hidden_size, head_dim(config), _value_dim(config, row)
    heads, caching = config.num_attention_heads, kv_heads(config)
    of_query, of_key = _norms(config, row, kind, heads * size, caching * size)
    sinks = heads if kind in row.sinks else 0
    gated = heads * size if row.output_gate is OutputGate.IN_QUERY else 0
    yield "q", hidden, heads * size + gated, of_query + sinks
    if kind not in REUSING:
        yield "k", hidden, caching * size, of_key
        if not (config.attention_k_eq_v and kind is LayerKind.FULL):
            yield "v", hidden, caching * value_size, 0
    yield "o", heads * value_size, hidden, 0
    if row.output_gate is OutputGate.HEAD:
        yield "g", hidden, heads, 0
    elif row.output_gate is OutputGate.WIDTH:
        yield "gate", hidden, heads * value_size, 0


def _norms(
    config: TextConfig, row: Architecture, kind: LayerKind, query: int, key: int
) -> tuple[int, int]:
    if kind is LayerKind.CROSS:
        return head_dim(config), head_dim(config)
    if config.use_qk_norm is False or row.qk_norm is QkNorm.NONE:
        return 0, 0
    return (query, key) if row.qk_norm is QkNorm.WIDTH else (head_dim(config), head_dim(config))


def _has_bias(config: TextConfig, row: Architecture, matrix: str) -> bool:
    if matrix == "o" and config.attention_out_bias is not None:
        return config.attention_out_bias
    configured = config.attention_bias
    biased = row.attention_bias if configured is None else configured
    return biased and matrix in row.biased


def _grouped(config: TextConfig, row: Architecture, kind: LayerKind) -> Attention:
    size, value_size = head_dim(config), _value_dim(config, row)
    # Products with the keys and with the values, two FLOPs each.
    pair = 2 * config.num_attention_heads * (size + value_size)
    window = {
        LayerKind.SLIDING: config.sliding_window,
        LayerKind.REUSING_SLIDING: config.sliding_window,
        LayerKind.CHUNKED: config.attention_chunk_size,
    }.get(kind)
    return Attention(
        kv_heads=kv_heads(config),
        values_per_kv_head=size + value_size,
        prefill_flops_per_pair=pair,
        decode_flops_per_pair=pair,
        window=window or None,
        reach=Reach.CHUNK if kind is LayerKind.CHUNKED else Reach.WINDOW,
        stores=kind not in REUSING,
    )


def _latent_blocks(
    config: TextConfig, row: Architecture, kind: LayerKind, block: Block
) -> Iterator[WeightBlock]:
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
    sinks = heads if kind in row.sinks else 0
    yield block("self_attn.o_proj", heads * value, hidden, (hidden if biased else 0) + sinks)
    if row.output_gate is OutputGate.WIDTH:
        yield block("self_attn.gate_proj", hidden, heads * value)
    if config.mla_use_output_gate:
        yield block("self_attn.g_proj", hidden, heads * value)


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


def _selected(config: TextConfig) -> int:
    """The number of tokens that a query attends to at most."""
    if config.index_topk_blocks is not None:
        return config.index_topk_blocks * needed(config, "index_block_size")
    return needed(config, "index_topk")


def _index(config: TextConfig, row: Architecture) -> Attention:
    """The scores by which tokens are selected: one key for each token."""
    size = needed(config, "index_head_dim")
    pair = 2 * needed(config, "index_n_heads") * size
    return Attention(
        kv_heads=1,
        values_per_kv_head=size,
        value_bits=INDEX_BITS if row.attention is AttentionType.LATENT else None,
        prefill_flops_per_pair=pair,
        decode_flops_per_pair=pair,
    )


def _index_blocks(config: TextConfig, row: Architecture, block: Block) -> Iterator[WeightBlock]:
    heads, size = needed(config, "index_n_heads"), needed(config, "index_head_dim")
    if row.attention is not AttentionType.LATENT:
        # Each has a norm.
        yield block("self_attn.index_q_proj", config.hidden_size, heads * size, size)
        yield block("self_attn.index_k_proj", config.hidden_size, size, size)
        return
    yield block("self_attn.indexer.wq_b", needed(config, "q_lora_rank"), heads * size)
    # The norm of the keys has a bias.
    yield block("self_attn.indexer.wk", config.hidden_size, size, 2 * size)
    yield block("self_attn.indexer.weights_proj", config.hidden_size, heads)
