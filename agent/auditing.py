"""The part of the `check` command that audits a live deployment."""

import logging
import sys
from pathlib import Path

from agent.analysis.audit.auditing import audit, counts
from agent.analysis.audit.checks import AuditFinding
from agent.audited_deployment import AuditOptions, gather
from agent.option_files import secret_in
from agent.outputs.audit import audit_json, print_audit
from agent.settings import Settings
from agent.terminal import TerminalConsole, echo


def audit_deployment(
    url: str,
    settings: Settings,
    *,
    agent_url: str | None,
    token_file: Path | None,
    key_file: Path | None,
    send: bool,
    as_json: bool,
) -> int:
    """Print the audit; 1 where a line fails, else 0. Raises EngineUnreachable, SettingsInvalid."""
    # What could not be read is in the lines.
    logging.getLogger("agent").addHandler(logging.NullHandler())
    progress = TerminalConsole(file=sys.stderr)
    with progress.status("reading the settings") as status:
        evidence = gather(
            AuditOptions(
                url=url,
                settings=settings,
                step=status.update,
                agent_url=agent_url,
                token_file=token_file,
                key=None if key_file is None else secret_in("--key-file", key_file),
                send=send,
            )
        )
    lines = audit(evidence)
    if as_json:
        echo(audit_json(evidence, lines))
    else:
        print_audit(evidence, lines, TerminalConsole())
    return 1 if counts(lines)[AuditFinding.FAIL] else 0
