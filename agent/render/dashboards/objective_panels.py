"""Panels on service objectives: attainment, goodput, error budgets, and the reasons of misses."""

from collections.abc import Iterator, Sequence

from agent.analysis.burn_rates import TIERS, plan
from agent.catalog import metrics as m
from agent.catalog.causes import CAUSES
from agent.catalog.definitions import Verdict
from agent.catalog.metric import Metric
from agent.records.objective import Match, Objective
from agent.render.dashboards.panel_parts import (
    OBJECTIVE,
    OBJECTIVE_MODEL,
    SHARES,
    SHOWN,
    STACKED,
    STAT,
    Column,
    Link,
    Panel,
    PanelRow,
    PanelUnit,
    Query,
    Threshold,
    buckets,
    gauge,
    good_above,
    increase,
    legend,
    max_by,
    observed,
    rate,
    ratio,
    sum_by,
    total,
)
from agent.render.links import REQUEST_DASHBOARDS
from agent.render.promql import Matcher, among, by, eq, like, none_of, upto
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


_TARGET = max_by(OBJECTIVE, m.SLO_TARGET, "target")
# Over the target's line: a legend that is there with the preset alone.
_PRESET = Query(
    f"{by(OBJECTIVE, gauge(m.SLO_TARGET), 'max')}\n"
    f"  and on (objective) {by(OBJECTIVE, gauge(m.SLO_CONFIGURED), 'max')} == 0",
    legend(OBJECTIVE, "target of the preset, without alerts"),
)
_MISSED_REQUESTS = tuple(
    Link(
        f"The requests that missed ({each.source})",
        each.url(objective="${__field.labels.objective}"),
    )
    for each in REQUEST_DASHBOARDS
)
_CAUSES = tuple(
    Link(f"Causes of misses ({each.source})", each.url()) for each in REQUEST_DASHBOARDS
)
# Of each latency that objectives limit: its name, the field of its limit, its histogram.
_LIMITED = (("ttft", "ttft_s", m.TTFT), ("tpot", "tpot_s", m.TPOT), ("e2e", "e2e_s", m.DURATION))


def _within(*within: str) -> str:
    """The share of requests within each limit, by objective and measure."""
    part = rate(m.SLO_ENGINE_REQUESTS, among("within", within))
    measured = rate(m.SLO_ENGINE_REQUESTS)
    return f"({ratio(by(_MEASURE, part), by(_MEASURE, measured))})"


_MEASURE = (*OBJECTIVE, "measure")
# Nothing is known of how limits overlap: at least `a + b - 1` met both, at most the smaller share.
_BOUNDS = Panel(
    "Attainment by the engines' own histograms",
    "Between these two lies the share of answered requests that met every limit, as far as the "
    "buckets say. It needs no rows of single requests.",
    PanelUnit.SHARE,
    (
        Query(
            f"clamp_min({by(OBJECTIVE, _within(m.WITHIN))}\n"
            f"  - ({by(OBJECTIVE, _within(m.WITHIN), 'count')} - 1), 0)",
            "{{objective}} at least",
        ),
        Query(by(OBJECTIVE, _within(m.WITHIN, m.PERHAPS), "min"), "{{objective}} at most"),
        _TARGET,
    ),
    lowest=None,
    highest=1,
)


def objective_rows(objectives: Sequence[Objective]) -> tuple[PanelRow, ...]:
    """The rows of the dashboard."""
    return (
        PanelRow("Now", (attainment_now(objectives), budget_now(objectives), *_GOODPUT_NOW)),
        PanelRow(
            "Error budget",
            (ATTAINMENT_OVER_TIME, burn_rate(objectives), budget_over_time(objectives)),
        ),
        PanelRow("What breaks the promise", tuple(_reasons(objectives))),
        PanelRow("Goodput against throughput", _GOODPUT),
        PanelRow("Without rows", (_BOUNDS,)),
    )


def _met(metric: Metric) -> str:
    """Per second, of the requests that met their objective."""
    return by(OBJECTIVE, rate(metric, MET))


