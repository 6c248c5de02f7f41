"""Layers with a state: their matrices, and the state of one request."""

from collections.abc import Iterator
from dataclasses import dataclass

from agent.catalog.architectures import Recurrence
from agent.catalog.hardware import Precision
from agent.records.model import RecurrentState, WeightBlock
from agent.sources.model_config.config import (
    Block,
    ModelConfigInvalid,
    TextConfig,
    head_dim,
    needed,
)

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
    of_kind = _OF_KIND.get(recurrence)
    if of_kind is not None:
        yield from of_kind(config, block)
        return
    hidden, kernel = config.hidden_size, needed(config, "conv_kernel")
    if recurrence in (Recurrence.DELTA_NET, Recurrence.DELTA_NET_APART):
        sizes = _delta_net(config)
        # A bias and a decay for each head, and a norm of a head's size.
        others = kernel * sizes.mixed + 2 * sizes.heads + sizes.rows
        if recurrence is Recurrence.DELTA_NET:
            yield block("linear_attn.in_proj_qkvz", hidden, sizes.mixed + sizes.inner, others)
            yield block("linear_attn.in_proj_ba", hidden, 2 * sizes.heads)
        else:
            yield block("linear_attn.in_proj_qkv", hidden, sizes.mixed, others)
            yield block("linear_attn.in_proj_z", hidden, sizes.inner)
            yield block("linear_attn.in_proj_b", hidden, sizes.heads)
            yield block("linear_attn.in_proj_a", hidden, sizes.heads)
        yield block("linear_attn.out_proj", sizes.inner, hidden)
        return
    sizes = _mamba(config)
    widest = sizes.inner + sizes.mixed + sizes.heads
    others = kernel * sizes.mixed + 3 * sizes.heads
    others += 0 if config.mamba_rms_norm is False else sizes.inner
    others += sizes.mixed if config.use_conv_bias else 0
    biased = bool(config.state_projection_bias)
    yield block("mamba.in_proj", hidden, widest, others + (widest if biased else 0))
    yield block("mamba.out_proj", sizes.inner, hidden, hidden if biased else 0)


def recurrent_state(
    config: TextConfig, recurrence: Recurrence, precision: Precision
) -> RecurrentState:
    """The state of one request in one layer, and the FLOPs of a token that reads and changes it."""
    sizes = _sizes(config, recurrence)
    values = sizes.heads * sizes.rows * sizes.columns
    mixed = (needed(config, "conv_kernel") - 1) * sizes.mixed if sizes.mixed else 0
    # Two FLOPs a value: the delta net reads its state by key and by query and adds to it, the
    # others read their own once and add to it.
    products = 3 if recurrence in _DELTA else 2
    return RecurrentState(
        bits=mixed * precision.bits + values * _state_bits(config, recurrence, precision),
        flops_per_token=2 * products * values,
    )


_DELTA = frozenset({Recurrence.DELTA_NET, Recurrence.DELTA_NET_APART, Recurrence.KIMI_DELTA})


def _sizes(config: TextConfig, recurrence: Recurrence) -> _Sizes:
    return _SIZES[recurrence](config)


def _state_bits(config: TextConfig, recurrence: Recurrence, precision: Precision) -> int:
    name = config.mamba_ssm_cache_dtype
    if name is None or name == "auto":
        # Engines keep Kimi's in 32 bits.
        return 32 if recurrence is Recurrence.KIMI_DELTA else precision.bits
    if name not in _STATE_BITS:
        raise ModelConfigInvalid(
            f"the state of the config.json is {name!r}; known are {', '.join(_STATE_BITS)}"
        )
    return _STATE_BITS[name]


def _kimi_blocks(config: TextConfig, block: Block) -> Iterator[WeightBlock]:
    """The matrices of Kimi Delta Attention, whose gates are products of two or full ones."""
    hidden, sizes = config.hidden_size, _kimi_delta(config)
    inner, size = sizes.inner, sizes.rows
    # A bias for each channel, a decay for each head, and a norm of a head's size.
    others = needed(config, "conv_kernel") * sizes.mixed + inner + sizes.heads + size
    yield block("self_attn.q_proj", hidden, inner, others)
    for name in ("k", "v"):
        yield block(f"self_attn.{name}_proj", hidden, inner)
    yield block("self_attn.b_proj", hidden, sizes.heads)
    for name in ("f",) if config.use_full_rank_gate else ("f", "g"):
        yield block(f"self_attn.{name}_a_proj", hidden, size)
        yield block(f"self_attn.{name}_b_proj", size, inner)
    if config.use_full_rank_gate:
        yield block("self_attn.g_proj", hidden, inner)
    yield block("self_attn.o_proj", inner, hidden)


