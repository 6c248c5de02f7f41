"""How weights and KV cache are stored, from the quantization_config of a config.json.

Bits of a weight include its share of the scales and zero points of its group.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from agent.catalog.hardware import Precision
from agent.records.model import WeightFormat
from agent.sources.model_config.config import CacheUnknown, QuantisationUnknown

_Keys = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Which modules are quantised, and how. `plain` is the format of all others.

    `named` has modules by their inner names, and counts before `ignored` and `rules`. A rule has
    patterns or parts of modules' names, and their format; without any it is of all modules. The
    first that names a module counts.
    """

    plain: WeightFormat
    rules: tuple[tuple[tuple[str, ...], WeightFormat], ...] = ()
    ignored: tuple[str, ...] = ()
    named: Mapping[str, WeightFormat] = field(default_factory=dict)

    def format_of(self, module: str) -> WeightFormat:
        """The format of one module's weights, by its name in the model."""
        parts = _inner(module)
        listed = self._listed(parts)
        if listed is not None:
            return listed
        if any(_names(entry, parts) for entry in self.ignored):
            return self.plain
        for entries, stored in self.rules:
            if not entries or any(_names(entry, parts) for entry in entries):
                return stored
        return self.plain

    def format_of_head(self) -> WeightFormat:
        """The format of the output matrix, which is quantised only if it is named."""
        return self.named.get("lm_head", self.plain)

    def _listed(self, parts: tuple[str, ...]) -> WeightFormat | None:
        """The format that the module or a module around it has by name."""
        for end in range(len(parts) if self.named else 0, 0, -1):
            found = self.named.get(".".join(parts[:end]))
            if found is not None:
                return found
        return None

    def require_modules(self, modules: Iterable[str]) -> None:
        """Raises QuantisationUnknown if a named module of a layer is none of these.

        Otherwise the weights of a module that is named differently would be taken as plain.
        """
        kinds = {_KIND.sub("", ".".join(_inner(module))) for module in modules}
        around = {kind.rsplit(".", cut)[0] for kind in kinds for cut in (0, 1, 2)}
        named = (name for name in self.named if name.startswith("layers."))
        strange = sorted({_KIND.sub("", name) for name in named} - around)
        if strange:
            raise QuantisationUnknown(
                "modelopt", f"no module of the model is named {', '.join(strange)}"
            )

    def require_some(self, quantised: Collection[WeightFormat]) -> None:
        """Raises QuantisationUnknown if no module of a model is quantised, but some should be."""
        given = {*(stored for _, stored in self.rules), *self.named.values()} - {self.plain}
        if given and not quantised:
            raise QuantisationUnknown("quantization_config", "it names no module of the model")


# What stands before the layers of a text model: alone, in a wrapper, and in Nemotron-H.
_OUTER = ("model", "language_model", "backbone")

# Names of the same module in files of other classes.
_SAME = {
    "attn": "self_attn",
    "ffn": "mlp",
    "block_sparse_moe": "mlp",
    "moe": "mlp",
    "share_expert": "shared_experts",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
}

# The number of a layer or of an expert.
_KIND = re.compile(r"^layers\.\d+\.|(?<=experts)\.\d+")


@lru_cache(maxsize=100_000)
def _inner(name: str) -> tuple[str, ...]:
    """The parts of a module's name within the text model, or of an entry that may name it."""
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in _OUTER:
        parts = parts[1:]
    return tuple(_SAME.get(part, part) for part in parts)


def _names(entry: str, module: tuple[str, ...]) -> bool:
    """Whether an entry of an ignore list, a pattern or a part of a name, matches the module."""
    if entry.startswith("re:"):
        return any(re.match(entry[3:], name) for name in _spellings(module))
    wanted = _inner(entry)
    starts = range(len(module) - len(wanted) + 1)
    if "*" not in entry:
        return any(module[start : start + len(wanted)] == wanted for start in starts)
    return any(all(map(fnmatchcase, module[start:], wanted)) for start in starts)


@lru_cache(maxsize=100_000)
def _spellings(module: tuple[str, ...]) -> tuple[str, ...]:
    """The names of a module that a regular expression may be meant for."""
    inner = ".".join(module)
    names = {
        inner,
        inner.replace("mlp.", "block_sparse_moe.", 1),
        inner.replace("mlp.", "ffn.", 1),
        *(inner.removesuffix(part) + "fused_wqa_wkv" for part in _FUSED if inner.endswith(part)),
    }
    outer = ("model.", "model.language_model.", "language_model.model.", "language_model.")
    return tuple(before + name for name in sorted(names) for before in (*outer, "backbone."))


# Two matrices of DeepSeek-V4 that vLLM has as one.
_FUSED = ("wq_a", "wkv")


def scheme(keys: _Keys | None, precision: Precision, *, experts: str | None = None) -> Scheme:
    """The scheme of a quantization_config or of its absence. Raises QuantisationUnknown.

    `experts` is the `expert_dtype` of the config, in which its experts are stored.
    """
    plain = WeightFormat(precision.bits, precision)
    if keys is None:
        return Scheme(plain=plain)
    found = _by_method(keys, plain)
    # Other methods name the experts themselves.
    if experts is None or found.named or keys.get("quant_method") != "fp8":
        return found
    if experts not in _EXPERTS:
        raise QuantisationUnknown(experts, f"known for experts are {', '.join(_EXPERTS)}")
    return replace(found, rules=((("experts",), _EXPERTS[experts]), *found.rules))


