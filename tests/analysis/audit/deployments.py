"""A case of a check, and deployments that many cases share."""

from typing import NamedTuple

from agent.analysis.audit.checks import AuditFinding
from agent.catalog import engine_facts as fact
from agent.records.audit import (
    AuditEvidence,
    EvidencePart,
)
from tests.analysis.audit.evidence import (
    command_line,
    engine,
    evidence,
    with_facts,
)


class AuditCase(NamedTuple):
    """What a check finds; `seen` and `change` are parts of its texts."""

    finding: AuditFinding
    of: AuditEvidence
    seen: str
    change: str | None = None


def passes(of: AuditEvidence, seen: str) -> AuditCase:
    return AuditCase(AuditFinding.PASS, of, seen)


def warns(of: AuditEvidence, seen: str, change: str | None = None) -> AuditCase:
    return AuditCase(AuditFinding.WARN, of, seen, change)


def fails(of: AuditEvidence, seen: str, change: str) -> AuditCase:
    return AuditCase(AuditFinding.FAIL, of, seen, change)


def unknown(of: AuditEvidence, seen: str, change: str | None = None) -> AuditCase:
    return AuditCase(AuditFinding.UNKNOWN, of, seen, change)


NO_EXPOSITION = evidence(
    engine=engine(sample=None, cache_config={}, answered=None, input_lengths=None),
    unread={EvidencePart.EXPOSITION: "/metrics has no series of a known engine (no_known_series)"},
)
NO_FLAGS = evidence(
    command_line=None, unread={EvidencePart.COMMAND_LINE: "the engine is not on this machine"}
)
NO_STATISTICS = evidence(
    engine=engine(sample=None, cache_config={}, answered=None, input_lengths=None),
    command_line=command_line(disable_log_stats=""),
    agent=None,
    unread={EvidencePart.EXPOSITION: "/metrics has no series of a known engine"},
)
OFF = "the engine's statistics are off (--disable-log-stats)"
NO_LIMITS = command_line(limits={})
FILE_FLAGS = evidence(command_line=command_line(whole=False, limits={}))
NO_GPUS = evidence(gpus=None, unread={EvidencePart.GPUS: "no GPU can be read: no_library"})
IDLE = with_facts(
    {(fact.REQUESTS_FINISHED, ("stop",)): 0.0, fact.REQUESTS_WAITING: 0.0}, agent=None
)
