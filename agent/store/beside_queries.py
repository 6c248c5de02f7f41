"""The requests that ran on an engine in a time, and the engine's samples of it."""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from sqlalchemy import Connection, func, literal, select

from agent.records.gpu import Facts
from agent.records.queries import DataSource
from agent.store.facts import facts_from
from agent.store.tables import engine_samples, requests
from agent.store.unreadable import check_row, readable

# Requests that began earlier are not looked for: the whole table would be read.
LONGEST_S = 3600.0
# Of more, those that began last are read.
_MOST = 2000

_COLUMNS = (
    *("id", "request_id", "trace_id", "span_id", "tenant", "status", "verdict", "cause"),
    *("started_at", "ended_at", "ttft_s", "e2e_s", "queue_s", "prefill_s", "decode_s"),
    *("input_tokens", "cached_tokens", "output_tokens", "preemptions"),
)


def requests_on(
    connection: Connection, of: DataSource, from_s: float, until: float
) -> Sequence[Mapping[str, Any]]:
    """The requests that ran on an engine between two Unix times, the oldest first."""
    started = requests.c.started_at
    query = (
        select(*(requests.c[name] for name in _COLUMNS))
        .where(
            requests.c.engine == of.engine,
            *([] if of.agent is None else [requests.c.agent == of.agent]),
            started >= literal(from_s - LONGEST_S, started.type),
            started < literal(until, started.type),
            requests.c.ended_at > literal(from_s, started.type),
        )
        .order_by(started.desc(), requests.c.id.desc())
        .limit(_MOST)
    )
    rows = connection.execute(query).all()
    return readable(requests, rows, _checked)[::-1]


def _checked(row: Mapping[str, Any]) -> Mapping[str, Any]:
    check_row(requests, row)
    return dict(row)


def samples_of(
    connection: Connection, of: DataSource, from_s: float, until: float
) -> Sequence[tuple[float, Facts]]:
    """The samples of an engine between two Unix times, and the one before, the oldest first."""
    at = engine_samples.c.at
    of_engine = [engine_samples.c.engine == of.engine]
    if of.agent is not None:
        of_engine.append(engine_samples.c.agent == of.agent)
    before = connection.execute(
        select(func.max(at)).where(*of_engine, at < literal(from_s, at.type))
    ).scalar()
    first = from_s if before is None or not isfinite(before) else before
    query = (
        select(engine_samples.c.id, at, engine_samples.c.facts)
        .where(*of_engine, at >= literal(first, at.type), at <= literal(until, at.type))
        .order_by(at)
        .limit(_MOST)
    )
    return readable(engine_samples, connection.execute(query).all(), _sample)


def _sample(row: Mapping[str, Any]) -> tuple[float, Facts]:
    check_row(engine_samples, row)
    return row["at"], facts_from(row["facts"])
