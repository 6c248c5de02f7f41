"""The audit of a deployment as text for a terminal and as JSON."""

from agent.outputs.audit.audit_json import audit_json
from agent.outputs.audit.audit_text import print_audit

__all__ = ["audit_json", "print_audit"]
