"""A comparison as text for a terminal, as Markdown for a pull request, and as JSON."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from math import floor, isfinite, log10
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent.analysis.comparison.comparing import ComparedLine, Comparison, Outcome
from agent.analysis.comparison.decisive_periods import DecisivePeriod
from agent.analysis.comparison.facts import Fact, FirstFailures, MissedTarget
from agent.analysis.comparison.measures import Quantity
from agent.analysis.comparison.resampling import Interval
from agent.analysis.comparison.run_columns import FiguresSource, RunColumns, RunFigures
from agent.catalog.time_units import DAY_S, HOUR_S, MINUTE_S

UNKNOWN = "unknown"
# Causes below the first ones are hardly worth a line.
_CAUSES = 6

# The unit of a figure in words, and what the figure is multiplied by.
_UNITS = {
    Quantity.SECONDS: (", ms", 1000.0),
    Quantity.SHARE: (", %", 100.0),
    Quantity.REQUESTS_PER_S: (", requests/s", 1.0),
    Quantity.PER_HOUR: (" per hour", 1.0),
}


class Cells(NamedTuple):
    """One line of a table."""

    figure: str
    before: str
    after: str
    change: str
    verdict: str


HEADERS = Cells("figure", "before", "after", "change", "verdict")


def table_cells(lines: Sequence[ComparedLine]) -> list[Cells]:
    """The lines that either run knows."""
    return [
        Cells(
            figure_label(line),
            figure_text(line, line.before),
            figure_text(line, line.after),
            change_text(line),
            verdict,
        )
        for line in lines
        if line.before is not None or line.after is not None
        for verdict in (str(line.outcome),)
    ]


def unknown_figures(comparison: Comparison) -> list[str]:
    """The names of figures that neither run knows."""
    return [
        line.measure.name
        for line in (*comparison.load, *comparison.lines)
        if line.before is None and line.after is None
    ]


def figure_label(line: ComparedLine) -> str:
    """The name of a figure with its unit."""
    name, (unit, _) = line.measure.name, _UNITS.get(line.measure.quantity, ("", 1.0))
    return name if name.endswith(unit.removeprefix(", ")) else f"{name}{unit}"


def figure_text(line: ComparedLine, found: Interval | None) -> str:
    """A figure with its interval, if that is known."""
    if found is None or not (isfinite(found.value) or isfinite(found.low)):
        return UNKNOWN
    _, scale = _UNITS.get(line.measure.quantity, ("", 1.0))
    shown, low, high = (each * scale for each in found)
    if not isfinite(shown):
        digits = _decimals(high if isfinite(high) else low)
        return f"[{low:.{digits}f}, {high:.{digits}f}]"
    digits = _decimals(max(abs(shown), abs(high)) if isfinite(high) else abs(shown))
    if not isfinite(low) or not isfinite(high):
        return f"{shown:.{digits}f}"
    return f"{shown:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def _decimals(size: float) -> int:
    """How many decimals show a figure of this size with three digits."""
    return 0 if size == 0 else min(max(2 - floor(log10(size)), 0), 4)


def change_text(line: ComparedLine) -> str:
    """How much a figure changed: a part of what it was, for shares a difference in points."""
    return _change_text(line, line.change)


def _change_text(line: ComparedLine, change: float | None) -> str:
    if change is None:
        return UNKNOWN
    if line.measure.is_relative:
        # A tenth of a percent matters only in a small change.
        return f"{change * 100:+.{0 if abs(change) >= 0.1 else 1}f} %"
    if line.measure.quantity is Quantity.SHARE:
        return f"{change * 100:+.2f} pp"
    return f"{change:+.2f}"


def headline(comparison: Comparison) -> str:
    """The verdict in a few words."""
    return {
        Outcome.BETTER: "Better than before",
        Outcome.WORSE: "Worse than before",
        Outcome.NO_EVIDENCE: "No evidence of a change",
        Outcome.LOAD_CHANGED: "The load changed",
        Outcome.ONE_PERIOD: "Cannot tell: one period makes the difference",
        Outcome.TOO_SHORT: "Cannot tell: the runs are too short",
    }.get(comparison.outcome, "Cannot tell")


def explanations(comparison: Comparison) -> Iterator[str]:
    """Why the verdict is what it is, one sentence each."""
    yield from (_fact_text(fact, comparison.after) for fact in comparison.facts)
    if comparison.load_changes:
        changed = ", ".join(comparison.load_changes)
        yield f"Load: {changed}. What changed with the load says nothing of the settings."
    for outcome in (Outcome.WORSE, Outcome.BETTER):
        named = [
            f"{line.measure.name} {change_text(line)}"
            for line in comparison.lines
            if line.outcome is outcome
        ]
        if named:
            yield f"{str(outcome).capitalize()}: {', '.join(named)}."
    yield from _like_for_like(comparison)
    yield from _periods(comparison)
    yield from _missing(comparison)


def _like_for_like(comparison: Comparison) -> Iterator[str]:
    """What changed at the same hours and the same load, with its interval; latencies alone."""
    named = [
        f"{line.measure.name} {_interval_text(line, line.like_for_like)}"
        for line in comparison.lines
        if line.like_for_like is not None
    ]
    if named:
        yield f"Hour by hour, at the same load: {', '.join(named)}."


def _interval_text(line: ComparedLine, found: Interval) -> str:
    value, low, high = (_change_text(line, each).removesuffix(" %") for each in found)
    return f"{value} % [{low}, {high}]"


def _fact_text(fact: Fact, after: RunColumns | RunFigures) -> str:
    if isinstance(fact, FirstFailures):
        chance = "" if fact.is_evident else f". May be chance ({_percent(fact.chance)})"
        if fact.is_of_few_bursts:
            times = "1 burst" if fact.bursts == 1 else f"{fact.bursts} bursts"
            chance = f". All in {times}, which may be chance ({_percent(fact.chance_of_bursts)})"
        requests, before = f"{fact.requests:,}", f"{fact.requests_before:,}"
        return f"Failed: {fact.failed:,} of {requests} requests, none of {before} before{chance}."
    if isinstance(fact, MissedTarget):
        chance = "" if fact.is_evident else ". May be chance: both intervals hold the target"
        first, second = (_share_text(each) for each in (fact.before, fact.after))
        target = f"Target of {fact.objective}, {_percent(fact.target)}"
        return f"{target}: attainment {first} before, {second} after{chance}."
    counts = (
        f"{len(at_s)} {kind} ({_moment(after, min(at_s))})" for kind, at_s in fact.at_s.items()
    )
    return f"Failures of engines: {', '.join(counts)}; {fact.before or 'none'} before."


def _percent(share: float) -> str:
    return f"{share * 100:.3g} %"


def _share_text(found: Interval) -> str:
    low, high = (f"{each * 100:.1f}" for each in (found.low, found.high))
    value = "" if not isfinite(found.value) else f"{found.value * 100:.1f} % "
    return f"{value}[{low}, {high}]"


def _moment(run: RunColumns | RunFigures, at_s: float) -> str:
    if run.began_at is None:
        return f"{at_s:.1f} s after its begin"
    return f"{datetime.fromtimestamp(run.began_at + at_s, UTC):%Y-%m-%dT%H:%M:%SZ}"


def _periods(comparison: Comparison) -> Iterator[str]:
    """One sentence for each period, with the lines that it changes."""
    found: dict[tuple[bool, float, float], list[str]] = defaultdict(list)
    for line in comparison.lines:
        if line.period is not None:
            key = (line.period.is_after, line.period.begin_s, line.period.end_s)
            without = _change_text(line, line.period.change)
            found[key].append(f"{line.measure.name} {change_text(line)}, without it {without}")
    for (is_after, *ends_s), named in found.items():
        run = comparison.after if is_after else comparison.before
        begin, end = (_moment(run, each) for each in ends_s)
        name = "after" if is_after else "before"
        yield f"One period of `{name}`, {begin} to {end}: {'; '.join(named)}."


_WITHOUT_REQUESTS = {
    FiguresSource.RESULT_FILE: (
        "The file of `{}` has no single requests, so it is unknown by how much its figures vary{}."
    ),
    FiguresSource.ENGINE: (
        "No request of `{}` has a row: its figures are those that its engines counted in whole "
        "minutes{}."
    ),
    FiguresSource.NOBODY: "No request of `{}` has a row, and no engine counted any{}.",
}


def _missing(comparison: Comparison) -> Iterator[str]:
    for name, run in (("before", comparison.before), ("after", comparison.after)):
        if isinstance(run, RunFigures):
            hint = "" if run.hint is None else f" ({run.hint})"
            yield _WITHOUT_REQUESTS[run.source].format(name, hint)
    found = unknown_figures(comparison)
    if found:
        yield f"Unknown: {', '.join(found)}."
    yield from _too_short(comparison)


def _too_short(comparison: Comparison) -> Iterator[str]:
    """What has too little for a verdict, and how long the runs should be."""
    for outcome, why in _TOO_SHORT.items():
        found = [line for line in comparison.lines if line.outcome is outcome]
        named = [f"{line.measure.name}{_needed(line, comparison)}" for line in found]
        if named:
            yield f"{why}: {', '.join(named)}."


_TOO_SHORT = {
    Outcome.TOO_SHORT: (
        "Too short to tell: a figure might be twice as high and would not be noticed. Needed, at "
        "least"
    ),
    Outcome.TOO_FEW: "Too few requests, or parts of the run that have any. Needed, at least",
}


def _needed(line: ComparedLine, comparison: Comparison) -> str:
    needed_s = needed_length_s(line, comparison)
    return "" if needed_s is None else f" {_length(needed_s)}"


def needed_length_s(line: ComparedLine, comparison: Comparison) -> float | None:
    """How long the shorter run should be for a verdict, at least; None if that is unknown."""
    if line.needed is None or line.needed <= 1:
        return None
    return line.needed * min(comparison.before.length_s, comparison.after.length_s)


def described(run: RunColumns | RunFigures) -> str:
    """What a run is, in one line."""
    return f"{run.name}: {run.requests:,} requests in {_length(run.length_s)}"


def _length(seconds: float) -> str:
    for unit_s, unit in ((DAY_S, "days"), (HOUR_S, "h"), (MINUTE_S, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.1f} {unit}"
    return f"{seconds:.1f} s"


def cause_rows(comparison: Comparison) -> list[tuple[str, str, str]]:
    """The first causes of missed requests, in percent of all requests, before and after."""
    found = comparison.causes or {}
    ordered = sorted(found, key=lambda name: (-max(found[name]), name))[:_CAUSES]
    return [
        (name, f"{found[name][0] * 100:.2f}", f"{found[name][1] * 100:.2f}") for name in ordered
    ]


_METHOD = (
    "In brackets: 95 % intervals of a bootstrap over blocks of time. Better or worse: a change "
    "that matters, and that is too large for chance, all lines together at 5 % (docs/comparing.md)."
)
_BUCKETS = "In brackets: the bounds of the buckets of engines' histograms (docs/comparing.md)."


def _method(comparison: Comparison) -> str:
    runs = (comparison.before, comparison.after)
    return _BUCKETS if any(isinstance(run, RunFigures) and run.bounds for run in runs) else _METHOD


_STYLES = {
    **{Outcome.BETTER: "green", Outcome.WORSE: "bold red"},
    **{Outcome.LOAD_CHANGED: "yellow", Outcome.ONE_PERIOD: "yellow"},
}


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the verdict, then what was compared, then all figures."""
    style = _STYLES.get(comparison.outcome, "bold")
    console.print(Text(headline(comparison), style=style))
    for sentence in explanations(comparison):
        console.print(Text(sentence))
    console.print()
    for name, run in (("before", comparison.before), ("after", comparison.after)):
        console.print(Text(f"{name:7} {described(run)}"))
    console.print(_rich_table("Load", comparison.load))
    console.print(_rich_table("Figures", comparison.lines))
    _print_causes(comparison, console)
    console.print(Text(_method(comparison), style="dim"))


