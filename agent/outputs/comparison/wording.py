"""Figures and verdicts of a comparison in words, for people."""

from collections.abc import Iterator, Sequence
from math import floor, isfinite, log10
from typing import NamedTuple

from agent.analysis.comparison.comparing import ComparedLine, Comparison, Outcome
from agent.analysis.comparison.measures import Quantity
from agent.analysis.comparison.resampling import Interval
from agent.analysis.comparison.run_columns import RunColumns, RunFigures
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


def cells(lines: Sequence[ComparedLine]) -> list[Cells]:
    """The lines that either run knows."""
    return [
        Cells(label(line), value(line, line.before), value(line, line.after), change(line), verdict)
        for line in lines
        if line.before is not None or line.after is not None
        for verdict in (str(line.outcome),)
    ]


def unknown(comparison: Comparison) -> list[str]:
    """The names of figures that neither run knows."""
    return [
        line.measure.name
        for line in (*comparison.load, *comparison.lines)
        if line.before is None and line.after is None
    ]


def label(line: ComparedLine) -> str:
    """The name of a figure with its unit."""
    name, (unit, _) = line.measure.name, _UNITS.get(line.measure.quantity, ("", 1.0))
    return name if name.endswith(unit.removeprefix(", ")) else f"{name}{unit}"


def value(line: ComparedLine, found: Interval | None) -> str:
    """A figure with its interval, if that is known."""
    if found is None or not isfinite(found.value):
        return UNKNOWN
    _, scale = _UNITS.get(line.measure.quantity, ("", 1.0))
    shown, low, high = (each * scale for each in found)
    digits = _decimals(max(abs(shown), abs(high)) if isfinite(high) else abs(shown))
    if not isfinite(low) or not isfinite(high):
        return f"{shown:.{digits}f}"
    return f"{shown:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def _decimals(size: float) -> int:
    """How many decimals show a figure of this size with three digits."""
    return 0 if size == 0 else min(max(2 - floor(log10(size)), 0), 4)


def change(line: ComparedLine) -> str:
    """How much a figure changed: a part of what it was, for shares a difference in points."""
    if line.change is None:
        return UNKNOWN
    if line.measure.is_relative:
        # A tenth of a percent matters only in a small change.
        return f"{line.change * 100:+.{0 if abs(line.change) >= 0.1 else 1}f} %"
    if line.measure.quantity is Quantity.SHARE:
        return f"{line.change * 100:+.2f} pp"
    return f"{line.change:+.2f}"


def headline(comparison: Comparison) -> str:
    """The verdict in a few words."""
    return {
        Outcome.BETTER: "Better than before",
        Outcome.WORSE: "Worse than before",
        Outcome.NO_EVIDENCE: "No evidence of a change",
        Outcome.LOAD_CHANGED: "The load changed",
    }.get(comparison.outcome, "Cannot tell")


def explanations(comparison: Comparison) -> Iterator[str]:
    """Why the verdict is what it is, one sentence each."""
    if comparison.load_changes:
        changed = ", ".join(comparison.load_changes)
        yield f"Load: {changed}. What changed with the load says nothing of the settings."
    for outcome in (Outcome.WORSE, Outcome.BETTER):
        named = [
            f"{line.measure.name} {change(line)}"
            for line in comparison.lines
            if line.outcome is outcome
        ]
        if named:
            yield f"{str(outcome).capitalize()}: {', '.join(named)}."
    yield from _missing(comparison)


def _missing(comparison: Comparison) -> Iterator[str]:
    for name, run in (("before", comparison.before), ("after", comparison.after)):
        if isinstance(run, RunFigures):
            yield (
                f"The file of `{name}` has no single requests, so nobody knows by how much its "
                "figures vary (vllm bench serve writes them with --save-detailed)."
            )
    found = unknown(comparison)
    if found:
        yield f"Unknown: {', '.join(found)}."
    if any(line.outcome is Outcome.TOO_FEW for line in comparison.lines):
        yield "Too few: requests, or parts of the run that have any, for a verdict."


def described(run: RunColumns | RunFigures) -> str:
    """What a run is, in one line."""
    return f"{run.name}: {run.requests:,} requests in {_length(run.length_s)}"


def _length(seconds: float) -> str:
    for unit_s, unit in ((DAY_S, "days"), (HOUR_S, "h"), (MINUTE_S, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.1f} {unit}"
    return f"{seconds:.1f} s"


def causes(comparison: Comparison) -> list[tuple[str, str, str]]:
    """The first causes of missed requests, in percent of all requests, before and after."""
    found = comparison.causes or {}
    ordered = sorted(found, key=lambda name: (-max(found[name]), name))[:_CAUSES]
    return [
        (name, f"{found[name][0] * 100:.2f}", f"{found[name][1] * 100:.2f}") for name in ordered
    ]


METHOD = (
    "In brackets: 95 % intervals of a bootstrap over blocks of time. Better or worse: a change "
    "that matters, and that is too large for chance, all lines together at 5 % (docs/comparing.md)."
)
