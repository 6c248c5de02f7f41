"""Single requests as dots, and what a box of dots holds beside the rest, for the scatter."""

from collections.abc import Iterable, Mapping, Sequence
from math import ceil, isfinite
from typing import Any

from sqlalchemy import Column, ColumnElement, Connection, and_, case, func, literal, select

from agent.analysis.contrast import BoxCounts, GroupCount
from agent.records.queries import Box, Dots, Latency
from agent.store.row_groups import GROUPS
from agent.store.tables import requests

MAX_DOTS = 20_000
_MOST_SESSIONS = 100

_LATENCIES: Mapping[Latency, Column[float]] = {
    "ttft": requests.c.ttft_s,
    "tpot": requests.c.tpot_s,
    "e2e": requests.c.e2e_s,
}
_DIMENSIONS: Mapping[str, ColumnElement[str | None]] = {
    "cause": requests.c.cause,
    **{name: GROUPS[name] for name in ("tenant", "model", "engine", "input_length")},
}


def dots(
    connection: Connection,
    started: Sequence[ColumnElement[bool]],
    others: Sequence[ColumnElement[bool]],
    by: Latency,
) -> Dots:
    """At most MAX_DOTS of the requests that match, evenly taken; `started` are conditions of time.

    The time alone is counted in the index. If the other conditions leave few of what was taken,
    more are taken in a second query.
    """
    counted = select(func.count()).select_from(requests).where(*started)
    every = max(1, ceil(connection.execute(counted).scalar_one() / MAX_DOTS))
    matching = [*started, *others]
    rows = _each(connection, matching, by, every)
    if every > 1 and len(rows) < MAX_DOTS // 2:
        every = max(1, ceil(1.1 * len(rows) * every / MAX_DOTS))
        rows = _each(connection, matching, by, every)
    return Dots(every, rows)


def _each(
    connection: Connection, matching: Sequence[ColumnElement[bool]], by: Latency, every: int
) -> Sequence[tuple[float, float, str]]:
    latency = _LATENCIES[by]
    query = (
        select(requests.c.started_at, latency, requests.c.verdict)
        .where(*matching, latency.is_not(None))
        .limit(MAX_DOTS)
    )
    if every > 1:
        query = query.where(requests.c.id % every == 0)
    return [
        (at, value, verdict)
        for at, value, verdict in connection.execute(query)
        if _is_finite(at) and _is_finite(value) and isinstance(verdict, str)
    ]


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and isfinite(value)


def box_counts(
    connection: Connection, matching: Sequence[ColumnElement[bool]], box: Box
) -> BoxCounts:
    """How many requests are in the box and outside, in all and by each name. Reads all rows."""
    latency = _LATENCIES[box.by]
    known = [*matching, latency.is_not(None)]
    is_inside = _inside(latency, box)
    counts = _counts(is_inside)
    groups = [each.label(name) for name, each in _DIMENSIONS.items()]
    by_names: Any = select(*groups, *counts).where(*known).group_by(*groups)
    together: Sequence[Any] = connection.execute(by_names).all()
    session = requests.c.session
    sessions = connection.execute(
        select(session, *counts)
        .where(*known, session.is_not(None))
        .group_by(session)
        .having(counts[0] > 0)
        .order_by(counts[0].desc(), session)
        .limit(_MOST_SESSIONS)
    ).all()
    inside: int = sum(row[-2] for row in together)
    return BoxCounts(
        inside=inside,
        outside=sum(row[-1] for row in together) - inside,
        groups=(*_by_name(together), *(_group("session", *row) for row in sessions)),
    )


def _inside(latency: Column[float], box: Box) -> ColumnElement[bool]:
    at = requests.c.started_at
    return and_(
        at >= literal(box.from_s, at.type),
        at <= literal(box.until_s, at.type),
        latency >= box.min_s,
        latency <= box.max_s,
    )


def _counts(is_inside: ColumnElement[bool]) -> tuple[ColumnElement[int], ColumnElement[int]]:
    """Requests in the box, and in all."""
    return func.sum(case((is_inside, 1), else_=0)), func.count()


def _by_name(rows: Iterable[Sequence[Any]]) -> Iterable[GroupCount]:
    sums: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        for dimension, name in zip(_DIMENSIONS, row, strict=False):
            if name is not None:
                total = sums.setdefault((dimension, str(name)), [0, 0])
                total[0] += row[-2]
                total[1] += row[-1]
    return [_group(*place, *total) for place, total in sums.items()]


def _group(dimension: str, name: str, inside: int, in_all: int) -> GroupCount:
    return GroupCount(dimension=dimension, name=name, inside=inside, outside=in_all - inside)
