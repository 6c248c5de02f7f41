"""The audit of a deployment as text for a terminal and as JSON."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent.analysis.audit import AuditLine, counts
from agent.analysis.audit.checks import AuditFinding, CheckResult
from agent.analysis.setup_steps import SetupStep
from agent.records.audit import AuditEvidence


def audit_json(
    evidence: AuditEvidence, lines: Sequence[AuditLine], steps: Sequence[SetupStep] = ()
) -> str:
    """What was audited, how many lines have each finding, the lines, and the steps of its setup."""
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
            "setup": [asdict(step) for step in steps],
        },
        indent=2,
    )


_STYLES = {
    AuditFinding.PASS: "green",
    AuditFinding.WARN: "yellow",
    AuditFinding.FAIL: "bold red",
    AuditFinding.UNKNOWN: "dim",
}
_BAD = (AuditFinding.WARN, AuditFinding.FAIL)
_FINDING_WIDTH = max(map(len, AuditFinding))


def print_audit(
    evidence: AuditEvidence,
    lines: Sequence[AuditLine],
    console: Console,
    steps: Sequence[SetupStep] = (),
) -> None:
    """Print all lines by area, the steps of the setup, then how many lines have each finding."""
    engine = evidence.engine
    kind = evidence.dialect or "an engine"
    model = ", ".join(engine.models) or "unknown"
    version = engine.version or "of an unknown version"
    console.print(_text(f"{engine.url}: {kind} {version}, model {model}", "bold"))
    # One width for all areas, so that their columns agree.
    width = max(len(line.check.name) for line in lines)
    for area, of_area in groupby(_without_repetition(lines), key=lambda line: line.check.area):
        console.print()
        console.print(_text(area, "bold"))
        console.print(_table(list(of_area), width))
    console.print()
    if steps:
        print_setup(steps, console)
    found = counts(lines)
    console.print(Text(", ".join(f"{found[each]} {each}" for each in AuditFinding)))


def _without_repetition(lines: Sequence[AuditLine]) -> Iterator[AuditLine]:
    """The lines, of which an unknown one names the first with the same reason."""
    first: dict[CheckResult, str] = {}
    for line in lines:
        result = line.result
        if result.finding is AuditFinding.UNKNOWN and result in first:
            yield replace(line, result=replace(result, seen=f"see {first[result]}", change=None))
        else:
            first.setdefault(result, line.check.name)
            yield line


def print_setup(steps: Sequence[SetupStep], console: Console) -> None:
    """Print the steps. Lines to paste are never broken."""
    console.print(_text("Setup", "bold"))
    done = ", ".join(step.name for step in steps if step.state == "done")
    console.print(_text(f"done: {done or 'nothing yet'}", "green" if done else ""))
    for step in steps:
        if step.state == "missing":
            console.print(_text(f"missing: {step.name}").append(f"; it shows {step.shows}", "dim"))
            for action in step.actions:
                console.print(_text(f"  {action.where}" + (":" if action.lines else "")))
                for line in action.lines:
                    console.print(_text(f"    {line}"), soft_wrap=True)
    console.print()


def _table(lines: Sequence[AuditLine], width: int) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(width=_FINDING_WIDTH, no_wrap=True)
    table.add_column(width=width, no_wrap=True)
    table.add_column(overflow="fold")
    for line in lines:
        result = line.result
        table.add_row(
            Text(result.finding, _STYLES[result.finding]), Text(line.check.name), _details(line)
        )
    return table


def _details(line: AuditLine) -> Text:
    result = line.result
    details = _text(result.seen)
    if result.finding in _BAD:
        details.append(f"\nwhy: {line.check.why}", "dim")
    if result.change is not None:
        details.append("\nchange: ", "bold")
        details.append_text(_text(result.change))
    return details


def _text(value: str, style: str = "") -> Text:
    """A text without what an engine may have put in to steer the terminal."""
    shown = (each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in value)
    return Text("".join(shown), style)
