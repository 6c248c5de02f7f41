"""Numbers of a configuration that a class derives from others, or that must be there."""

from typing import Any

from agent.sources.model_config.config import RENAMES, TextConfig
from agent.sources.model_config.config_errors import ModelConfigInvalid


def needed(config: TextConfig, key: str) -> int:
    """A number that the architecture needs. Raises ModelConfigInvalid if it is missing."""
    value: int | None = getattr(config, key)
    if value is None:
        spelled = [name for name, ours in RENAMES.items() if ours == key] or [key]
        raise ModelConfigInvalid(
            f"the architecture {config.architecture!r} needs {' or '.join(spelled)}, which its "
            "config.json lacks"
        )
    return value


def entry(config: TextConfig, key: str, layer: int) -> Any:
    """What a list has for a layer. Raises ModelConfigInvalid if the list is too short."""
    listed = getattr(config, key)
    if layer >= len(listed):
        raise ModelConfigInvalid(
            f"{key} has {len(listed)} entries for {config.num_hidden_layers} layers"
        )
    return listed[layer]


def kv_heads(config: TextConfig) -> int:
    """The heads of keys and values: as many as queries have, unless fewer are given."""
    return config.num_key_value_heads or config.num_attention_heads


def head_dim(config: TextConfig) -> int:
    """The size of a head: the given one, else an equal part of the hidden size.

    Raises ModelConfigInvalid if that is nothing.
    """
    size = config.head_dim or config.hidden_size // config.num_attention_heads
    if size == 0:
        raise ModelConfigInvalid(
            f"hidden_size {config.hidden_size} is too small for num_attention_heads "
            f"{config.num_attention_heads}"
        )
    return size
