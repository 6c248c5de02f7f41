"""Panels of the fleet: the state of all engines on one screen, with links to the details."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agent.catalog import efficiency_metrics as em
from agent.catalog import engine_facts as fact
from agent.catalog import metrics as m
from agent.catalog.definitions import DEEP_QUEUE, FULL_CACHE
from agent.records.objective import Objective
from agent.records.request import FAILED
from agent.render.dashboards.engine_panels import RUNNING_AND_WAITING, STATE_OF_ENGINES
from agent.render.dashboards.grafana_json import FIRING
from agent.render.dashboards.latency_panels import P95_BY_ENGINE
from agent.render.dashboards.objective_panels import (
    ATTAINMENT_OVER_TIME,
    JUDGED,
    MET,
    attainment_now,
    budget_now,
)
from agent.render.dashboards.panel_parts import (
    ENGINE,
    SHOWN,
    STAT,
    TABLE,
    Column,
    Link,
    Panel,
    PanelRow,
    PanelUnit,
    Query,
    Threshold,
    dashboard_url,
    gauge,
    good_above,
    increase,
    quantile,
    rate,
    ratio,
    total,
    warn_above,
)
from agent.render.links import REQUEST_DASHBOARDS, DashboardUid
from agent.render.promql import PLACE_LABELS, among, by

_STAT_WIDTH, _STAT_HEIGHT = 4, 5
_GRAPH_WIDTH, _GRAPH_HEIGHT = 6, 7


# Labels that Prometheus does not add are no column.
_LINE = (*PLACE_LABELS, *ENGINE)
# Several engines may have one name, each in a pod of its own: one of them that is down is down.
_UP = by(_LINE, gauge(m.ENGINE_UP), "min")


_ENGINES = Panel(
    "Engines",
    "Engines whose scrapes succeed, and those whose scrapes fail. The table below names them.",
    PanelUnit.NUMBER,
    (Query(f"sum({_UP})", "up"), Query(f"sum(1 - {_UP})", "down")),
    style=STAT,
    columns=(Column(name="down", thresholds=warn_above(1)),),
)
_ALERTS = Panel(
    "Alerts",
    "Alerts of the agent's rules that fire, of all engines and GPUs. Prometheus must have the "
    "rules.",
    PanelUnit.NUMBER,
    (Query(f"count({FIRING}) or vector(0)", "firing"),),
    style=STAT,
    thresholds=warn_above(1),
)
_REQUESTS = Panel(
    "Requests",
    "Requests per second that ended, and those that failed: errors, time-outs and throttled "
    "requests.",
    PanelUnit.REQUESTS_PER_S,
    (
        total(m.REQUESTS, "ended"),
        Query(f"sum({rate(m.REQUESTS, among('status', sorted(FAILED)))})", "failed"),
    ),
    style=STAT,
)
_DOLLARS = Panel(
    "Dollars per hour",
    "Of all engines with a price in the settings, at the rate of the newest minute.",
    PanelUnit.DOLLARS,
    (Query(f"sum({gauge(em.COST_PER_HOUR)})", "all engines"),),
    style=STAT,
)


def _now(objectives: Sequence[Objective]) -> Iterator[Panel]:
    attainment, budget = attainment_now(objectives), budget_now(objectives)
    for panel in (_ENGINES, _ALERTS, attainment, budget, _REQUESTS, _DOLLARS):
        yield replace(panel, width=_STAT_WIDTH, height=_STAT_HEIGHT)


@dataclass(frozen=True, slots=True)
class _Figure:
    """A column of the table of engines."""

    name: str
    expression: str
    unit: PanelUnit
    thresholds: tuple[Threshold, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)


def _figures(objectives: Sequence[Objective]) -> tuple[_Figure, ...]:
    of_objective = ("objective", *_LINE)
    attainment = ratio(
        by(of_objective, increase(m.SLO_REQUESTS, SHOWN, MET)),
        by(of_objective, increase(m.SLO_REQUESTS, SHOWN, JUDGED)),
    )
    lowest = min((item.target for item in objectives), default=0.95)
    return (
        _Figure("up", _UP, PanelUnit.NUMBER, good_above(1), {"0": "down", "1": "up"}),
        _Figure("req/s", by(_LINE, rate(m.REQUESTS)), PanelUnit.REQUESTS_PER_S),
        _Figure(
            "waiting",
            by(_LINE, gauge(fact.REQUESTS_WAITING)),
            PanelUnit.NUMBER,
            warn_above(DEEP_QUEUE),
        ),
        _Figure(
            "KV",
            by(_LINE, gauge(fact.KV_CACHE_USAGE), "max"),
            PanelUnit.SHARE,
            warn_above(FULL_CACHE, "orange"),
        ),
        _Figure("TTFT p95", quantile(0.95, m.TTFT, _LINE), PanelUnit.SECONDS),
        _Figure("attainment", by(_LINE, attainment, "min"), PanelUnit.SHARE, good_above(lowest)),
        _Figure("$/h", by(_LINE, gauge(em.COST_PER_HOUR)), PanelUnit.DOLLARS),
    )


def _to(title: str, uid: DashboardUid) -> Link:
    return Link(title, dashboard_url(uid, engine="${__value.raw}"))


_DETAILS = Column(
    name="engine",
    unit=PanelUnit.TEXT,
    links=(
        _to("This engine", DashboardUid.OPERATIONS),
        _to("Its objectives", DashboardUid.OBJECTIVES),
        _to("Its capacity and cost", DashboardUid.CAPACITY),
        *(
            Link(f"Its requests ({each.source})", each.url(engine="${__value.raw}"))
            for each in REQUEST_DASHBOARDS
        ),
    ),
)


_WORST_FIRST = replace(
    TABLE, options={**TABLE.options, "sortBy": [{"displayName": "up", "desc": False}]}
)


def _table(objectives: Sequence[Objective]) -> Panel:
    figures = _figures(objectives)
    return Panel(
        "All engines",
        "One line for each engine; engines that are down come first. Attainment is that of the "
        "engine's worst objective over the time shown; red is below every target. A click on an "
        "engine leads to its details.",
        PanelUnit.NUMBER,
        tuple(Query(each.expression, each.name, instant=True) for each in figures),
        style=_WORST_FIRST,
        width=24,
        height=9,
        lowest=None,
        columns=(_DETAILS, *map(_column, figures)),
        transformations=_one_line_of_each_engine([each.name for each in figures]),
    )


def _column(figure: _Figure) -> Column:
    return Column(
        name=figure.name,
        unit=figure.unit,
        coloured=bool(figure.thresholds),
        thresholds=figure.thresholds,
        texts=figure.texts,
    )


def _one_line_of_each_engine(names: Sequence[str]) -> tuple[Mapping[str, Any], ...]:
    """Merges the results of the queries by their labels, and names the values."""
    renamed = {f"Value #{chr(ord('A') + index)}": name for index, name in enumerate(names)}
    order = {name: index for index, name in enumerate((*_LINE, *renamed))}
    options = {
        "excludeByName": {"Time": True},
        "indexByName": order,
        "renameByName": renamed,
    }
    return {"id": "merge", "options": {}}, {"id": "organize", "options": options}


def fleet_rows(objectives: Sequence[Objective]) -> tuple[PanelRow, ...]:
    """The rows of the dashboard."""
    graphs = (STATE_OF_ENGINES, ATTAINMENT_OVER_TIME, P95_BY_ENGINE[0], RUNNING_AND_WAITING)
    small = (replace(panel, width=_GRAPH_WIDTH, height=_GRAPH_HEIGHT) for panel in graphs)
    return (
        PanelRow("Now", tuple(_now(objectives))),
        PanelRow("Engines", (_table(objectives), *small)),
    )
