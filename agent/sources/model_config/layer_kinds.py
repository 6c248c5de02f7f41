"""The kind of each layer of a model."""

from collections.abc import Iterator

from agent.catalog.architectures import ARCHITECTURES, Architecture, LayerKind
from agent.sources.model_config.config import (
    ArchitectureUnknown,
    ModelConfigInvalid,
    TextConfig,
    entry,
)

# Older names, which transformers renames too.
_OLDER = {
    "mamba": "linear_attention",
    "attention": "full_attention",
    "conv": "linear_attention",
    "deepseek_sparse_attention": "indexed_attention",
    "minimax_m3_sparse": "indexed_attention",
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
    return tuple(_shared(config, list(_own_kinds(config))))


def _own_kinds(config: TextConfig) -> tuple[LayerKind, ...]:
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


_REUSING = {
    LayerKind.FULL: LayerKind.REUSING,
    LayerKind.SLIDING: LayerKind.REUSING_SLIDING,
}


def _shared(config: TextConfig, kinds: list[LayerKind]) -> Iterator[LayerKind]:
    """The kinds with those layers that use what an earlier layer cached or selected."""
    first = len(kinds) - config.num_kv_shared_layers
    for number, kind in enumerate(kinds):
        if config.num_kv_shared_layers and number >= first > 0:
            yield _REUSING.get(kind, kind)
        elif kind is LayerKind.INDEXED and config.indexer_types is not None:
            shares = entry(config, "indexer_types", number) == "shared"
            yield LayerKind.SELECTED if shares else kind
        else:
            yield kind


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
    return ArchitectureUnknown(config.architecture, why)
