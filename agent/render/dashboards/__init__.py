"""Grafana dashboards as texts, made from the catalogue and the objectives."""

from collections.abc import Iterator, Mapping, Sequence

from agent.records.objective import Objective
from agent.render.dashboards import request_sql
from agent.render.dashboards.agent_panels import AGENT_ROWS
from agent.render.dashboards.api_panels import API_ROWS, CHOSEN, WORST_BY
from agent.render.dashboards.efficiency_panels import CAPACITY_ROWS, EFFICIENCY_ROW, ESTIMATES_ROW
from agent.render.dashboards.engine_panels import ENGINE_ROWS
from agent.render.dashboards.fleet_panels import fleet_rows
from agent.render.dashboards.gpu_panels import GPU_ROWS
from agent.render.dashboards.grafana_json import (
    ALERTS,
    EVENTS,
    INFINITY_SOURCE,
    JAEGER_SOURCE,
    POSTGRES_SOURCE,
    STORED,
    TEMPO_SOURCE,
    XIDS,
    choice_variable,
    dashboard_text,
    single_sql_variable,
    sql_variable,
    text_variable,
    variables_used_in,
)
from agent.render.dashboards.objective_panels import objective_rows
from agent.render.dashboards.panel_parts import Dashboard, PanelRow, Query
from agent.render.dashboards.request_panels import REQUEST_ROWS
from agent.render.dashboards.scaling_panels import SCALING_ROW
from agent.render.links import OF_API, DashboardUid

FOLDER = "dashboards"


def render_dashboards(objectives: Sequence[Objective]) -> Mapping[str, str]:
    """The texts of all files by path; equal objectives give equal texts."""
    return {
        f"{FOLDER}/{dashboard.uid}.json": dashboard_text(dashboard)
        for dashboard in all_dashboards(objectives)
    }


def all_dashboards(objectives: Sequence[Objective]) -> Iterator[Dashboard]:
    """Every dashboard."""
    yield from _of_services(objectives)
    yield from _of_resources()
    yield _requests()
    yield _requests_of_api()


def _of_services(objectives: Sequence[Objective]) -> Iterator[Dashboard]:
    yield _on_prometheus(
        DashboardUid.FLEET,
        "Goodput / Fleet",
        "All engines on one screen: state, load, attainment and cost.",
        fleet_rows(objectives),
    )
    yield _on_prometheus(
        DashboardUid.OBJECTIVES,
        "Goodput / Service objectives",
        "Attainment of each objective, goodput, and the error budget.",
        objective_rows(objectives),
        hours=6,
    )
    yield _on_prometheus(
        DashboardUid.OPERATIONS,
        "Goodput / Engines",
        "Health, latency and load of each engine, and its details.",
        ENGINE_ROWS,
    )


def _of_resources() -> Iterator[Dashboard]:
    yield _on_prometheus(
        DashboardUid.GPUS,
        "Goodput / GPUs",
        "Health and use of GPUs, and the efficiency of engines.",
        (*GPU_ROWS, EFFICIENCY_ROW, ESTIMATES_ROW),
    )
    yield _on_prometheus(
        DashboardUid.CAPACITY,
        "Goodput / Capacity and cost",
        "Free capacity, and the cost of tokens and requests.",
        (SCALING_ROW, *CAPACITY_ROWS),
        hours=6,
    )
    yield _on_prometheus(
        DashboardUid.AGENTS,
        "Goodput / Agents",
        "Health of the agents themselves: what they read, store and send.",
        AGENT_ROWS,
    )


def _on_prometheus(
    uid: str, title: str, description: str, rows: tuple[PanelRow, ...], *, hours: int = 1
) -> Dashboard:
    annotations = (EVENTS, ALERTS, XIDS)
    expressions = [each["expr"] for each in annotations]
    for panel in (panel for row in rows for panel in row.panels):
        expressions += [query.expression for query in panel.queries if isinstance(query, Query)]
    return Dashboard(
        uid=uid,
        title=title,
        description=description,
        rows=rows,
        variables=variables_used_in(" ".join(expressions)),
        annotations=annotations,
        hours=hours,
    )


def _requests() -> Dashboard:
    return Dashboard(
        uid=DashboardUid.REQUESTS,
        title="Goodput / Requests",
        description="Single requests from the agent's PostgreSQL database: the worst, the "
        "misses by length and tenant, and one in full with its trace.",
        rows=REQUEST_ROWS,
        annotations=(STORED,),
        variables=(
            POSTGRES_SOURCE,
            JAEGER_SOURCE,
            TEMPO_SOURCE,
            single_sql_variable("objective", request_sql.OBJECTIVES),
            sql_variable("engine", request_sql.ENGINES),
            sql_variable("model", request_sql.MODELS),
            sql_variable("tenant", request_sql.TENANTS),
            choice_variable("worst_by", "Worst by", request_sql.WORST_BY),
            text_variable("request", "Request"),
        ),
    )


def _requests_of_api() -> Dashboard:
    return Dashboard(
        uid=DashboardUid.REQUESTS_API,
        title="Goodput / Requests (API)",
        description="Single requests from the agent's API, for an agent without PostgreSQL. Needs "
        "the Infinity data source.",
        rows=API_ROWS,
        variables=(
            INFINITY_SOURCE,
            *(text_variable(f"{OF_API.prefix}{name}", name.title()) for name in CHOSEN),
            choice_variable(f"{OF_API.prefix}sort", "Worst by", WORST_BY),
            text_variable(f"{OF_API.prefix}request", "Request"),
        ),
    )
