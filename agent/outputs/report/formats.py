"""A report as text for a terminal, as Markdown, HTML and JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from io import StringIO
from typing import Any, Literal

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from agent.outputs.report.document import (
    ReportDocument,
    ReportFigures,
)
from agent.outputs.report.tables import ReportTable
from agent.outputs.web import content_policy, vendored
from agent.terminal import TerminalConsole

# No shorter word is broken.
_UNBROKEN = len("undetermined")
# A longer cell gets a wide column in HTML.
_LONG = 60


def text(document: ReportDocument, width: int) -> str:
    """The document for a terminal of this many columns."""
    out = StringIO()
    console = TerminalConsole(file=out, width=width, color_system=None)
    console.print(f"{document.title}: {document.window}")
    for line in (*document.warnings, *document.sentences):
        console.print(Text(line))
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
        # If no cell breaks, rich would take width, give it back, and cut the last column.
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
    lines += [line for each in document.sentences for line in (_escaped(each), "")]
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


_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --line: #e3e6ea; --page: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --soft: #a2abb5; --line: #3a4148; --page: #16191d; }
}
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem;
       color: var(--ink); background: var(--page); }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
.warning { background: #ffe9a8; color: #1b1f24; padding: .5rem 1rem; font-weight: 600; }
.note { color: var(--soft); } .scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid var(--line); }
th { font-weight: 600; vertical-align: bottom; } td { vertical-align: top; }
.word { text-align: left; }
td.word { min-width: 9rem; } td.long { min-width: 20rem; }
td.word:first-child { min-width: 10.5rem; }
.sentence { max-width: 60rem; margin: .4rem 0; }
.first { font-size: 1.3rem; font-weight: 600; margin: 1rem 0 .6rem; }
.charts { display: grid; gap: 0 2rem;
          grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%), 1fr)); }
.u-legend :is(th, td) { border: 0; }
figure { margin: 1rem 0; min-width: 0; } figcaption { font-weight: 600; }
"""

_SCRIPT = """
"use strict";
const charts = JSON.parse(document.getElementById("charts").textContent);
const colours = ["#2f7ed8", "#d9622b", "#2a9d5c", "#9b59b6", "#b8860b", "#c0392b"];
const style = getComputedStyle(document.documentElement);
const ink = style.getPropertyValue("--soft"), line = style.getPropertyValue("--line");
const axis = {stroke: ink, grid: {stroke: line, width: 1}, ticks: {stroke: line}};
const utc = (at) => uPlot.tzDate(new Date(1000 * at), "Etc/UTC");
const clock = uPlot.fmtDate("{YYYY}-{MM}-{DD} {HH}:{mm} UTC");
const DAY_S = 86400;
const times = (plot, ticks, _, __, incr) => {
  const format = uPlot.fmtDate(incr >= DAY_S ? "{MM}-{DD}" : "{HH}:{mm}");
  return ticks.map((at) => format(utc(at)));
};
for (const [index, chart] of charts.entries()) {
  const at = document.getElementById("chart-" + index);
  const value = (_, each, __, at) => at == null ? "" : each == null ? "unknown"
    : each.toLocaleString("en", {maximumSignificantDigits: 4}) + " " + chart.unit;
  const series = Object.keys(chart.lines).map((label, n) => ({
    label, stroke: colours[n % colours.length], width: 1.5, points: {size: 4}, value,
  })).concat(Object.keys(chart.limits).map((label) => ({
    label, stroke: ink, width: 1.5, dash: [6, 4], points: {show: false}, value,
  })));
  const flat = (limit) => chart.at.map(() => limit);
  const limits = Object.values(chart.limits), most = Math.max(0, ...limits);
  const plot = new uPlot({
    width: at.clientWidth, height: 240, tzDate: utc,
    axes: [{...axis, values: times}, {...axis, size: 70}],
    scales: {y: {range: (_, low, high) => [0, 1.05 * Math.max(high ?? 0, most) || 1]}},
    series: [{value: (_, at) => at == null ? "" : clock(utc(at))}, ...series],
  }, [chart.at, ...Object.values(chart.lines), ...limits.map(flat)], at);
  addEventListener("resize", () => plot.setSize({width: at.clientWidth, height: 240}));
}
"""


def html_page(document: ReportDocument) -> str:
    """The whole file. Its policy allows its own script and style alone, and no request."""
    page = "".join(
        (
            f"<title>{escape(document.title)}</title>",
            f"<style>{vendored('uplot.css')}{_STYLE}</style></head><body>",
            f'<h1>{escape(document.title)}</h1><p class="note">{escape(document.window)}</p>',
            *(f'<p class="warning">{escape(each)}</p>' for each in document.warnings),
            *_sentences(document.sentences),
            f'<div class="charts">{"".join(_figures(document))}</div>',
            *map(_table, document.tables),
            f'<script type="application/json" id="charts">{_charts(document)}</script>',
            f"<script>{vendored('uplot.js')}</script><script>{_SCRIPT}</script>",
        )
    )
    allowed = content_policy(page, in_file=True)
    policy = f'<meta http-equiv="Content-Security-Policy" content="{allowed}">'
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    return f'<!doctype html>\n<html lang="en"><head>{head}{policy}{page}</body></html>\n'


def _sentences(sentences: Sequence[str]) -> list[str]:
    """The first is the one that everybody reads."""
    kinds = ["first", *[""] * len(sentences)]
    return [
        f'<p class="{kind} sentence">{_coded(each)}</p>'
        for kind, each in zip(kinds, sentences, strict=False)
    ]


def _coded(text: str) -> str:
    """Text with `code` between backticks."""
    parts = [escape(each) for each in text.split("`")]
    return "".join(f"<code>{each}</code>" if at % 2 else each for at, each in enumerate(parts))


def _figures(document: ReportDocument) -> list[str]:
    return [
        f"<figure><figcaption>{escape(chart.title)}, {escape(chart.unit)}</figcaption>"
        f'<div id="chart-{number}" role="img" aria-label="{escape(chart.title)} over time"></div>'
        "</figure>"
        for number, chart in enumerate(document.charts)
    ]


def _table(table: ReportTable) -> str:
    left = [number == 0 or name in table.words for number, name in enumerate(table.columns)]
    head = _cells("th", table.columns, left)
    rows = "".join(f"<tr>{_cells('td', row, left)}</tr>" for row in table.rows)
    note = "" if table.note is None else f'<p class="note">{escape(table.note)}</p>'
    return (
        f'<h2>{escape(table.title)}</h2><div class="scroll" tabindex="0" role="region" '
        f'aria-label="{escape(table.title)}"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{note}"
    )


def _cells(tag: str, cells: Sequence[str], left: Sequence[bool]) -> str:
    scope = ' scope="col"' if tag == "th" else ""
    kinds = [
        f' class="word{" long" if len(cell) > _LONG else ""}"' if words else ""
        for cell, words in zip(cells, left, strict=True)
    ]
    return "".join(
        f"<{tag}{scope}{kind}>{escape(cell)}</{tag}>"
        for cell, kind in zip(cells, kinds, strict=True)
    )


def _charts(document: ReportDocument) -> str:
    """JSON that ends no script: names in it are of clients."""
    return json.dumps([asdict(chart) for chart in document.charts]).replace("<", "\\u003c")
