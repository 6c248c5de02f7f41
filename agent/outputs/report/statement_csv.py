"""A statement as CSV, and in the other formats of a report."""

import csv
import re
from collections.abc import Sequence
from dataclasses import asdict, fields
from io import StringIO
from typing import Any

from agent.analysis.statement import BillParts, GroupSpending, StatementLine
from agent.outputs.report.document import ReportTable
from agent.outputs.report.figures import Json
from agent.outputs.report.number_texts import number, printable

_COLUMNS = tuple(field.name for field in fields(StatementLine))
# OWASP, "CSV Injection": a spreadsheet takes a cell that begins so for a formula, also with
# full-width or small signs, and behind spaces and quotes. Where a semicolon separates its cells, a
# cell also begins inside a quoted text of ours.
_SIGNS = r"[\s\"']*[=+\-@\uff1d\uff0b\uff0d\uff20\ufe66\ufe62\ufe63\ufe6b]"
_FORMULA = re.compile(rf"\A(?=[\t\r\n]|{_SIGNS})|(?<=[;|\t\r\n])(?={_SIGNS})")


def groups_of(breakdown: Json) -> list[GroupSpending]:
    """What each group of a breakdown with costs had and cost."""
    return [_group(each) for each in breakdown["groups"]]


def _group(each: Json) -> GroupSpending:
    cost: Json = each["cost"] or {}
    return GroupSpending(
        group=each["group"],
        requests=each["requests"],
        input_tokens=_tokens(each, "input_tokens_per_s"),
        output_tokens=_tokens(each, "output_tokens_per_s"),
        gpu_hours=cost.get("gpu_hours"),
        cost_usd=cost.get("cost_usd"),
    )


def _tokens(each: Json, rate: str) -> float | None:
    return None if each[rate] is None else round(each[rate] * each["covered_s"])


def bill_of(summary: Json) -> BillParts | None:
    """The bill of a window; None without a price."""
    cost, ledger = summary["cost"], summary["ledger"]
    if cost is None:
        return None
    return BillParts(
        bill_usd=cost["bill_usd"],
        rows_usd=cost["prefill_usd"] + cost["decode_usd"],
        unaccounted_usd=cost["unseen_usd"],
        idle_usd=cost["idle_usd"],
        unread_usd=cost["unknown_usd"],
        gpu_hours=cost["gpu_hours"],
        unaccounted_requests=_unaccounted(ledger, "requests"),
        unaccounted_input_tokens=_unaccounted(ledger, "input_tokens"),
        unaccounted_output_tokens=_unaccounted(ledger, "output_tokens"),
    )


def _unaccounted(ledger: Json | None, figure: str) -> float | None:
    """Closed and open minutes together, as the cost of both is."""
    if ledger is None:
        return None
    closed, still_open = ledger["unaccounted"][figure], ledger["open"][figure]
    return None if closed is None or still_open is None else closed + still_open


def as_csv(lines: Sequence[StatementLine]) -> str:
    """The lines as CSV; an unknown figure is empty."""
    out = StringIO()
    writer = csv.writer(out, lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writerow(_COLUMNS)
    for line in lines:
        values = asdict(line) | {"group": _harmless(line.group)}
        writer.writerow(["" if values[name] is None else values[name] for name in _COLUMNS])
    return out.getvalue()


def _harmless(name: str | None) -> str | None:
    if name is None:
        return None
    return _FORMULA.sub("'", name)


def as_table(lines: Sequence[StatementLine], notes: Sequence[str]) -> ReportTable:
    """The lines as a table of a document."""
    rows = [
        [
            line.line,
            "" if line.group is None else printable(line.group),
            *(_shown(getattr(line, name)) for name in _COLUMNS[2:-2]),
            "" if line.gpu_hours is None else number(line.gpu_hours, 4),
            "" if line.cost_usd is None else f"{line.cost_usd:,.6f}",
        ]
        for line in lines
    ]
    return ReportTable(
        title="Statement",
        columns=("line", "name", "requests", "input tokens", "output tokens", "GPU hours", "USD"),
        rows=rows,
        words=frozenset(("name",)),
        note="; ".join(notes),
    )


def as_values(lines: Sequence[StatementLine]) -> list[dict[str, Any]]:
    """The lines for JSON; dollars are text, so that they add up exactly."""
    return [
        asdict(line) | {"cost_usd": None if line.cost_usd is None else str(line.cost_usd)}
        for line in lines
    ]


def _shown(value: float | None) -> str:
    return "" if value is None else number(value)
