"""Reads a model's shape from its config.json and the files beside it.

A config.json has the keys that its class reads, with the class's defaults for missing ones.
"""

import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from agent.catalog.architectures import ARCHITECTURES, ModelClass, Wrapper, model_classes
from agent.catalog.hardware import Precision
from agent.records.model import ModelShape, StoredWeights
from agent.settings.named_files import (
    in_time,
    read_json,
    read_named_file,
    similar_files,
)
from agent.sources.model_config.config import (
    EVERYWHERE,
    RENAMES,
    ArchitectureUnknown,
    ModelConfigInvalid,
    TextConfig,
)
from agent.sources.model_config.derived_keys import derived_keys
from agent.sources.model_config.quantisation import Scheme, cache_bits_of, configured_scheme, scheme
from agent.sources.model_config.shape import precision_of, shape_of
from agent.sources.model_config.stored_weights import stored_bytes, stored_weights

# Keys of a multimodal model that are outside of its text part and apply to it too.
_SHARED = ("torch_dtype", "dtype", "quantization_config")

# Wrappers whose older files have the keys of the text part beside their own.
_FLAT = frozenset({"qwen2_vl", "qwen2_5_vl", "step3p7"})

# Types of files whose class is known by the first of their `architectures`.
_BY_CLASS = {("deepseek_ref", "DeepseekV4ForCausalLM"): "deepseek_v4"}

_TIED = "tie_word_embeddings"
# Keys of the whole model, which its text part has for itself alone.
_OUTSIDE = (_TIED, "architectures", "id2label", "num_labels")


