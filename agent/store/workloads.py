"""Queries that sum rows of requests by what they are: what groups cost, verdicts by length."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, case, func, null, select

from agent.analysis.tally import (
    EDGES_TOKENS,
    INPUT_LENGTHS,
    OUTPUT_EDGES_TOKENS,
    OUTPUT_LENGTHS,
)
from agent.catalog.definitions import Verdict
from agent.records.queries import OF_ROWS, Dimension, Selection, Window
from agent.store.row_groups import ended_in, group_among
from agent.store.series_places import MAX_SERIES
from agent.store.tables import requests
from agent.store.unreadable import finite
from agent.store.verdict_pairs import has_verdict


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
            func.sum(finite(requests.c.cost_usd)),
            func.sum(finite(requests.c.gpu_hours)),
        )
        .where(*ended_in(window, selection))
        .group_by(group)
        .order_by(priced.desc(), group)
        .limit(MAX_SERIES)
    )


def verdicts_by_length(window: Window, selection: Selection) -> Any:
    """Selects input length, output length and the numbers of met and of missed requests.

    Of the requests that ended in a window and whose lengths are known.
    """
    lengths = _INPUT_LENGTH, _OUTPUT_LENGTH
    return (
        select(*lengths, _number(Verdict.MET, selection), _number(Verdict.MISSED, selection))
        .where(*ended_in(window, selection), *(length.is_not(None) for length in lengths))
        .group_by(*lengths)
        .order_by(*lengths)
    )


def _number(verdict: Verdict, selection: Selection) -> ColumnElement[int]:
    objective = selection.objective
    has = requests.c.verdict == verdict
    if objective is not None:
        has = has_verdict(requests.c.verdicts, objective, verdict)
    return func.sum(case((has, 1), else_=0))


def _length(
    tokens: ColumnElement[int | None], edges: Sequence[int], names: Sequence[str]
) -> ColumnElement[str | None]:
    below = [(tokens < edge, name) for edge, name in zip(edges, names, strict=False)]
    return case((tokens.is_(None), null()), *below, else_=names[-1])


_INPUT_LENGTH = _length(requests.c.input_tokens, EDGES_TOKENS, INPUT_LENGTHS)
_OUTPUT_LENGTH = _length(requests.c.output_tokens, OUTPUT_EDGES_TOKENS, OUTPUT_LENGTHS)

_GROUPS: dict[Dimension, ColumnElement[str | None]] = {
    "agent": func.nullif(requests.c.agent, ""),
    "engine": func.nullif(requests.c.engine, ""),
    "model": func.nullif(requests.c.model, ""),
    "tenant": func.nullif(requests.c.tenant, ""),
    "input_length": _INPUT_LENGTH,
}
