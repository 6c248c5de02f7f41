"""Which queries of the dashboards return a number on a real Prometheus."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from agent.records.objective import Objective
from tests.real_parts.prometheus import Prometheus
from tests.real_parts.waiting import eventually
from tests.render.alerts.cases import OBJECTIVES
from tests.render.dashboards.reading import Asked, dashboards, filled, on_prometheus

# Scrapes come every second; a window must hold a few.
GRAFANA = {"__rate_interval": "15s", "__range": "120s", "__interval": "15s"}
EVERYTHING = {
    **dict.fromkeys(("cluster", "namespace"), ".*"),
    **dict.fromkeys(("job", "instance", "engine", "model", "objective", "gpu"), ".+"),
}


def every_question(objectives: Sequence[Objective] = OBJECTIVES) -> list[Asked]:
    return [
        question for dashboard in dashboards(objectives) for question in on_prometheus(dashboard)
    ]


def unanswered(
    prometheus: Prometheus,
    questions: Iterable[Asked],
    chosen: Mapping[str, str] = EVERYTHING,
) -> list[Asked]:
    """The questions that get no number for these values of variables."""
    values = {**GRAFANA, **chosen}
    return [
        question
        for question in questions
        if not _numbers(prometheus.query(filled(question.expression, values)))
    ]


def _numbers(answer: list[dict[str, Any]]) -> list[float]:
    values = [float(series["value"][1]) for series in answer]
    return [value for value in values if not math.isnan(value)]


def never_answered(
    prometheus: Prometheus,
    questions: Iterable[Asked],
    *,
    meanwhile: Callable[[], None],
    within_s: float,
) -> set[str]:
    """The names of the questions that got no number.

    Whatever is needed for more figures to come happens `meanwhile`, again and again.
    """
    left = list(questions)

    def settled() -> bool:
        meanwhile()
        left[:] = unanswered(prometheus, left)
        return not left

    with suppress(AssertionError):
        eventually(settled, within_s=within_s, what="an answer to every panel")
    return {question.name for question in left}