def text_keys(content: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the text part, under our names and with the defaults of its class.

    Raises ArchitectureUnknown for an unknown model type, ModelConfigInvalid without one.
    """
    thinker = content.get("thinker_config")
    if isinstance(thinker, Mapping):
        # An omni model, whose other parts speak.
        shared = {key: content[key] for key in (*_SHARED, "architectures") if key in content}
        return text_keys({**shared, **thinker})
    text = _text_part(content)
    if text is None:
        return _flat(content)
    inner = {key: value for key, value in text.items() if key not in _OUTSIDE}
    outer = {key: content[key] for key in (*_SHARED, *_OUTSIDE) if content.get(key) is not None}
    wrapper = model_classes().wrappers.get(str(content.get("model_type")))
    if wrapper is not None:
        inner.setdefault("model_type", wrapper.text)
    return {**_by_class({**outer, **inner}), _TIED: _tied(content, text, wrapper)}


# Names of the text part; those of models that have code of their own come last.
_TEXT = ("text_config", "llm_config", "language_config")


def _text_part(content: Mapping[str, Any]) -> Mapping[str, Any] | None:
    parts = (content.get(name) for name in _TEXT)
    return next((part for part in parts if isinstance(part, Mapping)), None)


def _flat(content: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a file without a text part of its own."""
    name = content.get("model_type")
    if not isinstance(name, str) or name not in _FLAT:
        return _by_class(content)
    wrapper = model_classes().wrappers[name]
    # The class of the text part does not have the key: only wrappers generate.
    keys = _by_class({**content, "model_type": wrapper.text})
    return {**keys, _TIED: content.get(_TIED, wrapper.tied)}


def _tied(content: Mapping[str, Any], text: Mapping[str, Any], wrapper: Wrapper | None) -> bool:
    """Whether the embeddings are tied: the wrapper decides, as in transformers and vLLM."""
    given = content.get(_TIED)
    if wrapper is None and given is None and "text_config" not in content:
        # A model of its own, within the other.
        return bool(_by_class(text).get(_TIED))
    if wrapper is None and given is None:
        raise ArchitectureUnknown(
            str(content.get("model_type")),
            f"no row describes this wrapper of {text.get('model_type')!r}, and its config.json "
            f"lacks {_TIED}, which decides the size of the output matrix",
        )
    if wrapper is None or given:
        return bool(given)
    inner = text.get(_TIED)
    if inner is None:
        inner = _by_class({"model_type": wrapper.text, **text}).get(_TIED)
    if given is None and str(content.get("transformers_version")).startswith("4."):
        # There the text part decided, and its file lacks the key if it has its class's default.
        return bool(inner)
    if not inner:
        return wrapper.tied and given is None
    return wrapper.tied_over_tied if given is None else wrapper.untied_over_tied


def _by_class(given: Mapping[str, Any]) -> dict[str, Any]:
    name = given.get("model_type")
    if not isinstance(name, str):
        raise ModelConfigInvalid("names no model_type; give a model's config.json")
    name = _BY_CLASS.get((name, str(_first_class(given))), name)
    if name not in ARCHITECTURES:
        raise ArchitectureUnknown(name, "no row describes it")
    row = ARCHITECTURES[name]
    model_class = model_classes().classes.get(row.class_of or name, _WITHOUT_CLASS)
    known = dict(_known(given, model_class, strict=row.class_of is None))
    more = {key: given[key] for key in row.more_keys & given.keys() if given[key] is not None}
    defaults = dict(_renamed(model_class.defaults, row.renames))
    found = {**defaults, **dict(_renamed({**known, **more}, row.renames))}
    derived = derived_keys(name, {**model_class.defaults, **given})
    return _with_layers({**found, **derived, "model_type": name})


# Of types that transformers has no class for: no defaults, and all keys that are ours.
_WITHOUT_CLASS = ModelClass(
    defaults={},
    others=frozenset({*RENAMES, *TextConfig.model_fields, *EVERYWHERE}),
    not_null=frozenset(),
)


def _first_class(given: Mapping[str, Any]) -> str | None:
    classes = given.get("architectures")
    return str(classes[0]) if isinstance(classes, list) and classes else None


def _with_layers(keys: dict[str, Any]) -> dict[str, Any]:
    """With the number of layers, which the class of Nemotron-H takes from their list."""
    listed = keys.get("layer_types") or keys.get("hybrid_override_pattern")
    if "num_hidden_layers" in keys or not isinstance(listed, (list, str)):
        return keys
    return {**keys, "num_hidden_layers": len(listed)}


def _known(
    given: Mapping[str, Any], model_class: ModelClass, *, strict: bool
) -> Iterator[tuple[str, Any]]:
    """The keys that the class reads, its own first: its other names for them are set later.

    Nulls of keys without a default count as missing. If `strict`, raises ModelConfigInvalid for
    other nulls that the class refuses.
    """
    for key in model_class.defaults.keys() & given.keys():
        if given[key] is None and key in model_class.not_null and strict:
            raise ModelConfigInvalid(
                f"{key} is null, which its class in transformers refuses; give a value, or leave "
                f"the key out for the class's own ({model_class.defaults[key]})"
            )
        yield key, given[key]
    for key in ((EVERYWHERE | model_class.others) - model_class.defaults.keys()) & given.keys():
        if given[key] is not None:
            yield key, given[key]


def _renamed(
    keys: Mapping[str, Any], renames: Mapping[str, tuple[str, ...]]
) -> Iterator[tuple[str, Any]]:
    for key, value in keys.items():
        for name in renames.get(key, (RENAMES.get(key, key),)):
            yield name, value


# Checkpoints of NVIDIA's ModelOpt before 0.29 have their quantisation here.
_MODELOPT = "hf_quant_config.json"

# Labels and vocabularies make some of them large.
_MAX_BYTES = 16 * 1024 * 1024


def read_model(
    path: Path, *, dtype: str | None = None, cache_bits: float | None = None
) -> ModelShape:
    """The shape of a model, from its config.json or its folder.

    `dtype`, a name in quantisation.DTYPE_FORMATS, replaces the config's format of the weights,
    and then the files' size is not used. `cache_bits` is the width of a KV cache value; None means
    the config's, or else the model's own. Raises ModelConfigInvalid,
    ArchitectureUnknown, QuantisationUnknown or CacheUnknown.
    """
    file = path / "config.json" if _is_folder(path) else path
    content = _with_quantisation(_content(file), file.parent)
    config = _text_config(content, file)
    chosen = _scheme(config, dtype, _served(config))
    shape = shape_of(
        config,
        chosen,
        cache_bits=cache_bits or cache_bits_of(config.quantization_config) or chosen.plain.bits,
        remarks=_remarks(content, config),
    )
    shape = replace(shape, remarks=(*shape.remarks, *_remarks_on(shape)))
    if dtype is not None or precision_of(config) is Precision.FP32:
        return shape
    return replace(shape, stored_bytes=stored_bytes(file.parent))


def read_weights(path: Path, unknown: ArchitectureUnknown) -> StoredWeights | None:
    """What the safetensors files beside a config.json tell of a model that `read_model` refused.

    None without such files or their index. Raises ModelConfigInvalid if the config is unreadable.
    """
    file = path / "config.json" if _is_folder(path) else path
    content = _content(file)
    keys = {**content, **(_text_part(content) or {})}
    return stored_weights(file.parent, unknown.name, keys)


def weights_text(unknown: ArchitectureUnknown, weights: StoredWeights) -> str:
    """One sentence about a model of which only the files' weights are known."""
    found = weights.why_unknown
    mbu = "give MBU of decode" if found is None else f"do not give MBU of decode: {found}"
    return f"the architecture {unknown.name!r} is unknown, and MFU with it; its files {mbu}"


def _is_folder(path: Path) -> bool:
    try:
        return in_time(path, path.is_dir)
    except OSError as error:
        raise ModelConfigInvalid(f"{path}: cannot be read: {error}") from error


def _served(config: TextConfig) -> Precision:
    """The precision in which engines serve the model: 16 bits for 32, and if it is unknown."""
    precision = precision_of(config)
    return Precision.BF16 if precision in (None, Precision.FP32) else precision


def _scheme(config: TextConfig, dtype: str | None, precision: Precision) -> Scheme:
    if dtype is not None:
        return configured_scheme(dtype, precision)
    return scheme(config.quantization_config, precision, experts=config.expert_dtype)


def _content(file: Path) -> dict[str, Any]:
    try:
        content = read_json(read_named_file(file, max_bytes=_MAX_BYTES))
    except OSError as error:
        close = similar_files(file, error)
        raise ModelConfigInvalid(f"{file}: cannot be read as JSON: {error}{close}") from error
    except ValueError as error:
        raise ModelConfigInvalid(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelConfigInvalid(f"{file}: holds no JSON object; give a model's config.json")
    return content


def _with_quantisation(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The content with ModelOpt's quantisation, if the config has none and its file exists."""
    file = folder / _MODELOPT
    if "quantization_config" in content or not in_time(file, file.is_file):
        return content
    quantisation = _content(file).get("quantization")
    if not isinstance(quantisation, dict):
        raise ModelConfigInvalid(f"{file}: has no `quantization` object")
    return {**content, "quantization_config": {**quantisation, "quant_method": "modelopt"}}


def _text_config(content: dict[str, Any], file: Path) -> TextConfig:
    try:
        return TextConfig.model_validate(text_keys(content))
    except ValidationError as error:
        raise ModelConfigInvalid("\n".join(_sentences(error, file))) from error
    except ModelConfigInvalid as error:
        raise ModelConfigInvalid(f"{file}: {error}") from error


def _sentences(error: ValidationError, file: Path) -> list[str]:
    return [f"{file}: {_sentence(problem)}" for problem in error.errors()]


def _sentence(problem: ErrorDetails) -> str:
    key = ".".join(map(str, problem["loc"]))
    if problem["type"] == "missing":
        return f"{key} is missing"
    return f"{key} is {reprlib.repr(problem['input'])}: {problem['msg'].lower()}"


def _remarks_on(shape: ModelShape) -> Iterator[str]:
    """What the shape shows."""
    blocks = [block for group in shape.groups for block in group.blocks]
    computes = {block.format.compute for block in blocks if block.format.bits < 16}
    if len(computes) > 1:
        yield (
            f"its weights are multiplied in {' and '.join(sorted(computes))}; its peak is that of "
            f"{shape.compute}, the precision of most of them"
        )
    if any(block.used == 0 for block in blocks):
        yield "embeddings of layers and layers for images alone count only in its parameters"


def _remarks(content: dict[str, Any], config: TextConfig) -> tuple[str, ...]:
    remarks = []
    if not {*_TEXT, "vision_config", "thinker_config"}.isdisjoint(content):
        remarks.append("only the text part is counted, without encoders of images or sound")
    if config.num_nextn_predict_layers:
        remarks.append("layers for multi-token prediction count only in the size of its files")
    if config.dtype is None:
        remarks.append("the config has no dtype; 16 bits are assumed")
    if precision_of(config) is Precision.FP32:
        remarks.append("the config has float32, which engines serve in 16 bits")
    return tuple(remarks)
