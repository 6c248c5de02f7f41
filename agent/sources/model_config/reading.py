"""Reading a model's shape from disk."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agent.catalog.architectures import ARCHITECTURES
from agent.catalog.precision import Precision
from agent.records.model import ModelShape
from agent.sources.model_config.config import TextConfig
from agent.sources.model_config.config_errors import ArchitectureUnknown, ModelConfigInvalid
from agent.sources.model_config.quantisation import Scheme, asked_scheme, cache_bits_of, scheme
from agent.sources.model_config.shape import precision_of, shape_of
from agent.sources.model_config.weight_files import stored_bytes

# What holds for the whole of a multimodal model and is said outside of its text part.
_SHARED = ("tie_word_embeddings", "torch_dtype", "dtype", "quantization_config")

# Checkpoints of NVIDIA's ModelOpt before 0.29 say here how they are quantised.
_MODELOPT = "hf_quant_config.json"


def read_model(
    path: Path, *, dtype: str | None = None, cache_bits: float | None = None
) -> ModelShape:
    """The shape of the model whose config.json, or whose folder, this is.

    `dtype`, a name in quantisation.ASKED, stands in for how the config says that weights are kept;
    the files' size is then not theirs. `cache_bits` is the width of a value in the KV cache; where
    None, what the config says of it, or else the model's own. Raises ModelConfigInvalid,
    ArchitectureUnknown, QuantisationUnknown or CacheUnknown.
    """
    file = path / "config.json" if path.is_dir() else path
    content = _with_quantisation(_content(file), file.parent)
    config = _text_config(content, file)
    chosen = _scheme(config, dtype, _served(config))
    shape = shape_of(
        config,
        chosen,
        cache_bits=cache_bits or cache_bits_of(config.quantization_config) or chosen.plain.bits,
        remarks=_remarks(content, config),
    )
    if dtype is not None or precision_of(config) is Precision.FP32:
        return shape
    return replace(shape, stored_bytes=stored_bytes(file.parent))


def _served(config: TextConfig) -> Precision:
    """The precision in which engines serve the model: unless told, in 16 bits what is in 32."""
    precision = precision_of(config)
    return Precision.BF16 if precision in (None, Precision.FP32) else precision


def _scheme(config: TextConfig, dtype: str | None, precision: Precision) -> Scheme:
    if dtype is not None:
        return asked_scheme(dtype, precision)
    return scheme(config.quantization_config, precision)


def _content(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelConfigInvalid(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelConfigInvalid(f"{file}: holds no JSON object; give a model's config.json")
    return content


def _with_quantisation(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What ModelOpt says in a file of its own, where the config says nothing."""
    file = folder / _MODELOPT
    if "quantization_config" in content or not file.is_file():
        return content
    told = _content(file).get("quantization")
    if not isinstance(told, dict):
        raise ModelConfigInvalid(f"{file}: says nothing of a quantization")
    return {**content, "quantization_config": {**told, "quant_method": "modelopt"}}


def _text_config(content: dict[str, Any], file: Path) -> TextConfig:
    text = content.get("text_config")
    if isinstance(text, dict):
        shared = {key: content[key] for key in _SHARED if content.get(key) is not None}
        content = {**shared, **text}
    name = content.get("model_type")
    if not isinstance(name, str):
        raise ModelConfigInvalid(f"{file}: names no model_type; give a model's config.json")
    if name not in ARCHITECTURES:
        raise ArchitectureUnknown(name, "no row describes it", ARCHITECTURES)
    defaults = ARCHITECTURES[name].defaults
    # A null stands for what a key is without a word, unless the class would set something else.
    given = {key: told for key, told in content.items() if told is not None or key in defaults}
    try:
        return TextConfig.model_validate({**defaults, **given})
    except ValidationError as error:
        raise ModelConfigInvalid("\n".join(_sentences(error, file))) from error


def _sentences(error: ValidationError, file: Path) -> list[str]:
    return [
        f"{file}: {'.'.join(map(str, problem['loc']))}: {problem['msg']}"
        for problem in error.errors()
    ]


def _remarks(content: dict[str, Any], config: TextConfig) -> tuple[str, ...]:
    remarks = []
    if "text_config" in content or "vision_config" in content:
        remarks.append("only the text part is counted, not what reads images or sound")
    if config.num_nextn_predict_layers:
        remarks.append("layers for multi-token prediction count in the size of its files alone")
    if config.dtype is None:
        remarks.append("the config names no dtype; 16 bits are taken")
    if precision_of(config) is Precision.FP32:
        remarks.append("the config says float32, which engines serve in 16 bits")
    return tuple(remarks)
