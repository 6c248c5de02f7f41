"""A comparison for a terminal."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent.analysis.comparison.comparing import ComparedLine, Comparison, Outcome
from agent.outputs.comparison import wording

_STYLES = {Outcome.BETTER: "green", Outcome.WORSE: "bold red", Outcome.LOAD_CHANGED: "yellow"}


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the verdict, then what was compared, then all figures."""
    style = _STYLES.get(comparison.outcome, "bold")
    console.print(Text(wording.headline(comparison), style=style))
    for sentence in wording.explanations(comparison):
        console.print(Text(sentence))
    console.print()
    for name, run in (("before", comparison.before), ("after", comparison.after)):
        console.print(Text(f"{name:7} {wording.described(run)}"))
    console.print(_table("Load", comparison.load))
    console.print(_table("Figures", comparison.lines))
    _print_causes(comparison, console)
    console.print(Text(wording.METHOD, style="dim"))


def _table(title: str, lines: Sequence[ComparedLine]) -> Table:
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    for header in wording.HEADERS:
        is_number = header in wording.HEADERS[1:4]
        table.add_column(header, justify="right" if is_number else "left")
    for row in wording.cells(lines):
        table.add_row(*(Text(cell) for cell in row), style=_STYLES.get(Outcome(row.verdict)))
    return table


def _print_causes(comparison: Comparison, console: Console) -> None:
    found = wording.causes(comparison)
    if not found:
        return
    table = Table(
        title="Missed requests by first cause, % of all",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("cause")
    for name in ("before", "after"):
        table.add_column(name, justify="right")
    for row in found:
        table.add_row(*row)
    console.print(table)
