"""The safetensors files beside a config.json: their size, and what their tensors tell.

The headers of the files have each tensor's name, type and shape. An index alone has the names and
the size of all.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from agent.records.model import StoredWeights
from agent.settings.named_files import in_time, read_at_once, read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# A line for each tensor.
_INDEX_BYTES = 64 * 1024 * 1024
_LARGEST = 2**63

# A safetensors file begins with the length of its header.
_LENGTH = struct.Struct("<Q")

# What a half-downloaded or foreign file raises.
_UNREADABLE = (
    *(OSError, ValueError, LookupError, TypeError, OverflowError, AttributeError),
    struct.error,
)


def stored_bytes(folder: Path) -> int | None:
    """Bytes of all tensors in the folder's safetensors files; None if it is unknown."""
    try:
        return in_time(folder, partial(_stored_bytes, folder))
    except _UNREADABLE:
        # A half-downloaded file must not hide what the config has.
        return None


def _stored_bytes(folder: Path) -> int | None:
    if (folder / INDEX).is_file():
        return _total_size(_index(folder))
    return _single(folder / SINGLE) if (folder / SINGLE).is_file() else None


def _index(folder: Path) -> Any:
    return read_json(read_at_once(folder / INDEX, _INDEX_BYTES))


def _total_size(index: Any) -> int | None:
    size = int(index["metadata"]["total_size"])
    return size if 0 < size < _LARGEST else None


def _single(path: Path) -> int | None:
    with path.open("rb") as file:
        (header,) = _LENGTH.unpack(file.read(_LENGTH.size))
    size: int = path.stat().st_size - _LENGTH.size - header
    return size if size > 0 else None


def stored_weights(
    folder: Path, architecture: str, config: Mapping[str, Any]
) -> StoredWeights | None:
    """What the files tell; `config` has the keys of the text part. None without files."""
    try:
        return in_time(folder, partial(_stored_weights, folder, architecture, config))
    except _UNREADABLE:
        return None


def _stored_weights(
    folder: Path, architecture: str, config: Mapping[str, Any]
) -> StoredWeights | None:
    index = _index(folder) if (folder / INDEX).is_file() else None
    files = {SINGLE} if index is None else set(map(str, index["weight_map"].values()))
    try:
        tensors = list(_tensors(folder, files))
    except OSError:
        if index is None:
            return None
        return _by_index(index, architecture, config)
    return _by_tensors(tensors, architecture, config)


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    dtype: str
    values: int
    bytes: int


_MOST_FILES = 2000


def _tensors(folder: Path, files: set[str]) -> Iterator[_Tensor]:
    if len(files) > _MOST_FILES:
        raise ValueError(f"{len(files)} files")
    for name in sorted(files):
        # An index may name anything.
        if Path(name).name != name:
            raise ValueError(f"{name} is not beside its index")
        yield from _of_file(folder / name)


def _of_file(path: Path) -> Iterator[_Tensor]:
    with path.open("rb") as file:
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
        if length > _INDEX_BYTES:
            raise ValueError(f"a header of {length} bytes")
        header = read_json(file.read(length))
    for name, tensor in header.items():
        if name != "__metadata__":
            begin, end = tensor["data_offsets"]
            yield _Tensor(name, str(tensor["dtype"]), prod(tensor["shape"]), end - begin)


# Parts of names of encoders, of what connects them, and of multi-token prediction: no step of
# decode reads them.
_BESIDE_TEXT = frozenset(
    {
        *(
            "visual",
            "vision_tower",
            "vision_model",
            "vision_encoder",
            "vit",
            "audio",
            "audio_tower",
        ),
        *("audio_model", "multi_modal_projector", "mm_projector", "vision_projector", "projector"),
        *("embed_vision", "embed_audio", "image_newline", "connector", "aligner", "mtp"),
    }
)
_EMBEDDINGS = ("embed_tokens", "word_embeddings", "wte", "tok_embeddings", "embeddings")
_HEADS = ("lm_head", "output", "embed_out")
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_NARROW = ("F8_E4M3", "F8_E5M2")
_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}


