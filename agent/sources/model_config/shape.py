"""Builds a model's shape from the keys of its config.json."""

from collections import Counter

from agent.catalog.architectures import ARCHITECTURES, Architecture
from agent.catalog.precision import Precision
from agent.records.model import LayerGroup, ModelShape, WeightBlock, WeightFormat
from agent.sources.model_config.blocks import Layer
from agent.sources.model_config.config import TextConfig
from agent.sources.model_config.config_errors import ArchitectureUnknown, ModelConfigInvalid
from agent.sources.model_config.quantisation import Scheme

_PRECISIONS = {
    "float32": Precision.FP32,
    "bfloat16": Precision.BF16,
    "float16": Precision.FP16,
    "half": Precision.FP16,
}

_LAYER_TYPES = {"full_attention", "sliding_attention"}


def precision_of(config: TextConfig) -> Precision | None:
    """The precision that the config names; None without one. Raises ModelConfigInvalid."""
    if config.dtype is None:
        return None
    name = config.dtype.removeprefix("torch.")
    if name not in _PRECISIONS:
        raise ModelConfigInvalid(
            f"the dtype of the config.json is {config.dtype!r}; known are {', '.join(_PRECISIONS)}"
        )
    return _PRECISIONS[name]


def shape_of(
    config: TextConfig, scheme: Scheme, *, cache_bits: float, remarks: tuple[str, ...] = ()
) -> ModelShape:
    """The shape. Raises ArchitectureUnknown where the architecture's row does not cover it."""
    architecture = ARCHITECTURES[config.architecture]
    _check_windows(config, architecture)
    plain = scheme.plain
    embedding = _matrix("model.embed_tokens", config, plain)
    return ModelShape(
        architecture=config.architecture,
        embedding=embedding,
        head=None if config.tie_word_embeddings else _matrix("lm_head", config, plain),
        groups=_groups(config, architecture, scheme),
        vectors=config.hidden_size,
        precision=plain.compute,
        compute=scheme.quantised.compute,
        cache_bits=cache_bits,
        max_context=config.max_position_embeddings,
        remarks=remarks,
    )


def _check_windows(config: TextConfig, architecture: Architecture) -> None:
    types = config.layer_types
    if types is not None and not set(types) <= _LAYER_TYPES:
        strange = ", ".join(sorted(set(types) - _LAYER_TYPES))
        raise _unknown(config, f"it has layers of the type {strange}")
    if types is not None and len(types) < config.num_hidden_layers:
        raise ModelConfigInvalid(
            f"the config.json types {len(types)} of {config.num_hidden_layers} layers"
        )
    if types is None and architecture.full_attention_every is None and config.use_sliding_window:
        raise _unknown(config, "it does not list the layers of its sliding window")


def _unknown(config: TextConfig, why: str) -> ArchitectureUnknown:
    return ArchitectureUnknown(config.architecture, why, ARCHITECTURES)


def _matrix(name: str, config: TextConfig, stored: WeightFormat) -> WeightBlock:
    return WeightBlock(name=name, parameters=config.vocab_size * config.hidden_size, format=stored)


def _groups(
    config: TextConfig, architecture: Architecture, scheme: Scheme
) -> tuple[LayerGroup, ...]:
    layers = (
        Layer(config, architecture, scheme, number) for number in range(config.num_hidden_layers)
    )
    alike = Counter((layer.attention(), layer.blocks()) for layer in layers)
    return tuple(
        LayerGroup(
            layers=count,
            attention=attention,
            blocks=blocks,
            vectors=architecture.norms * config.hidden_size,
        )
        for (attention, blocks), count in alike.items()
    )
