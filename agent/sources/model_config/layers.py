"""The layers of a model: their kinds, and the weights and state of each kind."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from agent.catalog.architectures import ARCHITECTURES, Architecture, LayerKind, QkNorm, Recurrence
from agent.catalog.hardware import Precision
from agent.records.model import Attention, Reach, RecurrentState, WeightBlock, WeightFormat
from agent.sources.model_config.config import (
    ArchitectureUnknown,
    ModelConfigInvalid,
    TextConfig,
    entry,
    head_dim,
    kv_heads,
    needed,
)

# Older names, which transformers renames too.
_OLDER = {
    "mamba": "linear_attention",
    "attention": "full_attention",
    "deepseek_sparse_attention": "indexed_attention",
}
# The letters of Nemotron-H's pattern.
_LETTERS = {
    "M": LayerKind.LINEAR,
    "*": LayerKind.FULL,
    "-": LayerKind.MLP,
    "E": LayerKind.MOE,
}


def layer_kinds(config: TextConfig) -> tuple[LayerKind, ...]:
    """One kind for each layer. Raises ArchitectureUnknown if the row does not cover them."""
    row = ARCHITECTURES[config.architecture]
    if config.layer_types is not None:
        return _listed(config, row)
    if config.hybrid_override_pattern is not None:
        return _lettered(config, config.hybrid_override_pattern)
    if row.parts_apart:
        raise unknown(config, "it does not list its layers")
    if row.full_attention_every is None and config.use_sliding_window:
        raise unknown(config, "it does not list the layers of its sliding window")
    return tuple(_in_pattern(config, row, number) for number in range(config.num_hidden_layers))


def _listed(config: TextConfig, row: Architecture) -> tuple[LayerKind, ...]:
    names = [_OLDER.get(name, name) for name in config.layer_types or ()]
    strange = sorted(set(names) - row.kinds)
    if strange:
        raise unknown(config, f"it has layers of the type {', '.join(strange)}")
    if len(names) < config.num_hidden_layers and not row.parts_apart:
        raise ModelConfigInvalid(
            f"the config.json types {len(names)} of {config.num_hidden_layers} layers"
        )
    count = len(names) if row.parts_apart else config.num_hidden_layers
    return tuple(map(LayerKind, names[:count]))


def _lettered(config: TextConfig, pattern: str) -> tuple[LayerKind, ...]:
    strange = sorted(set(pattern) - _LETTERS.keys())
    if strange:
        raise unknown(config, f"its hybrid_override_pattern has {', '.join(strange)}")
    return tuple(_LETTERS[letter] for letter in pattern)


def _in_pattern(config: TextConfig, row: Architecture, number: int) -> LayerKind:
    if row.full_attention_every is None:
        return LayerKind.FULL
    if row.others is LayerKind.CHUNKED and config.no_rope_layers:
        chunked = entry(config, "no_rope_layers", number)
        return LayerKind.CHUNKED if chunked else LayerKind.FULL
    every = _interval(config) or row.full_attention_every
    return LayerKind.FULL if every and (number + 1) % every == 0 else row.others


def _interval(config: TextConfig) -> int | None:
    pattern = config.sliding_window_pattern
    if isinstance(pattern, str):
        raise unknown(config, f"its sliding_window_pattern is {pattern!r} and no layers are listed")
    return pattern or config.full_attention_interval or config.no_rope_layer_interval


def unknown(config: TextConfig, why: str) -> ArchitectureUnknown:
    """The error for a configuration that the row of its architecture does not cover."""
    return ArchitectureUnknown(config.architecture, why, ARCHITECTURES)


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


_STATE_BITS = {"float32": 32, "bfloat16": 16, "float16": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Heads and sizes of a recurrence: its state has heads x rows x columns values.

    `mixed` is the width that the convolution mixes, `inner` that of the heads' output.
    """

    heads: int
    rows: int
    columns: int
    mixed: int
    inner: int


