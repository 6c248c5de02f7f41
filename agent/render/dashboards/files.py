"""The files of `dashboards/`, each as a text."""

from collections.abc import Iterator, Mapping, Sequence

from agent.records.objective import Objective
from agent.render.dashboards import statements, variables
from agent.render.dashboards.agents import AGENT_ROW
from agent.render.dashboards.annotations import ALERTS, EVENTS, STORED, XIDS
from agent.render.dashboards.capacity import CAPACITY_ROWS
from agent.render.dashboards.drawing import text_of
from agent.render.dashboards.efficiency import EFFICIENCY_ROW
from agent.render.dashboards.engine import ENGINE_ROWS
from agent.render.dashboards.estimates import ESTIMATES_ROW
from agent.render.dashboards.gpus import GPU_ROWS
from agent.render.dashboards.objectives import objective_rows
from agent.render.dashboards.parts import Dashboard, Query, Row
from agent.render.dashboards.requests import REQUEST_ROWS
from agent.render.links import Dashboard as Uid

FOLDER = "dashboards"


def render_dashboards(objectives: Sequence[Objective]) -> Mapping[str, str]:
    """The texts of all files by their paths; the same every time for the same objectives."""
    return {
        f"{FOLDER}/{dashboard.uid}.json": text_of(dashboard)
        for dashboard in all_dashboards(objectives)
    }


def all_dashboards(objectives: Sequence[Objective]) -> Iterator[Dashboard]:
    """Every dashboard."""
    yield _on_prometheus(
        "goodput-objectives",
        "Goodput / Service objectives",
        "What was promised, what was kept, and how fast the error budget goes.",
        objective_rows(objectives),
        hours=6,
    )
    yield _on_prometheus(
        Uid.OPERATIONS,
        "Goodput / Engines",
        "What users get from each engine, and what the engine is doing.",
        (*ENGINE_ROWS, AGENT_ROW),
    )
    yield _on_prometheus(
        Uid.GPUS,
        "Goodput / GPUs",
        "Everything that GPUs tell of themselves, and what engines make of them.",
        (*GPU_ROWS, EFFICIENCY_ROW, ESTIMATES_ROW),
    )
    yield _on_prometheus(
        Uid.CAPACITY,
        "Goodput / Capacity and cost",
        "How much room is left, and what the work costs.",
        CAPACITY_ROWS,
        hours=6,
    )
    yield _requests()


def _on_prometheus(
    uid: str, title: str, description: str, rows: tuple[Row, ...], *, hours: int = 1
) -> Dashboard:
    marks = (EVENTS, ALERTS, XIDS)
    asked = [mark["expr"] for mark in marks]
    for panel in (panel for row in rows for panel in row.panels):
        asked += [query.expression for query in panel.queries if isinstance(query, Query)]
    return Dashboard(
        uid=uid,
        title=title,
        description=description,
        rows=rows,
        variables=variables.asked_in(" ".join(asked)),
        annotations=marks,
        hours=hours,
    )


def _requests() -> Dashboard:
    return Dashboard(
        uid="goodput-requests",
        title="Goodput / Requests",
        description="Single requests from the agent's PostgreSQL database: the worst, where "
        "attainment is lost, and one in full with its trace.",
        rows=REQUEST_ROWS,
        annotations=(STORED,),
        variables=(
            variables.POSTGRES_SOURCE,
            variables.JAEGER_SOURCE,
            variables.TEMPO_SOURCE,
            variables.one_of_sql("objective", statements.OBJECTIVES),
            variables.of_sql("engine", statements.ENGINES),
            variables.of_sql("model", statements.MODELS),
            variables.of_sql("tenant", statements.TENANTS),
            variables.custom("worst_by", "Worst by", statements.WORST_BY),
            variables.textbox("request", "Request"),
        ),
    )
