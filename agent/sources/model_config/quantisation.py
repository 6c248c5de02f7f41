"""How weights and KV cache are stored, from the quantization_config of a config.json.

Bits of a weight include its share of the scales and zero points of its group.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from agent.catalog.hardware import Precision
from agent.records.model import WeightFormat
from agent.sources.model_config.config import CacheUnknown, QuantisationUnknown

_Keys = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Which modules are quantised, and how. `plain` is the format of all others.

    `only` and `ignored` are patterns or parts of modules' names; without `only` all modules are
    quantised but the ignored ones.
    """

    quantised: WeightFormat
    plain: WeightFormat
    ignored: tuple[str, ...] = ()
    only: tuple[str, ...] = ()

    def format_of(self, module: str) -> WeightFormat:
        """The format of one module's weights, by its name in the model."""
        chosen = not self.only or any(_names(entry, module) for entry in self.only)
        spared = any(_names(entry, module) for entry in self.ignored)
        return self.quantised if chosen and not spared else self.plain


# What stands before the layers of a text model: alone, in a wrapper, and in Nemotron-H.
_OUTER = (
    "model.",
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "backbone.",
)


def _names(entry: str, module: str) -> bool:
    """Whether an entry of an ignore list, a pattern or a part of a name, matches the module."""
    inner = module.removeprefix("model.")
    return any(_names_exactly(entry, outer + inner) for outer in _OUTER)


def _names_exactly(entry: str, module: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry[3:], module) is not None
    wanted, parts = entry.split("."), module.split(".")
    return any(
        all(map(fnmatchcase, parts[start:], wanted))
        for start in range(len(parts) - len(wanted) + 1)
    )


def scheme(keys: _Keys | None, precision: Precision) -> Scheme:
    """The scheme of a quantization_config or of its absence. Raises QuantisationUnknown."""
    plain = WeightFormat(precision.bits, precision)
    if keys is None:
        return Scheme(quantised=plain, plain=plain)
    method = str(keys.get("quant_method"))
    if method not in _METHODS:
        raise QuantisationUnknown(method, f"known are {', '.join(_METHODS)}")
    try:
        return _checked(_METHODS[method](keys, plain))
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, re.error) as error:
        raise QuantisationUnknown(method, f"its keys cannot be read ({error!r})") from error


# Of a quantised weight, its share of scales included.
_FEWEST_BITS, _MOST_BITS = 1, 16
# Each is compared with each matrix of each layer.
_MOST_ENTRIES = 5000


def _checked(found: Scheme) -> Scheme:
    """The scheme. Raises ValueError or re.error if it cannot be."""
    bits = found.quantised.bits
    if not _FEWEST_BITS < bits <= _MOST_BITS:
        raise ValueError(f"{bits:g} bits for a weight")
    if len(found.ignored) + len(found.only) > _MOST_ENTRIES:
        raise ValueError(f"it lists more than {_MOST_ENTRIES} modules")
    for entry in (*found.ignored, *found.only):
        if entry.startswith("re:"):
            re.compile(entry[3:])
    return found


# NVIDIA's NVFP4: 16 values share an 8-bit scale.
_CACHE_BITS = {("float", 8): 8.0, ("int", 8): 8.0, ("float", 4): 4.5}
_CACHE_WORDS = {"fp8": ("float", 8), "int8": ("int", 8), "nvfp4": ("float", 4)}


def cache_bits_of(keys: _Keys | None) -> float | None:
    """Bits of a KV cache value by a quantization_config; None if it has no such key.

    Raises CacheUnknown for a format that this version does not know.
    """
    value = (keys or {}).get("kv_cache_scheme") or (keys or {}).get("kv_cache_quant_algo")
    if not value:
        return None
    if isinstance(value, Mapping):
        key = (str(value.get("type")), value.get("num_bits"))
    else:
        key = _CACHE_WORDS.get(str(value).lower(), ("", None))
    # A list cannot be a key of a table.
    if key not in list(_CACHE_BITS):
        raise CacheUnknown(value)
    return _CACHE_BITS[key]


def _listed(keys: _Keys, *names: str) -> tuple[str, ...]:
    return tuple(str(entry) for name in names for entry in keys.get(name) or ())


def _grouped(bits: float, per_group: float, group: int) -> float:
    """Bits of a weight with its part of `per_group`; a group of -1 is a whole row."""
    return bits + (per_group / group if group > 0 else 0.0)


def _gptq(keys: _Keys, plain: WeightFormat) -> Scheme:
    if keys.get("dynamic"):
        raise QuantisationUnknown("gptq", "its rules differ from layer to layer")
    bits = keys["bits"]
    # A 16-bit scale and a packed zero point.
    stored_bits = _grouped(bits, 16 + bits, keys.get("group_size", 128))
    return Scheme(
        quantised=WeightFormat(stored_bits, plain.compute),
        plain=plain,
        ignored=_listed(keys, "modules_to_not_convert"),
    )