def recurrent_blocks(
    config: TextConfig, recurrence: Recurrence, block: Block
) -> Iterator[WeightBlock]:
    """Every matrix of the layer's recurrence."""
    hidden, kernel = config.hidden_size, needed(config, "conv_kernel")
    if recurrence is Recurrence.DELTA_NET:
        sizes = _delta_net(config)
        # A bias and a decay for each head, and a norm of a head's size.
        others = kernel * sizes.mixed + 2 * sizes.heads + sizes.rows
        yield block("linear_attn.in_proj_qkvz", hidden, sizes.mixed + sizes.inner, others)
        yield block("linear_attn.in_proj_ba", hidden, 2 * sizes.heads)
        yield block("linear_attn.out_proj", sizes.inner, hidden)
        return
    sizes = _mamba(config)
    widest = sizes.inner + sizes.mixed + sizes.heads
    others = kernel * sizes.mixed + 3 * sizes.heads + sizes.inner
    others += sizes.mixed if config.use_conv_bias else 0
    biased = bool(config.state_projection_bias)
    yield block("mamba.in_proj", hidden, widest, others + (widest if biased else 0))
    yield block("mamba.out_proj", sizes.inner, hidden, hidden if biased else 0)


def recurrent_state(
    config: TextConfig, recurrence: Recurrence, precision: Precision
) -> RecurrentState:
    """The state of one request in one layer, and the FLOPs of a token that reads and changes it."""
    delta_net = recurrence is Recurrence.DELTA_NET
    sizes = _delta_net(config) if delta_net else _mamba(config)
    values = sizes.heads * sizes.rows * sizes.columns
    mixed = (needed(config, "conv_kernel") - 1) * sizes.mixed
    # Two FLOPs a value: the delta net reads its state by key and by query and adds to it, Mamba
    # reads its own once and adds to it.
    products = 3 if delta_net else 2
    return RecurrentState(
        bits=mixed * precision.bits + values * _state_bits(config, precision),
        flops_per_token=2 * products * values,
    )


def _state_bits(config: TextConfig, precision: Precision) -> int:
    name = config.mamba_ssm_cache_dtype
    if name is None or name == "auto":
        return precision.bits
    if name not in _STATE_BITS:
        raise ModelConfigInvalid(
            f"the state of the config.json is {name!r}; known are {', '.join(_STATE_BITS)}"
        )
    return _STATE_BITS[name]


def _delta_net(config: TextConfig) -> _Sizes:
    heads, rows = needed(config, "linear_num_value_heads"), needed(config, "linear_value_head_dim")
    keys = needed(config, "linear_num_key_heads")
    columns = needed(config, "linear_key_head_dim")
    inner = heads * rows
    return _Sizes(
        heads=heads, rows=rows, columns=columns, mixed=2 * keys * columns + inner, inner=inner
    )


def _mamba(config: TextConfig) -> _Sizes:
    heads, columns = needed(config, "mamba_num_heads"), needed(config, "ssm_state_size")
    given = config.mamba_head_dim
    expanded = (config.mamba_expand or 1) * config.hidden_size
    rows = given if isinstance(given, int) else expanded // heads
    inner = heads * rows
    return _Sizes(
        heads=heads,
        rows=rows,
        columns=columns,
        mixed=inner + 2 * needed(config, "n_groups") * columns,
        inner=inner,
    )


