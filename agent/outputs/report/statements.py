"""A statement: its lines of the API's figures, as CSV, in the columns of FOCUS, and as a table."""

import csv
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from io import StringIO
from typing import Any

from agent.analysis.cost.bill import BillParts, GroupSpending, StatementLine
from agent.outputs.report.tables import Json, ReportTable
from agent.outputs.report.texts import number_text, printable

CURRENCY = "USD"
_PROVIDER = "goodput-agent"
_COLUMNS = tuple(field.name for field in fields(StatementLine))
_DESCRIPTIONS = {
    "unaccounted": "Work that engines counted and no request has",
    "idle": "Time of GPUs without work",
    "not read": "Time in which engines were not read",
    "other requests": "Requests that no line names",
}
# OWASP, "CSV Injection": a spreadsheet takes a cell that begins so for a formula, also with
# full-width or small signs, and behind spaces and quotes. If a semicolon separates its cells, a
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


@dataclass(frozen=True, slots=True)
class StatementPeriod:
    """The time that a statement is of; UTC, in ISO 8601."""

    begin: str
    end: str


def period_of(summary: Json) -> StatementPeriod:
    """The window of a summary."""
    moments = (datetime.fromisoformat(summary[f"window_{end}"]) for end in ("from", "until"))
    return StatementPeriod(*(f"{at.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}" for at in moments))


def as_csv(lines: Sequence[StatementLine], period: StatementPeriod) -> str:
    """The lines as CSV; an unknown figure is empty."""
    of = {"period_begin": period.begin, "period_end": period.end, "currency": CURRENCY}
    rows = [asdict(line) | {"group": _harmless(line.group)} | of for line in lines]
    return _csv((*_COLUMNS, *of), rows)


def as_focus(by: str, lines: Sequence[StatementLine], period: StatementPeriod) -> str:
    """What was charged, in the columns of FOCUS 1.2, as CSV.

    The bill is their sum, and so no charge. A line without a cost is in `other requests`.
    """
    charges = [each for each in lines if each.line != "bill" and each.cost_usd is not None]
    columns = tuple(_charge(by, StatementLine(line=""), period))
    return _csv(columns, [_charge(by, each, period) for each in charges])


def _csv(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    out = StringIO()
    writer = csv.writer(out, lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writerow(columns)
    for row in rows:
        writer.writerow(["" if row[name] is None else row[name] for name in columns])
    return out.getvalue()


def _charge(by: str, line: StatementLine, period: StatementPeriod) -> dict[str, Any]:
    group = _harmless(line.group) if line.line == by else None
    # One price, without discounts.
    costs = ("BilledCost", "ContractedCost", "EffectiveCost", "ListCost")
    parties = ("InvoiceIssuerName", "ProviderName", "PublisherName")
    hours = None if line.gpu_hours is None else round(line.gpu_hours, 6)
    return {
        **dict.fromkeys(costs, line.cost_usd),
        "BillingAccountId": _PROVIDER,
        "BillingAccountName": _PROVIDER,
        "BillingCurrency": CURRENCY,
        "BillingPeriodStart": period.begin,
        "BillingPeriodEnd": period.end,
        "ChargePeriodStart": period.begin,
        "ChargePeriodEnd": period.end,
        "ChargeCategory": "Usage",
        "ChargeClass": None,
        "ChargeDescription": _DESCRIPTIONS.get(line.line, f"LLM requests of one {by}"),
        "ChargeFrequency": "Usage-Based",
        "ConsumedQuantity": hours,
        "ConsumedUnit": None if hours is None else "GPU Hours",
        "PricingQuantity": hours,
        "PricingUnit": None if hours is None else "GPU Hours",
        **dict.fromkeys(parties, _PROVIDER),
        "ServiceCategory": "AI and Machine Learning",
        "ServiceSubcategory": "Generative AI",
        "ServiceName": "LLM inference",
        "SubAccountId": group,
        "SubAccountName": group,
        "Tags": json.dumps({} if group is None else {by: group}),
        "x_Line": line.line,
        "x_Requests": line.requests,
        "x_InputTokens": line.input_tokens,
        "x_OutputTokens": line.output_tokens,
    }


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
            "" if line.gpu_hours is None else number_text(line.gpu_hours, 4),
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
    return "" if value is None else number_text(value)
