"""The query for what groups of requests cost, summed from their rows."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, case, func, null, select

from agent.analysis.input_lengths import EDGES_TOKENS, INPUT_LENGTHS
from agent.records.queries import OF_ROWS, Dimension, Selection, Window
from agent.store.row_groups import ended_in, group_among
from agent.store.series_places import MAX_SERIES
from agent.store.tables import requests


def cost_by(
    dimension: Dimension, window: Window, selection: Selection, names: Sequence[str] = ()
) -> Any:
    """Selects group, number, dollars and GPU-hours of the requests that ended in a window.

    Of very many groups, those with the most priced requests. `names` are the groups of a dimension
    that only rows know; its other requests are one group.
    """
    of_rows = dimension in OF_ROWS
    group = (group_among(dimension, names) if of_rows else _GROUPS[dimension]).label("group")
    priced = func.count(func.coalesce(requests.c.gpu_hours, requests.c.cost_usd))
    return (
        select(
            group,
            priced,
            func.sum(requests.c.cost_usd),
            func.sum(requests.c.gpu_hours),
        )
        .where(*ended_in(window, selection))
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
