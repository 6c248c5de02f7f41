"""A check of the audit and its result."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from agent.records.audit import AuditEvidence


class AuditFinding(StrEnum):
    """What a check found; it is unknown where evidence is missing."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The finding, the value seen (or why it is unknown), and what to change."""

    finding: AuditFinding
    seen: str
    change: str | None = None


@dataclass(frozen=True, slots=True)
class AuditCheck:
    """One row of the audit: its area and name, why it matters, and the function that judges."""

    area: str
    name: str
    why: str
    judge: Callable[[AuditEvidence], CheckResult]


def passed(seen: str) -> CheckResult:
    """All is well."""
    return CheckResult(AuditFinding.PASS, seen)


def warned(seen: str, change: str) -> CheckResult:
    """It may cost something, or nobody can tell whether it is meant."""
    return CheckResult(AuditFinding.WARN, seen, change)


def failed(seen: str, change: str) -> CheckResult:
    """It does harm now."""
    return CheckResult(AuditFinding.FAIL, seen, change)


def unknown(reason: str, change: str | None = None) -> CheckResult:
    """Evidence is missing; `change` says how to give it."""
    return CheckResult(AuditFinding.UNKNOWN, reason, change)
