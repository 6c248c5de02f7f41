"""The Xid errors of NVIDIA's driver that matter to an operator, with meaning and grade.

Both are from NVIDIA's Xid catalogue as carried by gpud
(leptonai/gpud: components/accelerator/nvidia/xid/catalog_generated.go, 2025-10). CRITICAL asks for
a reset, a restart of the machine or an inspection. APPLICATION is an error of the program.
"""

from dataclasses import dataclass
from enum import StrEnum


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
