"""Reads a model's shape from its config.json and the files beside it."""

import reprlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from agent.catalog.hardware import Precision
from agent.records.model import ModelShape
from agent.settings.named_files import in_time, read_json, read_named_file
from agent.sources.model_config.class_keys import text_keys
from agent.sources.model_config.config import TextConfig
from agent.sources.model_config.config_errors import ModelConfigInvalid
from agent.sources.model_config.quantisation import Scheme, cache_bits_of, configured_scheme, scheme
from agent.sources.model_config.shape import precision_of, shape_of
from agent.sources.model_config.weight_files import stored_bytes

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
    if dtype is not None or precision_of(config) is Precision.FP32:
        return shape
    return replace(shape, stored_bytes=_stored_bytes(file.parent))


def _is_folder(path: Path) -> bool:
    try:
        return in_time(path, path.is_dir)
    except OSError as error:
        raise ModelConfigInvalid(f"{path}: cannot be read: {error}") from error


def _stored_bytes(folder: Path) -> int | None:
    try:
        return in_time(folder, partial(stored_bytes, folder))
    except OSError:
        return None


def _served(config: TextConfig) -> Precision:
    """The precision in which engines serve the model: 16 bits for 32, and if it is unknown."""
    precision = precision_of(config)
    return Precision.BF16 if precision in (None, Precision.FP32) else precision


def _scheme(config: TextConfig, dtype: str | None, precision: Precision) -> Scheme:
    if dtype is not None:
        return configured_scheme(dtype, precision)
    return scheme(config.quantization_config, precision)


def _content(file: Path) -> dict[str, Any]:
    try:
        content = read_json(read_named_file(file, max_bytes=_MAX_BYTES))
    except (OSError, ValueError) as error:
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


def _remarks(content: dict[str, Any], config: TextConfig) -> tuple[str, ...]:
    remarks = []
    if "text_config" in content or "vision_config" in content:
        remarks.append("only the text part is counted, without encoders of images or sound")
    if config.num_nextn_predict_layers:
        remarks.append("layers for multi-token prediction count only in the size of its files")
    if config.dtype is None:
        remarks.append("the config has no dtype; 16 bits are assumed")
    if precision_of(config) is Precision.FP32:
        remarks.append("the config has float32, which engines serve in 16 bits")
    return tuple(remarks)
