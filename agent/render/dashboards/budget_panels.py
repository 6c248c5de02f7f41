"""Error budgets: how much is left, and how fast it goes."""

from collections.abc import Iterator, Sequence

from agent.analysis.burn_rates import TIERS, plan
from agent.catalog import metrics as m
from agent.catalog.definitions import Verdict
from agent.records.objective import Objective
from agent.render.dashboards.panel_expressions import (
    OBJECTIVE,
    OBJECTIVE_MODEL,
    gauge,
    increase,
    ratio,
)
from agent.render.dashboards.panel_parts import (
    Panel,
    PanelUnit,
    Query,
    Threshold,
)
from agent.render.dashboards.panel_styles import STAT
from agent.render.promql import Matcher, among, by, eq, none_of
from agent.settings.values import duration_text

_MISSED = eq("verdict", Verdict.MISSED)
_JUDGED = among("verdict", (Verdict.MET, Verdict.MISSED))
_ALLOWED = f"(1 - {by(OBJECTIVE, gauge(m.SLO_TARGET), 'max')})"
_COLOURS = (
    Threshold(value=None, colour="red"),
    Threshold(value=0, colour="orange"),
    Threshold(value=0.25, colour="green"),
)


def budget_now(objectives: Sequence[Objective]) -> Panel:
    """The budgets that are left now."""
    return Panel(
        title="Error budget left",
        description="Of the requests that may miss within the objective's window, the share that "
        "is left. Below 0 the promise for the window is broken already.",
        unit=PanelUnit.SHARE,
        queries=_budget_left(objectives, instant=True),
        style=STAT,
        width=6,
        height=6,
        thresholds=_COLOURS,
        lowest=None,
        highest=1,
    )


def burn_rate(objectives: Sequence[Objective]) -> Panel:
    """How fast budgets are spent, over the windows that alerts on them look at."""
    burns = [burn for item in objectives for burn in plan(item.target, item.window_s).kept]
    # Where no tier can fire, the windows of all tell how fast the budget goes all the same.
    long_s = [burn.long_s for burn in burns] or [tier.long_s for tier in TIERS]
    windows = dict.fromkeys(map(duration_text, long_s))
    factors = sorted({float(burn.tier.factor) for burn in burns})
    return Panel(
        title="Burn rate",
        description="How many times faster than allowed the budget is spent, over the windows that "
        "alerts look at. At 1 it lasts exactly as long as the objective's window; the lines are "
        "where alerts fire, each for a window of its own.",
        unit=PanelUnit.NUMBER,
        queries=tuple(
            Query(expression=_spent(window), legend=f"{{{{objective}}}} {{{{model}}}} {window}")
            for window in windows
        ),
        thresholds=(
            Threshold(value=None, colour="green"),
            *(
                Threshold(value=factor, colour=colour)
                for factor, colour in zip(factors, _colours(len(factors)), strict=True)
            ),
        ),
    )


def budget_over_time(objectives: Sequence[Objective]) -> Panel:
    """The budgets that are left, over time."""
    return Panel(
        title="Error budget left over time",
        description="The share of the window's error budget that is left, by model.",
        unit=PanelUnit.SHARE,
        queries=_budget_left(objectives, instant=False),
        thresholds=_COLOURS,
        lowest=None,
        highest=1,
    )


def _windows(objectives: Sequence[Objective]) -> Iterator[tuple[str, tuple[Matcher, ...]]]:
    """The windows of budgets, each with the objectives that have it; the last has all others."""
    by_window: dict[float, list[str]] = {}
    for item in objectives:
        by_window.setdefault(item.window_s, []).append(item.name)
    # An objective that came later has most likely the window that most have.
    others = sorted(by_window, key=lambda window_s: len(by_window[window_s]))
    named: list[str] = []
    for window_s in others[:-1]:
        named += by_window[window_s]
        yield duration_text(window_s), (among("objective", map(_literal, by_window[window_s])),)
    if others:
        rest = none_of("objective", map(_literal, named))
        yield duration_text(others[-1]), (rest,) if named else ()


def _literal(name: str) -> str:
    """An objective's name as a pattern; of all signs that names may have only this is special."""
    return name.replace(".", "[.]")


def _missed_ratio(window: str, *named: Matcher) -> str:
    return ratio(
        by(OBJECTIVE_MODEL, increase(m.SLO_REQUESTS, window, _MISSED, *named)),
        by(OBJECTIVE_MODEL, increase(m.SLO_REQUESTS, window, _JUDGED, *named)),
    )


def _spent(window: str, *named: Matcher) -> str:
    """How many times the misses that are allowed were missed."""
    return f"{_missed_ratio(window, *named)}\n  / on (objective) group_left () {_ALLOWED}"


def _budget_left(objectives: Sequence[Objective], *, instant: bool) -> tuple[Query, ...]:
    return tuple(
        Query(
            expression=f"1 - {_spent(window, *named)}",
            legend=f"{{{{objective}}}} {{{{model}}}} {window}",
            instant=instant,
        )
        for window, named in _windows(objectives)
    )


def _colours(count: int) -> list[str]:
    return ["yellow", "orange", "semi-dark-orange", "red"][-count:] if count else []
