"""The query for what groups of requests cost, summed from their rows."""

from typing import Any

from sqlalchemy import ColumnElement, case, func, null, select

from agent.analysis.input_lengths import EDGES_TOKENS, INPUT_LENGTHS
from agent.records.queries import Dimension, Selection, Window
from agent.store.selection import selected
from agent.store.series_places import MAX_SERIES
from agent.store.tables import requests
from agent.store.verdict_pairs import has_verdict


def cost_by(dimension: Dimension, window: Window, selection: Selection) -> Any:
    """Selects group, number, dollars and GPU-hours of the requests that ended in a window.

    Of very many groups, those with the most priced requests.
    """
    group = _GROUPS[dimension].label("group")
    priced = func.count(func.coalesce(requests.c.gpu_hours, requests.c.cost_usd))
    return (
        select(
            group,
            priced,
            func.sum(requests.c.cost_usd),
            func.sum(requests.c.gpu_hours),
        )
        .where(
            requests.c.counted,
            requests.c.ended_at >= window.from_s,
            requests.c.ended_at < window.until,
            *_of(selection),
        )
        .group_by(group)
        .order_by(priced.desc(), group)
        .limit(MAX_SERIES)
    )


def _input_length() -> ColumnElement[str | None]:
    tokens, *shorter = requests.c.input_tokens, *zip(EDGES_TOKENS, INPUT_LENGTHS, strict=False)
    below = [(tokens < edge, name) for edge, name in shorter]
    return case((tokens.is_(None), null()), *below, else_=INPUT_LENGTHS[-1])


_GROUPS: dict[Dimension, ColumnElement[str | None]] = {
    "engine": func.nullif(requests.c.engine, ""),
    "model": func.nullif(requests.c.model, ""),
    "tenant": func.nullif(requests.c.tenant, ""),
    "input_length": _input_length(),
}


def _of(selection: Selection) -> list[ColumnElement[bool]]:
    conditions = selected(requests, selection)
    if selection.objective is not None:
        conditions.append(has_verdict(requests.c.verdicts, selection.objective))
    return conditions