def _rich_table(title: str, lines: Sequence[ComparedLine]) -> Table:
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    for header in HEADERS:
        is_number = header in HEADERS[1:4]
        table.add_column(header, justify="right" if is_number else "left")
    for row in table_cells(lines):
        table.add_row(*(Text(cell) for cell in row), style=_STYLES.get(Outcome(row.verdict)))
    return table


def _print_causes(comparison: Comparison, console: Console) -> None:
    found = cause_rows(comparison)
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


_SIGNS = {
    **{Outcome.BETTER: ":white_check_mark: ", Outcome.WORSE: ":x: "},
    **{Outcome.LOAD_CHANGED: ":warning: ", Outcome.NO_EVIDENCE: ""},
}
# Characters that would end a cell, or begin a tag.
_ESCAPES = str.maketrans({"|": "\\|", "<": "&lt;", "\n": " "})


def markdown(comparison: Comparison) -> str:
    """The verdict first; what did not change is folded."""
    return "\n".join(_markdown_lines(comparison)) + "\n"


def _markdown_lines(comparison: Comparison) -> Iterator[str]:
    sign = _SIGNS.get(comparison.outcome, ":grey_question: ")
    yield f"### {sign}{headline(comparison)}"
    yield ""
    for sentence in explanations(comparison):
        yield f"- {_escaped(sentence)}"
    for name, run in (("before", comparison.before), ("after", comparison.after)):
        yield f"- {name}: {_escaped(described(run))}"
    yield ""
    yield from _markdown_table(comparison.lines)
    yield ""
    yield "<details><summary>Load and causes</summary>"
    yield ""
    yield from _markdown_table(comparison.load)
    yield from _markdown_causes(comparison)
    yield ""
    yield "</details>"
    yield ""
    yield f"<sub>{_method(comparison)}</sub>"


