"""The audit as one JSON object."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime

from agent.analysis.audit.auditing import AuditLine, counts
from agent.records.audit import AuditEvidence


def audit_json(evidence: AuditEvidence, lines: Sequence[AuditLine]) -> str:
    """What was audited, how many lines have each finding, and the lines."""
    engine = evidence.engine
    return json.dumps(
        {
            "at": datetime.fromtimestamp(evidence.at, UTC).isoformat(),
            "engine": engine.url,
            "version": engine.version,
            "models": engine.models,
            "counts": counts(lines),
            "lines": [
                {
                    "area": line.check.area,
                    "check": line.check.name,
                    "finding": line.result.finding,
                    "seen": line.result.seen,
                    "why": line.check.why,
                    "change": line.result.change,
                }
                for line in lines
            ],
        },
        indent=2,
    )