def _awq(keys: _Keys, plain: WeightFormat) -> Scheme:
    bits = keys["bits"] if "bits" in keys else keys["w_bit"]
    group = keys["group_size"] if "group_size" in keys else keys["q_group_size"]
    return Scheme(
        quantised=WeightFormat(_grouped(bits, 16 + bits, group), plain.compute),
        plain=plain,
        ignored=_listed(keys, "modules_to_not_convert"),
    )


def _fp8(keys: _Keys, plain: WeightFormat) -> Scheme:
    rows, columns = keys.get("weight_block_size") or (-1, 1)
    return Scheme(
        quantised=WeightFormat(_grouped(8, 32, rows * columns), Precision.FP8),
        plain=plain,
        ignored=_listed(keys, "modules_to_not_convert", "ignored_layers"),
    )


def _mxfp4(keys: _Keys, plain: WeightFormat) -> Scheme:
    # 32 weights share an 8-bit scale.
    return Scheme(
        quantised=WeightFormat(_grouped(4, 8, 32), plain.compute),
        plain=plain,
        ignored=_listed(keys, "modules_to_not_convert"),
        only=("experts",),
    )


def _bitsandbytes(keys: _Keys, plain: WeightFormat) -> Scheme:
    ignored = _listed(keys, "llm_int8_skip_modules")
    if keys.get("load_in_8bit"):
        return Scheme(quantised=WeightFormat(8, Precision.INT8), plain=plain, ignored=ignored)
    if not keys["load_in_4bit"]:
        raise ValueError("neither load_in_4bit nor load_in_8bit")
    # 64 weights share a 32-bit scale, or an 8-bit one of which 256 share a 32-bit scale.
    per_group = 8 + 32 / 256 if keys.get("bnb_4bit_use_double_quant") else 32
    stored_bits = _grouped(4, per_group, 64)
    return Scheme(quantised=WeightFormat(stored_bits, plain.compute), plain=plain, ignored=ignored)


def _compressed_tensors(keys: _Keys, plain: WeightFormat) -> Scheme:
    groups = keys["config_groups"].values()
    formats = {_group_format(group, plain) for group in groups}
    if len(formats) != 1:
        raise QuantisationUnknown("compressed-tensors", "its groups have different formats")
    targets = tuple(target for group in groups for target in _targets(group))
    return Scheme(
        quantised=formats.pop(),
        plain=plain,
        ignored=_listed(keys, "ignore"),
        only=() if _EVERY_MATRIX in targets else targets,
    )


# The class of all matrices, in place of names.
_EVERY_MATRIX = "Linear"


def _targets(group: _Keys) -> tuple[str, ...]:
    given = group.get("targets") or _EVERY_MATRIX
    return (given,) if isinstance(given, str) else _listed(group, "targets")


# The precision of the products, by the type and width of the activations.
_ACTIVATIONS = {
    ("float", 8): Precision.FP8,
    ("int", 8): Precision.INT8,
    ("float", 4): Precision.FP4,
}


def _group_format(group: _Keys, plain: WeightFormat) -> WeightFormat:
    weights, activations = group["weights"], group.get("input_activations")
    # NVFP4 has an 8-bit scale for each group, the others a 16-bit one.
    scale = 8 if (weights["type"], weights["num_bits"]) == ("float", 4) else 16
    zero_point = 0 if weights.get("symmetric", True) else weights["num_bits"]
    stored_bits = _grouped(weights["num_bits"], scale + zero_point, weights.get("group_size") or -1)
    if activations is None:
        return WeightFormat(stored_bits, plain.compute)
    return WeightFormat(stored_bits, _ACTIVATIONS[activations["type"], activations["num_bits"]])


# NVIDIA's ModelOpt: 16 weights in FP4 share an 8-bit scale.
_MODELOPT = {"FP8": WeightFormat(8, Precision.FP8), "NVFP4": WeightFormat(4.5, Precision.FP4)}


def _modelopt(keys: _Keys, plain: WeightFormat) -> Scheme:
    return Scheme(
        quantised=_MODELOPT[keys["quant_algo"]],
        plain=plain,
        ignored=_listed(keys, "ignore", "exclude_modules"),
    )


_METHODS: Mapping[str, Callable[[_Keys, WeightFormat], Scheme]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
}

# Formats that can be configured in place of the config's, because engines can quantise at start:
# all weights but embedding and output matrix. Bits of a weight, and the precision of products.
DTYPE_FORMATS: Mapping[str, tuple[float, Precision]] = {
    "fp32": (32, Precision.FP32),
    "bf16": (16, Precision.BF16),
    "fp16": (16, Precision.FP16),
    "fp8": (8, Precision.FP8),
    "int8": (8, Precision.INT8),
    "int4": (_grouped(4, 16 + 4, 128), Precision.BF16),
    "fp4": (_grouped(4, 8, 16), Precision.FP4),
}


def configured_scheme(dtype: str, precision: Precision) -> Scheme:
    """The scheme for a name in DTYPE_FORMATS, in a model of this precision."""
    bits, compute = DTYPE_FORMATS[dtype]
    quantised = WeightFormat(bits, compute)
    plain = quantised if bits >= 16 else WeightFormat(precision.bits, precision)
    return Scheme(quantised=quantised, plain=plain)
