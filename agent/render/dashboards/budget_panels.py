"""Panels on error budgets: the rest of each budget, and its burn rate."""

from collections.abc import Iterator, Sequence

from agent.analysis.burn_rates import TIERS, plan
from agent.catalog import metrics as m
from agent.catalog.definitions import Verdict
from agent.records.objective import Objective
from agent.render.dashboards.panel_parts import Panel, PanelUnit, Query, Threshold
from agent.render.dashboards.panel_queries import (
    OBJECTIVE,
    OBJECTIVE_MODEL,
    gauge,
    increase,
    legend,
    ratio,
)
from agent.render.dashboards.panel_styles import STAT
from agent.render.promql import Matcher, among, by, eq, none_of
from agent.settings.values import duration_text

MET, MISSED = eq("verdict", Verdict.MET), eq("verdict", Verdict.MISSED)
JUDGED = among("verdict", (Verdict.MET, Verdict.MISSED))
_ALLOWED = f"(1 - {by(OBJECTIVE, gauge(m.SLO_TARGET), 'max')})"
_BUDGET_COLOURS = (
    Threshold(value=None, colour="red"),
    Threshold(value=0, colour="orange"),
    Threshold(value=0.25, colour="green"),
)
# Of the factors of burn rates at which alerts fire; the highest is red.
_FACTOR_COLOURS = ("yellow", "orange", "semi-dark-orange", "red")


def budget_now(objectives: Sequence[Objective]) -> Panel:
    """The rest of each budget now."""
    return Panel(
        "Error budget left",
        "The share of the misses allowed in the objective's window that is left. Below 0 the "
        "objective is already missed for this window.",
        PanelUnit.SHARE,
        _budget_left(objectives, instant=True),
        style=STAT,
        width=6,
        height=6,
        thresholds=_BUDGET_COLOURS,
        lowest=None,
        highest=1,
    )


def budget_over_time(objectives: Sequence[Objective]) -> Panel:
    """The rest of each budget over time."""
    return Panel(
        "Error budget left over time",
        "The share of the window's error budget that is left, by model.",
        PanelUnit.SHARE,
        _budget_left(objectives, instant=False),
        thresholds=_BUDGET_COLOURS,
        lowest=None,
        highest=1,
    )


def burn_rate(objectives: Sequence[Objective]) -> Panel:
    """The burn rates over the windows of the alerts."""
    burns = [burn for item in objectives for burn in plan(item.target, item.window_s).kept]
    # If no tier of any objective can fire, the windows of all tiers show the burn rate.
    long_s = [burn.long_s for burn in burns] or [tier.long_s for tier in TIERS]
    factors = sorted({float(burn.tier.factor) for burn in burns})
    colours = _FACTOR_COLOURS[len(_FACTOR_COLOURS) - len(factors) :]
    return Panel(
        "Burn rate",
        "How many times faster than allowed the budget is used, over the windows of the alerts. At "
        "1 it lasts exactly as long as the objective's window. The lines are the rates at which "
        "alerts fire, each for its own window.",
        PanelUnit.NUMBER,
        tuple(
            Query(_burned(window), legend(OBJECTIVE_MODEL, window))
            for window in dict.fromkeys(map(duration_text, long_s))
        ),
        thresholds=(
            Threshold(value=None, colour="green"),
            *(
                Threshold(value=factor, colour=colour)
                for factor, colour in zip(factors, colours, strict=True)
            ),
        ),
    )


def _windows(objectives: Sequence[Objective]) -> Iterator[tuple[str, tuple[Matcher, ...]]]:
    """Each window of a budget with a matcher for its objectives; the last has all others."""
    by_window: dict[float, list[str]] = {}
    for item in objectives:
        by_window.setdefault(item.window_s, []).append(item.name)
    # An objective that is added later most likely has the most common window.
    rarest_first = sorted(by_window, key=lambda window_s: len(by_window[window_s]))
    named: list[str] = []
    for window_s in rarest_first[:-1]:
        named += by_window[window_s]
        yield duration_text(window_s), (among("objective", map(_literal, by_window[window_s])),)
    if rarest_first:
        rest = none_of("objective", map(_literal, named))
        yield duration_text(rarest_first[-1]), (rest,) if named else ()


def _literal(name: str) -> str:
    """An objective's name as a pattern: the dot is the only special character in names."""
    return name.replace(".", "[.]")


def _burned(window: str, *named: Matcher) -> str:
    """The misses over the misses that are allowed."""
    missed = ratio(
        by(OBJECTIVE_MODEL, increase(m.SLO_REQUESTS, window, MISSED, *named)),
        by(OBJECTIVE_MODEL, increase(m.SLO_REQUESTS, window, JUDGED, *named)),
    )
    return f"{missed}\n  / on (objective) group_left () {_ALLOWED}"


def _budget_left(objectives: Sequence[Objective], *, instant: bool) -> tuple[Query, ...]:
    return tuple(
        Query(f"1 - {_burned(window, *named)}", legend(OBJECTIVE_MODEL, window), instant=instant)
        for window, named in _windows(objectives)
    )
