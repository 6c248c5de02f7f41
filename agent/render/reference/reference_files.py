"""The files of `docs/reference/` as texts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Table

from agent.records.objective import Objective
from agent.render.alerts.alert_files import RULES, VLLM_ALONE, all_alerts
from agent.render.alerts.timings import Timings
from agent.render.alerts.vllm_alerts import vllm_alerts
from agent.render.reference.alerts_page import alerts_page
from agent.render.reference.metrics_page import metrics_page
from agent.render.reference.settings_page import settings_page
from agent.render.reference.tables_page import tables_page

FOLDER = "docs/reference"
_RUNBOOKS = "../runbooks"


@dataclass(frozen=True, slots=True)
class Declared:
    """Tables of the database, and the meanings of their columns by table."""

    tables: Iterable[Table]
    meanings: Mapping[str, Mapping[str, str]]


def render_reference(
    declared: Declared,
    objectives: Sequence[Objective],
    timings: Timings,
    budget_usd: float | None = None,
) -> Mapping[str, str]:
    """The texts of all pages by path."""
    alerts = {
        RULES: all_alerts(objectives, timings, budget_usd),
        VLLM_ALONE: {"vllm-alone": list(vllm_alerts(objectives, timings))},
    }
    return {
        f"{FOLDER}/metrics.md": metrics_page(),
        f"{FOLDER}/settings.md": settings_page(),
        f"{FOLDER}/alerts.md": alerts_page(alerts, timings, _RUNBOOKS),
        f"{FOLDER}/tables.md": tables_page(declared.tables, declared.meanings),
    }
