"""The audit of a live deployment: one small function for each check."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent.analysis.audit.checks import AuditCheck, AuditFinding, CheckResult
from agent.analysis.audit.gpu_checks import CACHE_CHECKS, GPU_CHECKS
from agent.analysis.audit.operation_checks import SAFETY_CHECKS, WATCHING_CHECKS
from agent.analysis.audit.traffic_checks import TRAFFIC_CHECKS
from agent.records.audit import AuditEvidence

CHECKS: tuple[AuditCheck, ...] = (
    *CACHE_CHECKS,
    *TRAFFIC_CHECKS,
    *WATCHING_CHECKS,
    *SAFETY_CHECKS,
    *GPU_CHECKS,
)


@dataclass(frozen=True, slots=True)
class AuditLine:
    """A check with its result."""

    check: AuditCheck
    result: CheckResult


def audit(evidence: AuditEvidence) -> Sequence[AuditLine]:
    """One line for each check, in the order of the table."""
    return [AuditLine(check, check.judge(evidence)) for check in CHECKS]


def counts(lines: Sequence[AuditLine]) -> Mapping[AuditFinding, int]:
    """How many lines have each finding."""
    found = Counter(line.result.finding for line in lines)
    return {finding: found[finding] for finding in AuditFinding}