ATTAINMENT_OVER_TIME = Panel(
    "Attainment over time",
    "Share of the judged requests that met every limit, and the target.",
    PanelUnit.SHARE,
    (
        Query(
            ratio(_met(m.SLO_REQUESTS), by(OBJECTIVE, rate(m.SLO_REQUESTS, JUDGED))),
            "{{objective}}",
        ),
        _TARGET,
        _PRESET,
    ),
    lowest=None,
    highest=1,
    links=_MISSED_REQUESTS,
)
_GOODPUT_NOW = (
    Panel(
        "Goodput",
        "Requests per second that met every limit of the objective.",
        PanelUnit.REQUESTS_PER_S,
        (Query(_met(m.SLO_REQUESTS), "{{objective}}"),),
        style=STAT,
        width=6,
        height=6,
    ),
    Panel(
        "Misses per minute",
        "Requests per minute that were over a limit or failed.",
        PanelUnit.PER_MINUTE,
        (Query(f"60 * {by(OBJECTIVE, rate(m.SLO_REQUESTS, MISSED))}", "{{objective}}"),),
        style=STAT,
        width=6,
        height=6,
        links=_MISSED_REQUESTS,
    ),
)
_GOODPUT = (
    Panel(
        "Requests: goodput against throughput",
        "Requests that met every limit, and all that ended. The gap is requests without an "
        "objective and requests that missed it.",
        PanelUnit.REQUESTS_PER_S,
        (
            Query(_met(m.SLO_REQUESTS), "{{objective}} goodput"),
            total(m.REQUESTS, "throughput"),
        ),
    ),
    Panel(
        "Output tokens: goodput against throughput",
        "Tokens per second of requests that met every limit, and of all requests.",
        PanelUnit.PER_SECOND,
        (
            Query(_met(m.SLO_OUTPUT_TOKENS), "{{objective}} goodput"),
            total(m.OUTPUT_TOKENS, "throughput"),
        ),
    ),
    Panel(
        "Verdicts",
        "Requests by verdict. Undetermined requests were cancelled, or lack a value to judge them "
        "by; if there are many of them, attainment covers few requests.",
        PanelUnit.REQUESTS_PER_S,
        (sum_by((*OBJECTIVE, "verdict"), m.SLO_REQUESTS),),
        style=STACKED,
    ),
)


def attainment_now(objectives: Sequence[Objective]) -> Panel:
    """The attainment of each objective over the time shown."""
    attainment = ratio(
        by(OBJECTIVE, increase(m.SLO_REQUESTS, SHOWN, MET)),
        by(OBJECTIVE, increase(m.SLO_REQUESTS, SHOWN, JUDGED)),
    )
    return Panel(
        "Attainment",
        "Share of the judged requests of the time shown that met every limit. Below the target the "
        "objective is missed; the dashboard of objectives shows what breaks it.",
        PanelUnit.SHARE,
        (Query(attainment, "{{objective}}", instant=True),),
        style=STAT,
        width=6,
        height=6,
        # For objectives that are added later; each known one has its own thresholds.
        thresholds=good_above(max((item.target for item in objectives), default=0.95)),
        columns=tuple(
            Column(name=item.name, thresholds=good_above(item.target)) for item in objectives
        ),
        highest=1,
        links=_MISSED_REQUESTS,
    )


def _reasons(objectives: Sequence[Objective]) -> Iterator[Panel]:
    within = tuple(_within_limits(objectives))
    if within:
        yield Panel(
            "Requests within each limit",
            "Share of the requests within each latency limit. It is exact, as every limit is a "
            "bucket edge. Improve the lowest line first. Objectives on a tenant, a route or a "
            "length have no line: histograms have no label for these.",
            PanelUnit.SHARE,
            (*within, _TARGET),
            width=12,
            lowest=None,
            highest=1,
            links=_CAUSES,
        )
    yield Panel(
        "How requests end",
        "Requests by status. Errors, time-outs and throttled requests count as missed. Invalid "
        "ones are mistakes of clients and count in no objective unless it says so.",
        PanelUnit.REQUESTS_PER_S,
        (sum_by(("status",), m.REQUESTS),),
        style=SHARES,
        width=12,
        links=_CAUSES,
    )
    yield _CAUSES_OVER_TIME


def _advice() -> str:
    """What to change for each cause, one line each."""
    lines = (f"{cause.replace('_', ' ')}: {facts.text}" for cause, facts in CAUSES.items())
    return "\n".join(f"- {line}" for line in lines)


_CAUSES_OVER_TIME = Panel(
    "Causes of misses over time",
    "Seconds beyond the limits of the objective per second, by cause. A second over two limits "
    f"counts for both. What to change:\n\n{_advice()}",
    PanelUnit.SECONDS,
    (
        Query(
            f"{by(('cause',), rate(m.SLO_MISSED_SECONDS))} > 0",
            "{{cause}}",
        ),
    ),
    style=STACKED,
    links=_CAUSES,
)


def _within_limits(objectives: Sequence[Objective]) -> Iterator[Query]:
    for item in objectives:
        if item.match != Match(model=item.match.model):
            continue
        model = like("model", item.match.model)
        for name, limit, metric in _LIMITED:
            limit_s: float | None = getattr(item, limit)
            if limit_s is not None:
                share = ratio(
                    f"sum({buckets(metric, *model, upto(limit_s))})",
                    f"sum({observed(metric, *model)})",
                )
                yield Query(share, f"{item.name} {name}")