def _by_method(keys: _Keys, plain: WeightFormat) -> Scheme:
    method = _method(keys)
    if method not in _METHODS:
        raise QuantisationUnknown(method, f"known are {', '.join(_METHODS)}")
    try:
        return _checked(_METHODS[method](keys, plain))
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, re.error) as error:
        raise QuantisationUnknown(method, f"its keys cannot be read ({error!r})") from error


# Of DeepSeek-V4: multiplied in FP8, like its other weights.
_EXPERTS = {"fp4": WeightFormat(4 + 8 / 32, Precision.FP8), "fp8": WeightFormat(8, Precision.FP8)}


def _method(keys: _Keys) -> str:
    """The method's name. ModelOpt does not always write one."""
    producer = keys.get("producer")
    is_modelopt = isinstance(producer, Mapping) and producer.get("name") == "modelopt"
    return str(keys.get("quant_method") or ("modelopt" if is_modelopt else None))


# Of a quantised weight, its share of scales included.
_FEWEST_BITS, _MOST_BITS = 1, 16
# Each is compared with each matrix of each layer.
_MOST_ENTRIES = 5000


def _checked(found: Scheme) -> Scheme:
    """The scheme. Raises ValueError or re.error if it cannot be."""
    entries = (*found.ignored, *(entry for listed, _ in found.rules for entry in listed))
    for stored in (*(stored for _, stored in found.rules), *found.named.values()):
        if not _FEWEST_BITS < stored.bits <= _MOST_BITS:
            raise ValueError(f"{stored.bits:g} bits for a weight")
    if len(entries) > _MOST_ENTRIES:
        raise ValueError(f"it lists more than {_MOST_ENTRIES} modules")
    for entry in entries:
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
    rules = keys.get("dynamic") or {}
    # Rules that begin with this spare modules.
    if any(not rule.startswith("-:") for rule in rules):
        raise QuantisationUnknown("gptq", "its rules differ from layer to layer")
    bits = keys["bits"]
    # A 16-bit scale and a packed zero point.
    stored_bits = _grouped(bits, 16 + bits, keys.get("group_size", 128))
    return Scheme(
        plain=plain,
        rules=_all(WeightFormat(stored_bits, plain.compute)),
        ignored=(
            *_listed(keys, "modules_to_not_convert"),
            *(f"re:{rule.removeprefix('-:')}" for rule in rules),
        ),
    )


def _auto_round(keys: _Keys, plain: WeightFormat) -> Scheme:
    """Stored as by GPTQ, but for single modules that are spared."""
    others = keys.get("extra_config") or {}
    if any(other.get("bits", 16) < 16 for other in others.values()):
        raise QuantisationUnknown("auto-round", "its rules differ from layer to layer")
    found = _gptq(keys, plain)
    return replace(found, ignored=(*found.ignored, *map(str, others)))


def _awq(keys: _Keys, plain: WeightFormat) -> Scheme:
    bits = keys["bits"] if "bits" in keys else keys["w_bit"]
    group = keys["group_size"] if "group_size" in keys else keys["q_group_size"]
    return Scheme(
        plain=plain,
        rules=_all(WeightFormat(_grouped(bits, 16 + bits, group), plain.compute)),
        ignored=_listed(keys, "modules_to_not_convert"),
    )


def _fp8(keys: _Keys, plain: WeightFormat) -> Scheme:
    rows, columns = keys.get("weight_block_size") or (-1, 1)
    return Scheme(
        plain=plain,
        rules=_all(WeightFormat(_grouped(8, 32, rows * columns), Precision.FP8)),
        ignored=_listed(keys, "modules_to_not_convert", "ignored_layers"),
        # ModelOpt quantises the experts of an FP8 model again.
        named=_quantised_layers(keys, plain),
    )


# 32 weights share an 8-bit scale.
_MXFP4_BITS = 4 + 8 / 32


def _mxfp4(keys: _Keys, plain: WeightFormat) -> Scheme:
    return Scheme(
        plain=plain,
        rules=((("experts",), WeightFormat(_MXFP4_BITS, plain.compute)),),
        ignored=_listed(keys, "modules_to_not_convert"),
    )


def _mxfp8(keys: _Keys, plain: WeightFormat) -> Scheme:
    return Scheme(
        plain=plain,
        rules=_all(WeightFormat(8 + 8 / 32, Precision.FP8)),
        ignored=_listed(keys, "modules_to_not_convert", "ignored_layers", "ignore"),
    )


# Of AMD's Quark: bits of a weight, without scales, and the precision of products with such
# activations.
_QUARK: Mapping[str, tuple[int, Precision | None]] = {
    "fp8_e4m3": (8, Precision.FP8),
    "int8": (8, Precision.INT8),
    "fp4": (4, Precision.FP4),
    "int4": (4, None),
    "uint4": (4, None),
}


