"""Layers with a state: their matrices, and the state of one request."""

from collections.abc import Iterator
from dataclasses import dataclass

from agent.catalog.architectures import Recurrence
from agent.catalog.hardware import Precision
from agent.records.model import RecurrentState, WeightBlock
from agent.sources.model_config.config import Block, ModelConfigInvalid, TextConfig, needed

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
    if recurrence is Recurrence.KIMI_DELTA:
        yield from _kimi_blocks(config, block)
        return
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
    others = kernel * sizes.mixed + 3 * sizes.heads + sizes.inner
    others += sizes.mixed if config.use_conv_bias else 0
    biased = bool(config.state_projection_bias)
    yield block("mamba.in_proj", hidden, widest, others + (widest if biased else 0))
    yield block("mamba.out_proj", sizes.inner, hidden, hidden if biased else 0)


def recurrent_state(
    config: TextConfig, recurrence: Recurrence, precision: Precision
) -> RecurrentState:
    """The state of one request in one layer, and the FLOPs of a token that reads and changes it."""
    delta_net = recurrence is not Recurrence.MAMBA2
    sizes = _sizes(config, recurrence)
    values = sizes.heads * sizes.rows * sizes.columns
    mixed = (needed(config, "conv_kernel") - 1) * sizes.mixed
    # Two FLOPs a value: the delta net reads its state by key and by query and adds to it, Mamba
    # reads its own once and adds to it.
    products = 3 if delta_net else 2
    return RecurrentState(
        bits=mixed * precision.bits + values * _state_bits(config, recurrence, precision),
        flops_per_token=2 * products * values,
    )


def _sizes(config: TextConfig, recurrence: Recurrence) -> _Sizes:
    if recurrence is Recurrence.KIMI_DELTA:
        return _kimi_delta(config)
    return _mamba(config) if recurrence is Recurrence.MAMBA2 else _delta_net(config)


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
