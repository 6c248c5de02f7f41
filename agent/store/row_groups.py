"""Sums of requests by what only their rows have: user, workload, session and priority.

Rollups leave these out. Clients choose them, and sessions would make nearly as many rollups as
there are requests.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import ceil, inf
from typing import Any

from sqlalchemy import ColumnElement, Connection, String, case, cast, func, null, or_, select

from agent.analysis.latency import MAX_TOKENS
from agent.analysis.quantiles import bins_of
from agent.analysis.tally import (
    EDGES_TOKENS,
    INPUT_LENGTHS,
    MEASURES,
    OUTPUT_EDGES_TOKENS,
    OUTPUT_LENGTHS,
    Alike,
    Tally,
    tally_of_alike,
)
from agent.catalog.definitions import Verdict
from agent.catalog.metrics import OTHER
from agent.records.objective import Judgement
from agent.records.queries import OF_ROWS, Dimension, Selection, Window, times_one_in
from agent.records.request import Status, Vantage
from agent.store.connection import ROWS_PER_READ
from agent.store.rollup_queries import selected
from agent.store.rollups import MAX_SERIES
from agent.store.rows import by_objective_from
from agent.store.sql_functions import has_verdict
from agent.store.tables import requests
from agent.store.time_limits import refuse_when_late
from agent.store.unreadable import check_row, finite, readable

# The busiest groups have figures of their own, the rest is one group.
MAX_GROUPS = 1000

ROW_GROUPS: Mapping[Dimension, ColumnElement[str | None]] = {
    "user": requests.c.end_user,
    "workload": requests.c.workload,
    "session": requests.c.session,
    "priority": cast(requests.c.priority, String),
}


def ended_in(
    window: Window, selection: Selection, *, hops: bool = False
) -> list[ColumnElement[bool]]:
    """Conditions for the counted rows of requests, perhaps with hops, that ended in a window."""
    conditions = [
        or_(requests.c.counted, requests.c.hop) if hops else requests.c.counted,
        requests.c.ended_at >= window.from_s,
        requests.c.ended_at < window.until,
        *selected(requests, selection),
    ]
    if selection.objective is not None:
        conditions.append(has_verdict(requests.c.verdicts, selection.objective))
    return conditions


# A sample is of the requests that ended in at least so many short parts of the window, if it has
# enough whole seconds; at most twice as many.
SLICES = 120
# Of each slice's own place in its part of the window: no period of the traffic meets them all.
_GOLDEN_RATIO = (5**0.5 - 1) / 2


def sampled(window: Window, one_in: int) -> list[Window]:
    """Short windows all over this one, with one in so many of its seconds.

    To choose every tenth row, a database would read all.
    """
    if one_in == 1:
        return [window]
    length_s = max(int(window.length_s / SLICES / one_in), 1)
    each_s = length_s * one_in
    slices = []
    for number, begin in enumerate(range(int(window.from_s), ceil(window.until), each_s)):
        at = begin + int(number * _GOLDEN_RATIO % 1 * (each_s - length_s + 1))
        if at < window.until:
            slices.append(Window(from_s=at, until=min(at + length_s, window.until)))
    return slices


def busiest(
    connection: Connection, dimension: Dimension, window: Window, selection: Selection
) -> Sequence[str]:
    """The groups with the most requests."""
    group = ROW_GROUPS[dimension]
    query = (
        select(group)
        .where(*ended_in(window, selection), group.is_not(None))
        .group_by(group)
        .order_by(func.count().desc(), group)
        .limit(MAX_GROUPS)
    )
    return [name for name in connection.execute(query).scalars() if name is not None]


def group_among(dimension: Dimension, names: Sequence[str]) -> ColumnElement[str | None]:
    """The group of a row: one of these names, unknown, or `other`."""
    group = ROW_GROUPS[dimension]
    return case((group.is_(None), null()), (group.in_(names), group), else_=OTHER)


def tallies_of_rows(
    connection: Connection, dimension: Dimension, window: Window, selection: Selection
) -> dict[str | None, Tally]:
    """The counts of the requests of each group; None is the key where it is unknown.

    Of many requests, the latencies are those of a sample (`times_one_in`), each of which stands for
    so many. Raises QueryTooSlow.
    """
    names = frozenset(busiest(connection, dimension, window, selection))
    tallies: dict[str | None, Tally] = defaultdict(Tally)
    counts = _counts(dimension, window, selection)
    rows = connection.execute(counts, execution_options={"yield_per": ROWS_PER_READ})
    for part in rows.partitions():
        refuse_when_late(connection)
        for name, tally in readable(requests, part, _counted):
            tallies[name if name is None or name in names else OTHER].add(tally)
    one_in = times_one_in(sum(tally.requests for tally in tallies.values()))
    for (name, measure), values_s in _times(connection, dimension, window, selection, one_in):
        bins = {key: one_in * number for key, number in bins_of(values_s).items()}
        tallies[name if name is None or name in names else OTHER].add(Tally(bins={measure: bins}))
    return dict(tallies)


def _counts(dimension: Dimension, window: Window, selection: Selection) -> Any:
    """Selects the numbers and tokens of the requests that are alike."""
    alike = ROW_GROUPS[dimension].label("group"), *(requests.c[name] for name in _ALIKE)
    tokens = [
        each.label(f"{name}_{what}")
        for name in _TOKENS
        for what, each in (("sum", func.sum(_plausible(name))), ("n", func.count(_plausible(name))))
    ]
    return (
        select(*alike, func.count().label("number"), *tokens)
        .where(*ended_in(window, selection))
        .group_by(*alike)
    )


_ALIKE = ("vantage", "status", "verdict", "verdicts")
_TOKENS = ("input_tokens", "output_tokens")


def _plausible(name: str) -> ColumnElement[int | None]:
    """A number of tokens; a damaged one would spoil a whole sum."""
    return case((requests.c[name].between(0, MAX_TOKENS), requests.c[name]))


def _counted(row: Mapping[str, Any]) -> tuple[str | None, Tally]:
    check_row(requests, row)
    alike = Alike(
        requests=row["number"],
        vantage=Vantage(row["vantage"]),
        status=Status(row["status"]),
        judgement=_judgement(row["verdict"], row["verdicts"]),
        **{name: int(row[f"{name}_sum"] or 0) for name in _TOKENS},
        **{f"{name}_known": row[f"{name}_n"] for name in _TOKENS},
    )
    if not isinstance(row["group"], str | None):
        raise ValueError("the group is no text")
    return row["group"], tally_of_alike(alike)


def _times(
    connection: Connection,
    dimension: Dimension,
    window: Window,
    selection: Selection,
    one_in: int,
) -> Iterable[tuple[tuple[str | None, str], Sequence[float]]]:
    """The seconds of one in so many requests by group and measure. A damaged value is left out."""
    found: dict[tuple[str | None, str], list[float]] = defaultdict(list)
    columns = ROW_GROUPS[dimension].label("group"), *(requests.c[name] for name in MEASURES)
    for part in sampled(window, one_in):
        # A refusal takes no time, and would hide how long real responses take.
        query = select(*columns).where(
            *ended_in(part, selection), requests.c.status != Status.INVALID
        )
        for name, *values_s in connection.execute(query):
            for measure, value_s in zip(MEASURES, values_s, strict=True):
                if isinstance(value_s, float) and 0 <= value_s < inf:
                    found[name, measure].append(value_s)
        refuse_when_late(connection)
    return found.items()


@lru_cache(maxsize=4096)
def _judgement(verdict: str, verdicts: str) -> Judgement:
    return Judgement(Verdict(verdict), by_objective_from(verdicts))


def cost_by(
    dimension: Dimension, window: Window, selection: Selection, names: Sequence[str] = ()
) -> Any:
    """Selects group, number, dollars and GPU-hours of the requests that ended in a window.

    Of very many groups, those with the most priced requests. `names` are the groups of a dimension
    that only rows know; its other requests are one group. A hop costs, and is no request.
    """
    of_rows = dimension in OF_ROWS
    group = (group_among(dimension, names) if of_rows else GROUPS[dimension]).label("group")
    has_cost = func.coalesce(requests.c.gpu_hours, requests.c.cost_usd)
    priced = func.count(case((requests.c.counted, has_cost)))
    return (
        select(
            group,
            priced,
            func.sum(finite(requests.c.cost_usd)),
            func.sum(finite(requests.c.gpu_hours)),
        )
        .where(*ended_in(window, selection, hops=True))
        .group_by(group)
        .order_by(priced.desc(), group)
        .limit(MAX_SERIES)
    )


def cached_by(
    dimension: Dimension, window: Window, selection: Selection, names: Sequence[str] = ()
) -> Any:
    """Selects group, number, input tokens and cached tokens of the requests that ended in a window.

    Of rows that have both. Groups and `names` are as in `cost_by`.
    """
    of_rows = dimension in OF_ROWS
    group = (group_among(dimension, names) if of_rows else GROUPS[dimension]).label("group")
    number = func.count()
    tokens = requests.c.input_tokens, requests.c.cached_tokens
    return (
        select(group, number, *map(func.sum, tokens))
        .where(*ended_in(window, selection), *(each.is_not(None) for each in tokens))
        .group_by(group)
        .order_by(number.desc(), group)
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

# Of dimensions that rollups have, too, by row.
GROUPS: Mapping[Dimension, ColumnElement[str | None]] = {
    "agent": func.nullif(requests.c.agent, ""),
    "engine": func.nullif(requests.c.engine, ""),
    "model": func.nullif(requests.c.model, ""),
    "tenant": func.nullif(requests.c.tenant, ""),
    "input_length": _INPUT_LENGTH,
}