def _kimi_delta(config: TextConfig) -> _Sizes:
    heads, size = needed(config, "linear_num_heads"), needed(config, "linear_head_dim")
    inner = heads * size
    return _Sizes(heads=heads, rows=size, columns=size, mixed=3 * inner, inner=inner)


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
    expanded = config.mamba_d_ssm or (config.mamba_expand or 1) * config.hidden_size
    rows = given if isinstance(given, int) else expanded // heads
    inner = heads * rows
    return _Sizes(
        heads=heads,
        rows=rows,
        columns=columns,
        mixed=inner + 2 * needed(config, "n_groups") * columns,
        inner=inner,
    )


def _lightning_blocks(config: TextConfig, block: Block) -> Iterator[WeightBlock]:
    """The matrices of MiniMax's lightning attention, with a norm of all heads' output."""
    hidden, inner = config.hidden_size, _lightning(config).inner
    yield block("self_attn.qkv_proj", hidden, 3 * inner, inner)
    yield block("self_attn.output_gate", hidden, inner)
    yield block("self_attn.out_proj", inner, hidden)


def _lightning(config: TextConfig) -> _Sizes:
    heads, size = config.num_attention_heads, head_dim(config)
    return _Sizes(heads=heads, rows=size, columns=size, mixed=0, inner=heads * size)


def _convolution_blocks(config: TextConfig, block: Block) -> Iterator[WeightBlock]:
    """The matrices of a gated convolution over the last tokens."""
    hidden = config.hidden_size
    biased = bool(config.use_conv_bias)
    others = needed(config, "conv_kernel") * hidden + (4 * hidden if biased else 0)
    yield block("conv.in_proj", hidden, 3 * hidden, others)
    yield block("conv.out_proj", hidden, hidden, hidden if biased else 0)


def _convolution(config: TextConfig) -> _Sizes:
    hidden = config.hidden_size
    return _Sizes(heads=0, rows=0, columns=0, mixed=hidden, inner=hidden)


def _mamba1_blocks(config: TextConfig, block: Block) -> Iterator[WeightBlock]:
    """The matrices of the first Mamba, with the norms that Jamba adds."""
    hidden, inner = config.hidden_size, _mamba1(config).inner
    columns, kernel = needed(config, "ssm_state_size"), needed(config, "conv_kernel")
    given = config.mamba_dt_rank
    rank = given if isinstance(given, int) else -(-hidden // 16)
    biased = bool(config.state_projection_bias)
    others = kernel * inner + (inner if config.use_conv_bias else 0)
    # Decays of the state, what passes by it, and norms of what is derived from the input.
    others += inner * (columns + 1) + rank + 2 * columns
    yield block("mamba.in_proj", hidden, 2 * inner, others + (2 * inner if biased else 0))
    yield block("mamba.x_proj", inner, rank + 2 * columns)
    yield block("mamba.dt_proj", rank, inner, inner)
    yield block("mamba.out_proj", inner, hidden, hidden if biased else 0)


def _mamba1(config: TextConfig) -> _Sizes:
    inner = needed(config, "mamba_expand") * config.hidden_size
    columns = needed(config, "ssm_state_size")
    return _Sizes(heads=1, rows=inner, columns=columns, mixed=inner, inner=inner)


_OF_KIND = {
    Recurrence.KIMI_DELTA: _kimi_blocks,
    Recurrence.LIGHTNING: _lightning_blocks,
    Recurrence.SHORT_CONVOLUTION: _convolution_blocks,
    Recurrence.MAMBA1: _mamba1_blocks,
}
_SIZES = {
    Recurrence.DELTA_NET: _delta_net,
    Recurrence.DELTA_NET_APART: _delta_net,
    Recurrence.KIMI_DELTA: _kimi_delta,
    Recurrence.LIGHTNING: _lightning,
    Recurrence.SHORT_CONVOLUTION: _convolution,
    Recurrence.MAMBA1: _mamba1,
    Recurrence.MAMBA2: _mamba,
}
