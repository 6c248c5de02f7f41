"""A table of a report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent.outputs.report.texts import moment

Json = Mapping[str, Any]
PERCENTILES = ("p50", "p95", "p99")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTable:
    """A table of text; columns are aligned right but for the first one and those of `words`."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: frozenset[str] = frozenset()
    note: str | None = None


def counted_note(part: Json) -> str:
    """Of which minutes figures are."""
    return f"Minutes from {moment(part['counted_from'])} to {moment(part['counted_until'])}."