class FeedForward:
    """Builds the feed-forward blocks of one layer, by its number."""

    def __init__(
        self, config: TextConfig, row: Architecture, block: Block, *, plain: WeightFormat
    ) -> None:
        self._config = config
        self._row = row
        self._block = block
        self._plain = plain
        self._prefix = row.feed_forward

    def blocks(self, kind: LayerKind, number: int) -> Iterator[WeightBlock]:
        """Every matrix; layers of the kinds `mlp` and `moe` say themselves what they are."""
        if self._row.parts_apart:
            yield from self._experts() if kind is LayerKind.MOE else self._dense()
        elif self._has_experts(number):
            yield from self._experts()
        elif self._row.shared_beside_dense:
            yield from self._shared()
        else:
            yield from self._dense()

    def _has_experts(self, number: int) -> bool:
        config = self._config
        if not self._row.experts or (config.experts == 0 and self._row.without_experts):
            return False
        if config.mlp_layer_types is not None:
            return bool(entry(config, "mlp_layer_types", number) == "sparse")
        if config.moe_layers is not None:
            return number in config.moe_layers
        if number in (config.mlp_only_layers or ()) or number < self._dense_layers():
            return False
        last = config.moe_layer_end_index
        if last not in (None, -1) and number > last:
            return False
        step = 1 if config.decoder_sparse_step is None else config.decoder_sparse_step
        return step > 0 and (number + 1) % step == 0

    def _dense_layers(self) -> int:
        given = self._config.first_k_dense_replace
        return self._row.dense_layers if given is None else given

    def _dense(self) -> Iterator[WeightBlock]:
        width = self._config.dense_width or needed(self._config, "intermediate_size")
        biased = bool(self._config.mlp_bias)
        yield from self._matrices(self._prefix, self._config.hidden_size, width, biased=biased)

    def _matrices(
        self, name: str, hidden: int, width: int, *, biased: bool = False
    ) -> Iterator[WeightBlock]:
        """The matrices of one feed-forward part, with or without a gate."""
        if self._row.gated_mlp:
            yield self._block(f"{name}.gate_proj", hidden, width, width if biased else 0)
        yield self._block(f"{name}.up_proj", hidden, width, width if biased else 0)
        yield self._block(f"{name}.down_proj", width, hidden, hidden if biased else 0)

    def _experts(self) -> Iterator[WeightBlock]:
        config, row = self._config, self._row
        copies, used = self._copies_and_used()
        latent = config.moe_latent_size
        yield WeightBlock(
            name=f"{self._prefix}.gate",
            parameters=config.hidden_size * copies,
            # No method quantises routers: they are small, and errors in them cost much.
            format=self._plain,
            vectors=copies if row.router_bias or row.expert_bias else 0,
        )
        hidden = latent or config.hidden_size
        if latent is not None:
            for name, rows, columns in (
                ("fc1_latent_proj", config.hidden_size, latent),
                ("fc2_latent_proj", latent, config.hidden_size),
            ):
                bias = columns if config.mlp_bias else 0
                yield self._block(f"{self._prefix}.{name}", rows, columns, bias)
        for block in self._matrices(
            f"{self._prefix}.experts.0", hidden, self._expert_width(), biased=row.expert_bias
        ):
            yield replace(block, copies=copies, used=used)
        yield from self._shared()

    def _copies_and_used(self) -> tuple[int, int]:
        config = self._config
        copies, used = needed(config, "experts"), needed(config, "experts_per_token")
        if not 0 < used <= copies:
            raise ModelConfigInvalid(f"a token cannot use {used} of {copies} experts")
        return copies, used

    def _expert_width(self) -> int:
        return self._config.moe_intermediate_size or needed(self._config, "intermediate_size")

    def _shared(self) -> Iterator[WeightBlock]:
        """The expert that every token uses."""
        width = self._shared_width()
        hidden, biased = self._config.hidden_size, bool(self._config.mlp_bias)
        if width:
            yield from self._matrices(self._row.shared_expert, hidden, width, biased=biased)
        # Its class makes the gate of an expert of no width, too.
        if self._row.shared_gate:
            yield self._block(f"{self._row.shared_expert}_gate", self._config.hidden_size, 1)

    def _shared_width(self) -> int:
        if self._row.shared_as_wide_as_expert:
            return self._expert_width()
        if self._config.shared_width is not None:
            return self._config.shared_width
        return (self._config.shared_experts or 0) * self._expert_width()
