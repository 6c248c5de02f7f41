"""A report as one HTML file with its charts: it needs no network and can be mailed."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from html import escape

from agent.outputs.report.document import ReportDocument, ReportTable
from agent.outputs.web import content_policy, vendored

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
th { font-weight: 600; } .word { text-align: left; overflow-wrap: anywhere; }
figure { margin: 1.5rem 0; } figcaption { font-weight: 600; }
"""

_SCRIPT = """
"use strict";
const charts = JSON.parse(document.getElementById("charts").textContent);
const colours = ["#2f7ed8", "#d9622b", "#2a9d5c", "#9b59b6", "#b8860b", "#c0392b"];
const style = getComputedStyle(document.documentElement);
const ink = style.getPropertyValue("--soft"), line = style.getPropertyValue("--line");
const axis = {stroke: ink, grid: {stroke: line, width: 1}, ticks: {stroke: line}};
for (const [place, chart] of charts.entries()) {
  const at = document.getElementById("chart-" + place);
  const series = Object.keys(chart.lines).map((label, n) => ({
    label, stroke: colours[n % colours.length], width: 1.5, points: {size: 4},
    value: (_, value) => value == null ? "unknown" : value.toLocaleString("en",
      {maximumSignificantDigits: 4}),
  }));
  const plot = new uPlot({
    width: at.clientWidth, height: 240, axes: [axis, {...axis, size: 70}],
    scales: {y: {range: (_, low, high) => [0, high == null || high <= 0 ? 1 : 1.05 * high]}},
    series: [{}, ...series],
  }, [chart.at, ...Object.values(chart.lines)], at);
  addEventListener("resize", () => plot.setSize({width: at.clientWidth, height: 240}));
}
"""


def html_page(document: ReportDocument) -> str:
    """The whole file. Its policy allows its own script and style alone, and no request."""
    page = "".join(
        (
            f"<title>{escape(document.title)}</title>",
            f"<style>{vendored('uplot.css')}{_STYLE}</style></head><body>",
            f"<h1>{escape(document.title)}</h1><p>{escape(document.window)}</p>",
            *(f'<p class="warning">{escape(each)}</p>' for each in document.warnings),
            *_figures(document),
            *map(_table, document.tables),
            f'<script type="application/json" id="charts">{_charts(document)}</script>',
            f"<script>{vendored('uplot.js')}</script><script>{_SCRIPT}</script>",
        )
    )
    allowed = content_policy(page, in_file=True)
    policy = f'<meta http-equiv="Content-Security-Policy" content="{allowed}">'
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    return f'<!doctype html>\n<html lang="en"><head>{head}{policy}{page}</body></html>\n'


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
    kinds = [' class="word"' if words else "" for words in left]
    return "".join(
        f"<{tag}{scope}{kind}>{escape(cell)}</{tag}>"
        for cell, kind in zip(cells, kinds, strict=True)
    )


def _charts(document: ReportDocument) -> str:
    """JSON that ends no script: names in it are of clients."""
    return json.dumps([asdict(chart) for chart in document.charts]).replace("<", "\\u003c")
