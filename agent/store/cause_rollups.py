"""Rollups of causes: missed requests and their excess seconds, in the widths of other rollups.

They are written in the transaction that stores or removes the explanations.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, text

from agent.analysis.tally import CausePlace, CauseSum, sums_of
from agent.records.objective import ExplainedRequest
from agent.store.rollups import WIDTHS_S, Series, place_of
from agent.store.series_places import (
    MAX_SERIES,
    other_series,
    series_ids,
    stored_ids,
    target_series,
)
from agent.store.tables import CHANGED

_PLACE = ("width_s", "series", "starts_at", "objective", "limit_name", "cause")
SUMS = ("requests", "top_requests", "excess_s")

_ADD = text(
    f"INSERT INTO cause_rollups ({', '.join((*_PLACE, *SUMS))}, changed) "
    f"VALUES ({', '.join(f':{name}' for name in (*_PLACE, *SUMS))}, {CHANGED}) "
    f"ON CONFLICT ({', '.join(_PLACE)}) DO UPDATE SET "
    "requests = cause_rollups.requests + excluded.requests, "
    "top_requests = cause_rollups.top_requests + excluded.top_requests, "
    "excess_s = coalesce(cause_rollups.excess_s + excluded.excess_s, "
    "cause_rollups.excess_s, excluded.excess_s), changed = excluded.changed"
)
# A row without requests stays, to be published.
_SUBTRACT = text(
    f"UPDATE cause_rollups SET changed = {CHANGED}, requests = max(requests - :requests, 0), "
    "top_requests = max(top_requests - :top_requests, 0), excess_s = CASE "
    "WHEN requests > :requests THEN coalesce(excess_s - :excess_s, excess_s) END "
    f"WHERE {' AND '.join(f'{name} = :{name}' for name in _PLACE)}"
)

_Start = tuple[int, Series]


def add_causes(
    connection: Connection, explained: Sequence[ExplainedRequest], max_series: int = MAX_SERIES
) -> None:
    """Add missed requests to the rollups of their causes."""
    for agent, sums in _by_agent(explained).items():
        wanted = [series for _, series in sums]
        targets = target_series(connection, agent, wanted, max_series)
        ids = stored_ids(connection, set(targets.values()))
        rows = _rows(sums, {series: ids[targets[series]] for series in wanted})
        connection.execute(_ADD, rows)


def subtract_causes(connection: Connection, explained: Sequence[ExplainedRequest]) -> None:
    """Subtract missed requests from the rollups of their causes; what has expired is left out."""
    for sums in _by_agent(explained).values():
        wanted = {series for _, series in sums}
        ids = series_ids(connection, wanted | {other_series(series) for series in wanted})
        found = {series: ids.get(series, ids.get(other_series(series))) for series in wanted}
        rows = _rows(sums, found)
        if rows:
            connection.execute(_SUBTRACT, rows)


def _by_agent(
    explained: Sequence[ExplainedRequest],
) -> dict[str, dict[_Start, dict[CausePlace, CauseSum]]]:
    by_agent: dict[str, dict[_Start, dict[CausePlace, CauseSum]]] = {}
    for judged, explanation in explained:
        start = place_of(judged)
        sums = by_agent.setdefault(start[1].agent, {}).setdefault(start, {})
        for place, each in sums_of(explanation).items():
            sums.setdefault(place, CauseSum()).add(each)
    return by_agent


def _rows(
    sums: Mapping[_Start, Mapping[CausePlace, CauseSum]], ids: Mapping[Series, int | None]
) -> list[dict[str, Any]]:
    """The rows of every width."""
    wide: dict[tuple[Any, ...], CauseSum] = {}
    for (starts_at, series), by_place in sums.items():
        series_id = ids[series]
        if series_id is None:
            continue
        for width_s in WIDTHS_S:
            for place, each in by_place.items():
                row = (width_s, series_id, starts_at // width_s * width_s, *place)
                wide.setdefault(row, CauseSum()).add(each)
    return [
        dict(zip(_PLACE, row, strict=True)) | {name: getattr(wide[row], name) for name in SUMS}
        for row in sorted(wide)
    ]
