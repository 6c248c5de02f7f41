"""The size of a model's weights, from the safetensors files beside its config.json."""

import struct
from pathlib import Path

from agent.settings.named_files import read_at_once, read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# A line for each tensor.
_INDEX_BYTES = 64 * 1024 * 1024
_LARGEST = 2**63

# A safetensors file begins with the length of its header.
_LENGTH = struct.Struct("<Q")


def stored_bytes(folder: Path) -> int | None:
    """Bytes of all tensors in the folder's safetensors files; None if it is unknown."""
    try:
        if (folder / INDEX).is_file():
            return _indexed(folder / INDEX)
        return _single(folder / SINGLE) if (folder / SINGLE).is_file() else None
    except (OSError, ValueError, LookupError, TypeError, OverflowError, struct.error):
        # A half-downloaded file must not hide what the config has.
        return None


def _indexed(index: Path) -> int | None:
    size = int(read_json(read_at_once(index, _INDEX_BYTES))["metadata"]["total_size"])
    return size if 0 < size < _LARGEST else None


def _single(path: Path) -> int | None:
    with path.open("rb") as file:
        (header,) = _LENGTH.unpack(file.read(_LENGTH.size))
    size: int = path.stat().st_size - _LENGTH.size - header
    return size if size > 0 else None