def _markdown_table(lines: Sequence[ComparedLine]) -> Iterator[str]:
    yield _markdown_row(HEADERS)
    yield "|:--|--:|--:|--:|:--|"
    for cells in table_cells(lines):
        judged = cells.verdict in (Outcome.BETTER, Outcome.WORSE)
        yield _markdown_row((*cells[:-1], f"**{cells.verdict}**" if judged else cells.verdict))


def _markdown_causes(comparison: Comparison) -> Iterator[str]:
    found = cause_rows(comparison)
    if found:
        yield ""
        yield _markdown_row(("missed by first cause, % of all", "before", "after"))
        yield "|:--|--:|--:|"
        yield from (_markdown_row(each) for each in found)


def _markdown_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(_escaped(cell) for cell in cells)} |"


def _escaped(text: str) -> str:
    return text.translate(_ESCAPES)


def json_text(comparison: Comparison) -> str:
    """All figures in base units: seconds, shares from 0 to 1, dollars. Unknown is null."""
    return json.dumps(
        {
            "verdict": comparison.outcome,
            "facts": [_fact_json(each) for each in comparison.facts],
            "load_changes": comparison.load_changes,
            "before": _run_json(comparison.before),
            "after": _run_json(comparison.after),
            "load": _lines_json(comparison, comparison.load),
            "figures": _lines_json(comparison, comparison.lines),
            "causes": _causes_json(comparison.causes),
        },
        allow_nan=False,
        indent=2,
    )


