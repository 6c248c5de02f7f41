"""Request records as rows for the drivers, without a detour through the ORM's types."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache, lru_cache
from operator import attrgetter
from typing import Any

from sqlalchemy import Float

from agent.catalog.definitions import Verdict
from agent.records.objective import JudgedRequest
from agent.records.request import RequestRecord, Status, Vantage
from agent.store.tables import requests

_MOMENTS = ("started_at", "ended_at", "received_at")
_ENUMS = ("vantage", "status")
_APART = (*_MOMENTS, *_ENUMS, "proxied")
_PLAIN = tuple(name for name in RequestRecord._fields if name not in _APART)

# The order of the values in every row below.
COLUMNS = (*_MOMENTS, *_ENUMS, "verdict", "verdicts", *_PLAIN)

_FLOATS = frozenset(column.name for column in requests.c if isinstance(column.type, Float))

_plain_values = attrgetter(*_PLAIN)

# Drivers look for adapters of every type but the plain ones, and psycopg writes an enum's name.
_TEXTS = {member: member.value for members in (Vantage, Status, Verdict) for member in members}


@cache
def verdicts_text(by_objective: tuple[tuple[str, Verdict], ...]) -> str:
    """The verdict of each objective as a JSON object, by the objective's name."""
    return json.dumps({name: str(verdict) for name, verdict in by_objective})


@lru_cache(maxsize=4096)
def _second_text(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%d %H:%M:%S")


def sqlite_moment(at: float) -> str:
    """A moment as SQLAlchemy keeps it in SQLite: UTC, without a zone, to the microsecond."""
    second = int(at // 1)
    # The difference is exact, and so rounded as datetime rounds it for questions and PostgreSQL.
    microsecond = round((at - second) * 1_000_000)
    if microsecond == 1_000_000:
        second, microsecond = second + 1, 0
    return f"{_second_text(second)}.{microsecond:06d}"


def postgres_moment(at: float) -> datetime:
    """A moment as psycopg takes it."""
    return datetime.fromtimestamp(at, UTC)


def sqlite_rows(judged: Sequence[JudgedRequest]) -> list[tuple[Any, ...]]:
    """One tuple a request, in the order of COLUMNS."""
    return [_row(item, sqlite_moment) for item in judged]


def postgres_columns(judged: Sequence[JudgedRequest]) -> list[list[Any]]:
    """One list a column, in the order of COLUMNS."""
    rows = [_row(item, postgres_moment) for item in judged]
    columns = zip(*rows, strict=True)
    return [
        _floats(column) if name in _FLOATS else list(column)
        for name, column in zip(COLUMNS, columns, strict=True)
    ]


def _floats(column: Sequence[float | None]) -> list[float | None]:
    """psycopg takes no list in which a whole number stands beside a fraction."""
    return [None if value is None else float(value) for value in column]


def _row(item: JudgedRequest, moment: Any) -> tuple[Any, ...]:
    record = item.record
    return (
        moment(record.started_at),
        moment(record.ended_at),
        moment(record.received_at),
        _TEXTS[record.vantage],
        _TEXTS[record.status],
        _TEXTS[item.judgement.verdict],
        verdicts_text(item.judgement.by_objective),
        *_plain_values(record),
    )
