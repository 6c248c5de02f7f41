"""What a row of an exporter's page is about: a GPU, or a MIG instance of one."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

_UUID_LABELS = ("UUID", "uuid", "gpu_uuid")
_NAME_LABELS = ("modelName", "model_name")
_POD_LABELS = ("pod", "pod_name", "exported_pod", "pod_uid", "vgpu")
# As the database keeps it; NVIDIA's own are shorter (NVML_DEVICE_NAME_V2_BUFFER_SIZE is 96).
LONGEST_NAME = 100
_HEX_UUID = re.compile(
    r"(?:GPU-)?([0-9a-f]{8})-?([0-9a-f]{4})-?([0-9a-f]{4})-?([0-9a-f]{4})-?([0-9a-f]{12})",
    re.IGNORECASE | re.ASCII,
)
# NVML_DEVICE_UUID_V2_BUFFER_SIZE (nvml.h).
_LONGEST_UUID = 96
_INDEX = re.compile(r"(?:nvidia)?([0-9]{1,6})", re.ASCII)
UNKNOWN_INDEX = -1


class RowUnusable(Exception):
    """A row that is about no GPU as a whole; `reason` is a short word for counting."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Entity:
    """A GPU by its UUID, or the MIG instance of it with this number."""

    gpu: str
    instance: int | None = None


def entity_of(labels: Mapping[str, str]) -> Entity:
    """Whom a row is about. Raises RowUnusable (`uuid_*`, `link_row`, `instance_malformed`)."""
    if labels.get("nvlink"):
        raise RowUnusable("link_row")
    return Entity(_gpu(_first(labels, _UUID_LABELS)), _instance(labels))


def _gpu(told: str) -> str:
    told = told.strip()
    if not told:
        raise RowUnusable("uuid_missing")
    if len(told) > _LONGEST_UUID:
        raise RowUnusable("uuid_malformed")
    parts = _HEX_UUID.fullmatch(told)
    # NVML's own spelling, so that both sources mean one GPU by one word.
    return f"GPU-{'-'.join(parts.groups()).lower()}" if parts else told


def _instance(labels: Mapping[str, str]) -> int | None:
    told = labels.get("GPU_I_ID", "")
    if not told and not labels.get("GPU_I_PROFILE"):
        return None
    if not (told.isascii() and told.isdigit() and len(told) <= 4):
        raise RowUnusable("instance_malformed")
    return int(told)


def name_of(labels: Mapping[str, str]) -> str:
    """The model of the GPU, cut where it is too long, empty where the row does not tell it."""
    return _first(labels, _NAME_LABELS)[:LONGEST_NAME]


def index_of(labels: Mapping[str, str]) -> int:
    """The index of the GPU on its own host, UNKNOWN_INDEX where the row does not tell it."""
    for label in ("gpu", "device"):
        found = _INDEX.fullmatch(labels.get(label, ""))
        if found:
            return int(found[1])
    return UNKNOWN_INDEX


def pod_labels(labels: Mapping[str, str]) -> int:
    """How many labels tie the row to a pod: with sharing, such a row can be that pod's part."""
    return sum(1 for label in _POD_LABELS if labels.get(label))


def _first(labels: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((value for name in names if (value := labels.get(name))), "")
