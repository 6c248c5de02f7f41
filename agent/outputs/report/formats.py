"""A report as text for a terminal, as Markdown and as JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from io import StringIO
from typing import Any, Literal

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from agent.outputs.report.document import ReportDocument, ReportTable
from agent.outputs.report.figures import ReportFigures
from agent.terminal import TerminalConsole

# No shorter word is broken.
_UNBROKEN = len("undetermined")


def text(document: ReportDocument, width: int) -> str:
    """The document for a terminal of this many columns."""
    out = StringIO()
    console = TerminalConsole(file=out, width=width, color_system=None)
    console.print(f"{document.title}: {document.window}")
    for warning in document.warnings:
        console.print(warning)
    for table in document.tables:
        console.print()
        console.print(table.title.upper())
        console.print(_rich(table))
        if table.note is not None:
            console.print(table.note)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _rich(table: ReportTable) -> Table:
    made = Table(box=SIMPLE, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for number, name in enumerate(table.columns):
        words = number == 0 or name in table.words
        shown = [row[number] for row in table.rows]
        # Long names break, so that figures do not.
        parts = " ".join((name, *shown)).split()
        least = max((len(part) for part in parts if len(part) <= _UNBROKEN), default=1)
        side: Literal["left", "right"] = "left" if words else "right"
        # Where no cell breaks, rich would take width, give it back, and cut the last column.
        whole = max(map(len, (name, *shown))) <= least
        made.add_column(Text(name), justify=side, overflow="fold", min_width=least, no_wrap=whole)
    for row in table.rows:
        made.add_row(*map(Text, row))
    return made


def markdown(document: ReportDocument) -> str:
    """The document as it reads in a pull request."""
    lines = [f"# {document.title}", "", _escaped(document.window), ""]
    for warning in document.warnings:
        lines += [f"**{_escaped(warning)}**", ""]
    for table in document.tables:
        lines += [f"## {table.title}", "", *_markdown_table(table), ""]
        if table.note is not None:
            lines += [_escaped(table.note), ""]
    return "\n".join(lines)


def _markdown_table(table: ReportTable) -> list[str]:
    ruler = [
        "---" if number == 0 or name in table.words else "---:"
        for number, name in enumerate(table.columns)
    ]
    rows = [[_escaped(cell) for cell in row] for row in (table.columns, *table.rows)]
    return [f"| {' | '.join(row)} |" for row in (rows[0], ruler, *rows[1:])]


def _escaped(value: str) -> str:
    """Text without a meaning in Markdown or HTML."""
    marked = "".join(f"\\{each}" if each in "\\`*_[]|#~$@" else each for each in value)
    return marked.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def as_json(figures: ReportFigures) -> str:
    """The responses of the API that the report is made of."""
    return values_json(asdict(figures))


def values_json(values: Mapping[str, Any]) -> str:
    """Values as JSON for a pipeline."""
    return json.dumps(values, indent=2) + "\n"
