"""A comparison as one JSON object."""

import json
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from agent.analysis.comparison.comparing import ComparedLine, Comparison
from agent.analysis.comparison.resampling import Interval
from agent.analysis.comparison.run_columns import RunColumns, RunFigures


def json_text(comparison: Comparison) -> str:
    """All figures in base units: seconds, shares from 0 to 1, dollars. Unknown is null."""
    return json.dumps(
        {
            "verdict": comparison.outcome,
            "load_changes": comparison.load_changes,
            "before": _run(comparison.before),
            "after": _run(comparison.after),
            "load": _lines(comparison.load),
            "figures": _lines(comparison.lines),
            "causes": _causes(comparison.causes),
        },
        allow_nan=False,
        indent=2,
    )


def _run(run: RunColumns | RunFigures) -> dict[str, Any]:
    return {
        "name": run.name,
        "requests": run.requests,
        "length_s": run.length_s,
        "has_requests": isinstance(run, RunColumns),
        "configured_load": dict(run.configured_load),
    }


def _lines(lines: Sequence[ComparedLine]) -> list[dict[str, Any]]:
    return [
        {
            "name": line.measure.name,
            "unit": line.measure.quantity,
            "better": line.measure.better,
            "before": _interval(line.before),
            "after": _interval(line.after),
            "change": line.change,
            "change_is": "ratio" if line.measure.is_relative else "difference",
            "chance": line.chance,
            "verdict": line.outcome,
        }
        for line in lines
    ]


def _interval(found: Interval | None) -> dict[str, float | None] | None:
    if found is None or not isfinite(found.value):
        return None
    return {name: each if isfinite(each) else None for name, each in found._asdict().items()}


def _causes(
    causes: Mapping[str, tuple[float, float]] | None,
) -> dict[str, dict[str, float]] | None:
    if causes is None:
        return None
    return {name: {"before": before, "after": after} for name, (before, after) in causes.items()}
