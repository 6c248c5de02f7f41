"""The figures that a report is made of: responses of the API for one window."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Json = Mapping[str, Any]

DIMENSIONS = ("engine", "model", "tenant", "input_length")
MOST_GROUPS = 20
MOST_EVENTS = 100
_MOST_STEPS = 150
_STEPS_S = (10, 60, 300, 600, 1800, 3600, 6 * 3600, 86400, 7 * 86400)


class ReadApi(Protocol):
    """Reads one route of the API below `/api/v1/`; parameters are of its query."""

    def __call__(self, route: str, **parameters: str | int) -> Json:
        """The response. Raises AgentError where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFigures:
    """Responses of the API: `groups` by dimension, the newest events first."""

    summary: Json
    objectives: Sequence[Json]
    groups: Mapping[str, Json]
    steps: Sequence[Json]
    events: Sequence[Json]
    more_events: bool


def read_figures(read: ReadApi, window: str, done: Callable[[], None]) -> ReportFigures:
    """The figures of a window that ends now; calls `done` after each of the READS."""

    def get(route: str, **parameters: str | int) -> Json:
        found = read(route, **parameters)
        done()
        return found

    summary = get("summary", window=window)
    step = _step(summary["window_s"])
    events = get("events", window=window, limit=MOST_EVENTS)
    return ReportFigures(
        summary=summary,
        objectives=get("objectives", window=window)["items"],
        groups={by: get("breakdown", by=by, window=window, limit=MOST_GROUPS) for by in DIMENSIONS},
        steps=get("timeseries", window=window, step=step)["items"] if step else [],
        events=events["items"],
        more_events=events["next"] is not None,
    )


# How many responses make a report.
READS = 4 + len(DIMENSIONS)


def _step(window_s: float) -> str | None:
    """The shortest step that makes a readable chart; None of a window too short for one."""
    fitting = (step for step in _STEPS_S if window_s / step <= _MOST_STEPS)
    step = next(fitting, _STEPS_S[-1])
    return f"{step}s" if window_s >= 2 * step else None