def _run_json(run: RunColumns | RunFigures) -> dict[str, Any]:
    return {
        "name": run.name,
        "requests": run.requests,
        "began_at": run.began_at,
        "length_s": run.length_s,
        "has_requests": isinstance(run, RunColumns),
        "configured_load": dict(run.configured_load),
    }


def _fact_json(fact: Fact) -> dict[str, Any]:
    found = {"name": fact.line, "worse": fact.is_evident, **asdict(fact)}
    del found["line"]
    if isinstance(fact, MissedTarget):
        found |= {"before": _interval_json(fact.before), "after": _interval_json(fact.after)}
    return found


def _lines_json(comparison: Comparison, lines: Sequence[ComparedLine]) -> list[dict[str, Any]]:
    return [
        {
            "name": line.measure.name,
            "unit": line.measure.quantity,
            "better": line.measure.better,
            "before": _interval_json(line.before),
            "after": _interval_json(line.after),
            "change": line.change,
            "change_is": "ratio" if line.measure.is_relative else "difference",
            "like_for_like": _interval_json(line.like_for_like),
            "chance": line.chance,
            "needed_length_s": needed_length_s(line, comparison),
            "period": _period_json(line.period),
            "verdict": line.outcome,
        }
        for line in lines
    ]


def _period_json(period: DecisivePeriod | None) -> dict[str, Any] | None:
    """Seconds count from the begin of the run; the value and the change are without the period."""
    if period is None:
        return None
    run = "after" if period.is_after else "before"
    ends = {"begin_s": period.begin_s, "end_s": period.end_s}
    return {"run": run, **ends, "value": period.value, "change": period.change}


def _interval_json(found: Interval | None) -> dict[str, float | None] | None:
    if found is None or not (isfinite(found.value) or isfinite(found.low)):
        return None
    return {name: each if isfinite(each) else None for name, each in found._asdict().items()}


def _causes_json(
    causes: Mapping[str, tuple[float, float]] | None,
) -> dict[str, dict[str, float]] | None:
    if causes is None:
        return None
    return {name: {"before": before, "after": after} for name, (before, after) in causes.items()}