def _quark(keys: _Keys, plain: WeightFormat) -> Scheme:
    of_cache = (keys.get("export") or {}).get("kv_cache_group") or ()
    of_layers = keys.get("layer_quant_config") or {}
    if any(name not in of_cache for name in of_layers) or keys.get("layer_type_quant_config"):
        raise QuantisationUnknown("quark", "its rules differ from layer to layer")
    given = keys["global_quant_config"]
    weight, activations = given["weight"], given.get("input_tensors")
    bits, _ = _QUARK[weight["dtype"]]
    # Scales of groups are in 8 bits as exponents, else in 16.
    scale = 8 if weight.get("scale_format") == "e8m0" else 16
    compute = None if activations is None else _QUARK[activations["dtype"]][1]
    stored = WeightFormat(
        _grouped(bits, scale, weight.get("group_size") or -1), compute or plain.compute
    )
    return Scheme(plain=plain, rules=_all(stored), ignored=_listed(keys, "exclude"))


def _bitsandbytes(keys: _Keys, plain: WeightFormat) -> Scheme:
    ignored = _listed(keys, "llm_int8_skip_modules")
    if keys.get("load_in_8bit"):
        return Scheme(plain=plain, rules=_all(WeightFormat(8, Precision.INT8)), ignored=ignored)
    if not keys["load_in_4bit"]:
        raise ValueError("neither load_in_4bit nor load_in_8bit")
    # 64 weights share a 32-bit scale, or an 8-bit one of which 256 share a 32-bit scale.
    per_group = 8 + 32 / 256 if keys.get("bnb_4bit_use_double_quant") else 32
    stored_bits = _grouped(4, per_group, 64)
    quantised = WeightFormat(stored_bits, plain.compute)
    return Scheme(plain=plain, rules=_all(quantised), ignored=ignored)


def _compressed_tensors(keys: _Keys, plain: WeightFormat) -> Scheme:
    groups = keys["config_groups"].values()
    rules = [(_targets(group), _group_format(group, plain)) for group in groups]
    if not rules:
        raise ValueError("no config_groups")
    # Names count before the class of all matrices.
    rules.sort(key=lambda rule: not rule[0])
    if len({stored for targets, stored in rules if not targets}) > 1:
        raise QuantisationUnknown("compressed-tensors", "its groups have different formats")
    return Scheme(plain=plain, rules=tuple(rules), ignored=_listed(keys, "ignore"))


# The class of all matrices, in place of names.
_EVERY_MATRIX = "Linear"


def _targets(group: _Keys) -> tuple[str, ...]:
    """The entries of a rule; none for all matrices."""
    given = group.get("targets") or _EVERY_MATRIX
    targets = (given,) if isinstance(given, str) else _listed(group, "targets")
    return () if _EVERY_MATRIX in targets else targets


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


# NVIDIA's ModelOpt: 16 weights in FP4 share an 8-bit scale. W4A16 multiplies in the model's own
# precision.
_MODELOPT: Mapping[str, tuple[float, Precision | None]] = {
    "FP8": (8, Precision.FP8),
    "FP8_PER_CHANNEL_PER_TOKEN": (8, Precision.FP8),
    "FP8_PB_WO": (8 + 32 / 128**2, Precision.FP8),
    "MXFP8": (8 + 8 / 32, Precision.FP8),
    "NVFP4": (4 + 8 / 16, Precision.FP4),
    "W4A16_NVFP4": (4 + 8 / 16, None),
}
_MIXED = "MIXED_PRECISION"


def _modelopt(keys: _Keys, plain: WeightFormat) -> Scheme:
    ignored = _listed(keys, "ignore", "exclude_modules")
    if keys["quant_algo"] == _MIXED:
        named = _quantised_layers(keys, plain)
        if not named:
            raise ValueError("no quantized_layers")
        return Scheme(plain=plain, named=named, ignored=ignored)
    return Scheme(
        plain=plain, rules=_all(_modelopt_format(keys["quant_algo"], plain)), ignored=ignored
    )


def _modelopt_format(algorithm: str, plain: WeightFormat) -> WeightFormat:
    bits, compute = _MODELOPT[algorithm.upper()]
    return WeightFormat(bits, plain.compute if compute is None else compute)


def _quantised_layers(keys: _Keys, plain: WeightFormat) -> dict[str, WeightFormat]:
    """The modules that ModelOpt lists, by their inner names."""
    formats: dict[str, WeightFormat] = {}
    for name, listed in (keys.get("quantized_layers") or {}).items():
        formats[".".join(_inner(str(name)))] = _modelopt_format(listed["quant_algo"], plain)
    return formats


_METHODS: Mapping[str, Callable[[_Keys, WeightFormat], Scheme]] = {
    "gptq": _gptq,
    "auto-round": _auto_round,
    "awq": _awq,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "mxfp8": _mxfp8,
    "mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "quark": _quark,
}


def _all(stored: WeightFormat) -> tuple[tuple[tuple[str, ...], WeightFormat], ...]:
    """The rule for all modules."""
    return (((), stored),)


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
    return Scheme(plain=plain, rules=_all(quantised))
