"""Xid errors of NVIDIA's driver, and reasons why a GPU cannot be read now.

Meaning and grade of an Xid are from NVIDIA's Xid catalogue as carried by gpud
(leptonai/gpud: components/accelerator/nvidia/xid/catalog_generated.go, 2025-10). CRITICAL asks for
a reset, a restart of the machine or an inspection. APPLICATION is an error of the program."""

from dataclasses import dataclass
from enum import StrEnum

from agent.catalog.reasons import INTERNAL, ExpositionFault, FetchFailed

GPU_MISSING = "gpu_missing"
GPU_SILENT = "gpu_silent"
GPU_UNOPENED = "gpu_unopened"
# The source works and finds no GPU.
NO_GPU = "no_gpu"
NOT_ANSWERING = "not_answering"
INIT_FAILED = "init_failed"
EXPORTER_STALE = "exporter_stale"

# The GPU is gone or broken. `gpu_unopened` is a GPU that cannot be opened beside GPUs that can.
LOST = frozenset(
    {"gpu_lost", "gpu_reset_required", "gpu_not_found", GPU_MISSING, GPU_SILENT, NO_GPU}
    | {GPU_UNOPENED}
)

# The driver does not return from a call: it hangs, or it is slow.
HELD = frozenset({NOT_ANSWERING})

# The agent cannot see any GPU, broken or not. NVML is absent or out of reach, as in a container
# that lost its devices (`nvml_unknown_error`); the exporter cannot be read, or its values do not
# change; or the agent failed.
UNSEEN = (
    "no_package",
    "wrong_package",
    "no_library",
    "no_driver",
    "no_permission",
    "driver_lost",
    "driver_mismatch",
    "nvml_unknown_error",
    INIT_FAILED,
    EXPORTER_STALE,
    INTERNAL,
    *(f"exporter_{reason}" for reason in (*FetchFailed, *ExpositionFault)),
)


class XidGrade(StrEnum):
    """How bad an Xid is, and whose error."""

    CRITICAL = "critical"
    WARNING = "warning"
    APPLICATION = "application"
    INFORMATION = "information"


@dataclass(frozen=True, slots=True)
class Xid:
    """One Xid by its number. `grade` is None for one that the catalogue lacks."""

    number: int
    grade: XidGrade | None
    meaning: str


_ROWS = (
    Xid(13, XidGrade.APPLICATION, "graphics engine exception"),
    Xid(31, XidGrade.APPLICATION, "GPU memory page fault, an illegal access"),
    Xid(43, XidGrade.APPLICATION, "GPU stopped processing after an error of the program"),
    Xid(45, XidGrade.INFORMATION, "clean-up after a kill or another Xid"),
    Xid(46, XidGrade.CRITICAL, "GPU stopped processing"),
    Xid(48, XidGrade.CRITICAL, "double-bit ECC error"),
    Xid(62, XidGrade.CRITICAL, "internal micro-controller halted"),
    Xid(63, XidGrade.WARNING, "memory row remapping or page retirement recorded"),
    Xid(64, XidGrade.CRITICAL, "memory row remapping or page retirement failed"),
    Xid(74, XidGrade.CRITICAL, "NVLink error"),
    Xid(79, XidGrade.CRITICAL, "GPU has fallen off the bus"),
    Xid(92, XidGrade.INFORMATION, "high rate of single-bit ECC errors"),
    Xid(94, XidGrade.WARNING, "contained ECC error"),
    Xid(95, XidGrade.CRITICAL, "uncontained ECC error"),
    Xid(109, XidGrade.CRITICAL, "context switch timed out"),
    Xid(119, XidGrade.CRITICAL, "GPU system processor did not answer"),
    Xid(120, XidGrade.CRITICAL, "GPU system processor error"),
    Xid(140, XidGrade.CRITICAL, "unrecovered ECC error"),
    Xid(154, XidGrade.INFORMATION, "recovery action changed"),
)

XIDS = {row.number: row for row in _ROWS}

# Published from zero at the start: increase() cannot see the first increment of a new series.
COUNTED_XIDS = tuple(
    row.number for row in _ROWS if row.grade in (XidGrade.CRITICAL, XidGrade.APPLICATION)
)


def known_xid(number: int) -> Xid:
    """The Xid with this number; without a grade if the catalogue lacks it."""
    return XIDS.get(number) or Xid(number, None, "of unknown meaning")
