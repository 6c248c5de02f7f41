"""Service objectives: what was promised, what was kept, and how fast the budget goes."""

from collections.abc import Iterator, Sequence

from agent.catalog import metrics as m
from agent.catalog.definitions import Verdict
from agent.records.objective import Match, Objective
from agent.render.dashboards.budget_panels import budget_now, budget_over_time, burn_rate
from agent.render.dashboards.panel_expressions import (
    OBJECTIVE,
    SHOWN,
    buckets,
    gauge,
    increase,
    observed,
    rate,
    ratio,
)
from agent.render.dashboards.panel_parts import (
    Column,
    Link,
    Panel,
    PanelRow,
    PanelUnit,
    Query,
    good_above,
)
from agent.render.dashboards.panel_styles import SHARES, STACKED, STAT
from agent.render.promql import among, by, eq, like, upto

_MET = eq("verdict", Verdict.MET)
_MISSED = eq("verdict", Verdict.MISSED)
_JUDGED = among("verdict", (Verdict.MET, Verdict.MISSED))
_TARGET = Query(expression=by(OBJECTIVE, gauge(m.SLO_TARGET), "max"), legend="{{objective}} target")
_REQUESTS_BEHIND = Link(
    "The requests that missed",
    "/d/goodput-requests?${__url_time_range}&var-objective=${__field.labels.objective}",
)
_CAUSES = Link("Causes of misses", "/d/goodput-requests?${__url_time_range}")
# The latencies that objectives limit, by the field of the limit.
_LIMITED = (("ttft", "ttft_s", m.TTFT), ("tpot", "tpot_s", m.TPOT), ("e2e", "e2e_s", m.DURATION))


def objective_rows(objectives: Sequence[Objective]) -> tuple[PanelRow, ...]:
    """The rows of the dashboard."""
    return (
        PanelRow("Now", tuple(_now(objectives))),
        PanelRow("Error budget", (_OVER_TIME, burn_rate(objectives), budget_over_time(objectives))),
        PanelRow("Goodput against throughput", _GOODPUT),
        PanelRow("What breaks the promise", tuple(_reasons(objectives))),
    )


def _attainment(window: str, labels: tuple[str, ...]) -> str:
    return ratio(
        by(labels, increase(m.SLO_REQUESTS, window, _MET)),
        by(labels, increase(m.SLO_REQUESTS, window, _JUDGED)),
    )


_OVER_TIME = Panel(
    title="Attainment over time",
    description="Share of the judged requests that met every limit, against the target.",
    unit=PanelUnit.SHARE,
    queries=(
        Query(
            expression=ratio(
                by(OBJECTIVE, rate(m.SLO_REQUESTS, _MET)),
                by(OBJECTIVE, rate(m.SLO_REQUESTS, _JUDGED)),
            ),
            legend="{{objective}}",
        ),
        _TARGET,
    ),
    lowest=None,
    highest=1,
    links=(_REQUESTS_BEHIND,),
)
_GOODPUT_NOW = (
    Panel(
        title="Goodput",
        description="Requests per second that met every limit of the objective at once.",
        unit=PanelUnit.REQUESTS_PER_S,
        queries=(
            Query(expression=by(OBJECTIVE, rate(m.SLO_REQUESTS, _MET)), legend="{{objective}}"),
        ),
        style=STAT,
        width=6,
        height=6,
    ),
    Panel(
        title="Misses per minute",
        description="Requests per minute that broke a limit or failed.",
        unit=PanelUnit.PER_MINUTE,
        queries=(
            Query(
                expression=f"60 * {by(OBJECTIVE, rate(m.SLO_REQUESTS, _MISSED))}",
                legend="{{objective}}",
            ),
        ),
        style=STAT,
        width=6,
        height=6,
        links=(_REQUESTS_BEHIND,),
    ),
)
_GOODPUT = (
    Panel(
        title="Requests: goodput against throughput",
        description="What met every limit, beside all that ended. The gap is work that nobody was "
        "promised or that came too late.",
        unit=PanelUnit.REQUESTS_PER_S,
        queries=(
            Query(
                expression=by(OBJECTIVE, rate(m.SLO_REQUESTS, _MET)),
                legend="{{objective}} goodput",
            ),
            Query(expression=f"sum({rate(m.REQUESTS)})", legend="throughput"),
        ),
    ),
    Panel(
        title="Output tokens: goodput against throughput",
        description="Tokens per second of requests that met every limit, beside all tokens.",
        unit=PanelUnit.PER_SECOND,
        queries=(
            Query(
                expression=by(OBJECTIVE, rate(m.SLO_OUTPUT_TOKENS, _MET)),
                legend="{{objective}} goodput",
            ),
            Query(expression=f"sum({rate(m.OUTPUT_TOKENS)})", legend="throughput"),
        ),
    ),
    Panel(
        title="Verdicts",
        description="Requests by verdict. Undetermined ones were given up or could not be judged "
        "for want of a figure; many of them make attainment speak for few.",
        unit=PanelUnit.REQUESTS_PER_S,
        queries=(
            Query(
                expression=by((*OBJECTIVE, "verdict"), rate(m.SLO_REQUESTS)),
                legend="{{objective}} {{verdict}}",
            ),
        ),
        style=STACKED,
    ),
)


def _now(objectives: Sequence[Objective]) -> Iterator[Panel]:
    yield Panel(
        title="Attainment",
        description="Share of the judged requests of the time shown that met every limit. Below "
        "the target the promise is broken; what breaks it is further down.",
        unit=PanelUnit.SHARE,
        queries=(
            Query(expression=_attainment(SHOWN, OBJECTIVE), legend="{{objective}}", instant=True),
        ),
        style=STAT,
        width=6,
        height=6,
        # Of an objective that came later; each of these has its own.
        thresholds=good_above(max((item.target for item in objectives), default=0.95)),
        columns=tuple(
            Column(name=item.name, thresholds=good_above(item.target)) for item in objectives
        ),
        highest=1,
        links=(_REQUESTS_BEHIND,),
    )
    yield budget_now(objectives)
    yield from _GOODPUT_NOW


def _reasons(objectives: Sequence[Objective]) -> Iterator[Panel]:
    within = tuple(_within_limits(objectives))
    if within:
        yield Panel(
            title="Requests within each limit",
            description="Share of the requests within each latency limit, exact, as every limit is "
            "an edge of a histogram. The lowest line is the limit to work on. Objectives that "
            "speak of a tenant, a route or a length have no line: no histogram tells these apart.",
            unit=PanelUnit.SHARE,
            queries=(*within, _TARGET),
            width=12,
            lowest=None,
            highest=1,
            links=(_CAUSES,),
        )
    yield Panel(
        title="How requests end",
        description="Requests by how they ended. Errors, time-outs and throttled requests count "
        "as missed.",
        unit=PanelUnit.REQUESTS_PER_S,
        queries=(Query(expression=by(("status",), rate(m.REQUESTS)), legend="{{status}}"),),
        style=SHARES,
        width=12,
        links=(_CAUSES,),
    )


def _within_limits(objectives: Sequence[Objective]) -> Iterator[Query]:
    for item in objectives:
        if item.match != Match(model=item.match.model):
            continue
        model = like("model", item.match.model)
        for name, limit, metric in _LIMITED:
            limit_s: float | None = getattr(item, limit)
            if limit_s is not None:
                yield Query(
                    expression=ratio(
                        f"sum({buckets(metric, *model, upto(limit_s))})",
                        f"sum({observed(metric, *model)})",
                    ),
                    legend=f"{item.name} {name}",
                )