def _is_beside(name: str, config: Mapping[str, Any]) -> bool:
    parts = name.split(".")
    layers = config.get("num_hidden_layers")
    if not _BESIDE_TEXT.isdisjoint(parts):
        return True
    if "layers" not in parts[:-1] or not isinstance(layers, int):
        return False
    number = parts[parts.index("layers") + 1]
    # Layers for multi-token prediction are numbered on.
    return number.isdigit() and int(number) >= layers


def _is_expert(name: str) -> bool:
    return "experts" in name.split(".")


def _outer_matrix(name: str) -> str | None:
    """The name of a matrix outside of all layers."""
    parts = name.split(".")
    return parts[-2] if len(parts) > 1 and "layers" not in parts else None


def _has_head(names: Iterable[str]) -> bool:
    return any(_outer_matrix(name) in _HEADS for name in names)


def _is_looked_up(name: str, *, has_head: bool) -> bool:
    """Whether a token reads one row of the matrix alone."""
    outer = _outer_matrix(name)
    if outer is not None and outer.endswith("_per_layer"):
        return True
    return has_head and outer in _EMBEDDINGS


_EXPERTS = "which experts a token uses is unknown, and so is what a step reads"


def _by_tensors(
    tensors: list[_Tensor], architecture: str, config: Mapping[str, Any]
) -> StoredWeights | None:
    text = [tensor for tensor in tensors if not _is_beside(tensor.name, config)]
    stored = sum(tensor.bytes for tensor in tensors)
    if stored <= 0:
        return None
    has_head = _has_head(tensor.name for tensor in text)
    read = sum(t.bytes for t in text if not _is_looked_up(t.name, has_head=has_head))
    experts = any(_is_expert(tensor.name) for tensor in text)
    return StoredWeights(
        architecture=architecture,
        stored_bytes=stored,
        parameters=_parameters(text),
        step_bytes=None if experts else read,
        why_unknown=_EXPERTS if experts else None,
        remarks=_remarks("the headers of its files"),
    )


def _parameters(text: list[_Tensor]) -> int | None:
    """The number of weights; None if any are packed into integers or have shared scales."""
    plain = sum(tensor.values for tensor in text if tensor.dtype in _FLOATS)
    narrow = [tensor for tensor in text if tensor.dtype in _NARROW]
    if len(narrow) + sum(tensor.dtype in _FLOATS for tensor in text) < len(text):
        return None
    scales = sum(t.values for t in text if "scale" in t.name.rsplit(".", 1)[-1])
    return plain + sum(tensor.values for tensor in narrow) - (scales if narrow else 0)


def _by_index(index: Any, architecture: str, config: Mapping[str, Any]) -> StoredWeights | None:
    names = list(map(str, index["weight_map"]))
    stored = _total_size(index)
    if stored is None:
        return None
    found = StoredWeights(
        architecture=architecture,
        stored_bytes=stored,
        remarks=_remarks("the index of its files"),
    )
    return _with_text_part(found, names, index["metadata"].get("total_parameters"), config)


def _with_text_part(
    found: StoredWeights, names: list[str], counted: Any, config: Mapping[str, Any]
) -> StoredWeights:
    """With parameters and bytes of a step, if the text part is all that the files hold."""
    if any(_is_beside(name, config) or _is_looked_up(name, has_head=False) for name in names):
        why = "its files hold more than its text part, and their index has no sizes"
        return replace(found, why_unknown=why)
    width = _DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")).split(".")[-1])
    plain = width is not None and config.get("quantization_config") is None
    parameters = counted if isinstance(counted, int) and counted > 0 else None
    if parameters is None and plain and width is not None:
        parameters = found.stored_bytes // width
    if any(map(_is_expert, names)):
        return replace(found, parameters=parameters, why_unknown=_EXPERTS)
    looked_up = 0
    if _has_head(names):
        sizes = (config.get("vocab_size"), config.get("hidden_size"), width)
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            why = "the size of its embedding is unknown"
            return replace(found, parameters=parameters, why_unknown=why)
        looked_up = prod(size for size in sizes if isinstance(size, int))
    read = found.stored_bytes - looked_up
    return replace(found, parameters=parameters, step_bytes=read if read > 0 else None)


def _remarks(source: str) -> tuple[str, ...]:
    return (
        f"the architecture is unknown: parameters and bytes are from {source}; FLOPs and KV cache "
        "are unknown, so MBU of decode counts weights alone and MFU is unknown",
    )
