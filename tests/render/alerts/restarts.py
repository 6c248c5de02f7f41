"""Incidents with a reset of all counters in the middle."""

import re
from collections.abc import Iterator
from typing import Any

from tests.render.alerts.cases import Case, Series, firing, play

_COUNTER = re.compile(r"[\w:]+_(?:total|bucket|count)\{")
# Of promtool's notation: a start, a step and how often.
_TOKEN = re.compile(r"(_|stale|[\d.]+)(?:\+([\d.]+))?(?:x(\d+))?")


def restarted(case: Case, around: Series) -> dict[str, Any] | None:
    """The test that a counter reset during the incident neither ends nor prolongs it.

    None where the incident has no counters.
    """
    counters = {
        name: anew(values, case.at)
        for name, values in case.incident.items()
        if _COUNTER.match(name)
    }
    if not counters:
        return None
    return play(
        f"{case.alert} outlives counters that begin anew amid its incident",
        {**around, **case.incident, **counters},
        [firing(case.at, {case.alert: 1, **case.also}), firing(case.after, case.left)],
    )


def anew(values: str, minute: int) -> str:
    """The values of a counter that is back at 0 at a minute."""
    every = list(_samples(values))
    lost = every[minute] if minute < len(every) else None
    if not isinstance(lost, float):
        return values
    later = (sample if isinstance(sample, str) else _later(sample, lost) for sample in every)
    return " ".join(str(sample) for sample in [*every[:minute], *list(later)[minute:]])


def _later(sample: float, lost: float) -> float:
    """The growth since then; a counter that is lower by now was reset by itself."""
    return sample - lost if sample >= lost else sample


def _samples(values: str) -> Iterator[float | str]:
    for token in values.split():
        found = _TOKEN.fullmatch(token)
        assert found is not None, token
        start, step, times = found.groups()
        if start in ("_", "stale"):
            yield from [start] * int(times or 1)
        else:
            yield from (float(start) + n * float(step or 0) for n in range(int(times or 0) + 1))
