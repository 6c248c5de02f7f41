"""A report as plain data: tables and charts, which each format writes in its own way."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTable:
    """A table of text; columns are aligned right but for the first one and those of `words`."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: frozenset[str] = frozenset()
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportChart:
    """Lines over time; None is a gap. Times are Unix seconds."""

    title: str
    unit: str
    at: Sequence[float]
    lines: Mapping[str, Sequence[float | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportDocument:
    """A whole report. `warnings` come first."""

    title: str
    window: str
    warnings: Sequence[str]
    tables: Sequence[ReportTable]
    charts: Sequence[ReportChart]
