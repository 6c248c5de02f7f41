"""Converts judged requests to rows for the drivers, past SQLAlchemy's types, and back."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache, lru_cache
from math import isfinite
from operator import attrgetter
from typing import Any

from agent.catalog.definitions import Verdict
from agent.records.objective import JudgedRequest, Judgement
from agent.records.request import EngineView, ProxyView, RequestRecord, Status, Vantage
from agent.store.columns import (
    ENGINE_FIELDS,
    PROXY_FIELDS,
    RECORD_FIELDS,
    engine_column,
)
from agent.store.tables import requests
from agent.store.unreadable import check_row

# These are converted in `_row`, which names them for its speed.
_TIMESTAMPS = ("started_at", "ended_at", "received_at")
_ENUMS = ("vantage", "status")
_APART = {*_TIMESTAMPS, *_ENUMS, "proxy_span_id"}
_PLAIN = tuple(field.name for field in RECORD_FIELDS if field.name not in _APART)

# The columns of an engine's view that waits for nothing, in the order of its row.
COLUMNS = (*_TIMESTAMPS, *_ENUMS, "verdict", "verdicts", *_PLAIN)

_PROXY_PLAIN = tuple(field.name for field in PROXY_FIELDS if not field.is_json)
_ENGINE_PLAIN = tuple(field.name for field in ENGINE_FIELDS if not field.is_enum)

# The columns of any other row, in its order.
ALL_COLUMNS = (
    *COLUMNS,
    *("proxy_span_id", "gaps", *_PROXY_PLAIN),
    *("engine_status", *map(engine_column, _ENGINE_PLAIN)),
    *("settles_at", "counted"),
)

_plain_values = attrgetter(*_PLAIN)
_proxy_values = attrgetter(*_PROXY_PLAIN)
_engine_values = attrgetter(*_ENGINE_PLAIN)

# Drivers search an adapter for every type that is not plain, and psycopg writes an enum's name.
_TEXTS = {member: member.value for members in (Vantage, Status, Verdict) for member in members}

# The time at which a view is settled alone, in Unix seconds; None where it does not wait.
SettlesAt = Callable[[RequestRecord], float | None]


@cache
def verdicts_text(by_objective: tuple[tuple[str, Verdict], ...]) -> str:
    """The verdict of each objective as a JSON object, by the objective's name."""
    return json.dumps({name: str(verdict) for name, verdict in by_objective})


@lru_cache(maxsize=4096)
def _second_text(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%d %H:%M:%S")


def sqlite_timestamp(at: float) -> str:
    """Unix seconds as SQLAlchemy writes them in SQLite: UTC, without a zone, to the microsecond."""
    second = int(at // 1)
    # The difference is exact, so it is rounded as datetime rounds for queries and PostgreSQL.
    microsecond = round((at - second) * 1_000_000)
    if microsecond == 1_000_000:
        second, microsecond = second + 1, 0
    return f"{_second_text(second)}.{microsecond:06d}"


def sqlite_rows(judged: Sequence[JudgedRequest]) -> list[tuple[Any, ...]]:
    """One tuple per request, in the order of COLUMNS."""
    return [_row(item, sqlite_timestamp) for item in judged]


def all_sqlite_rows(
    judged: Sequence[JudgedRequest], settles_at: SettlesAt
) -> list[tuple[Any, ...]]:
    """One tuple per request, in the order of ALL_COLUMNS."""
    return [_whole_row(item, sqlite_timestamp, settles_at(item.record)) for item in judged]


def _row(item: JudgedRequest, timestamp: Any) -> tuple[Any, ...]:
    record = item.record
    return (
        timestamp(record.started_at),
        timestamp(record.ended_at),
        timestamp(record.received_at),
        _TEXTS[record.vantage],
        _TEXTS[record.status],
        _TEXTS[item.judgement.verdict],
        verdicts_text(item.judgement.by_objective),
        *_plain_values(record),
    )


_NO_PROXY_VIEW = ProxyView()
_NO_ENGINE_VIEW = EngineView()


def _whole_row(item: JudgedRequest, timestamp: Any, settles_at: float | None) -> tuple[Any, ...]:
    record = item.record
    proxied = record.proxied or _NO_PROXY_VIEW
    engine_view = record.engine_view or _NO_ENGINE_VIEW
    return (
        *_row(item, timestamp),
        record.span_id if record.vantage is Vantage.PROXY else record.proxy_span_id,
        None if proxied.gaps is None else json.dumps(dict(proxied.gaps)),
        *_proxy_values(proxied),
        None if engine_view.status is None else _TEXTS[engine_view.status],
        *_engine_values(engine_view),
        None if settles_at is None else timestamp(settles_at),
        settles_at is None and not record.is_aside,
    )


def _same(at: float) -> float:
    return at


def counted_values(item: JudgedRequest) -> dict[str, Any]:
    """The values of a settled request by column, for SQLAlchemy to write."""
    return dict(zip(ALL_COLUMNS, _whole_row(item, _same, None), strict=True))


def judged_from(row: Mapping[str, Any]) -> JudgedRequest:
    """The request and its judgement from a row that SQLAlchemy read.

    Raises one of DAMAGED for most rows that cannot be read.
    """
    if not isfinite(sum(row[name] for name in _TIMESTAMPS)):
        raise ValueError("a timestamp cannot be read")
    record = RequestRecord(
        **{name: row[name] for name in (*_TIMESTAMPS, *_PLAIN)},
        vantage=Vantage(row["vantage"]),
        status=Status(row["status"]),
        proxied=_proxy_view(row),
        proxy_span_id=row["proxy_span_id"] if row["vantage"] == Vantage.JOINED else None,
        engine_view=_engine_view(row),
    )
    judgement = Judgement(Verdict(row["verdict"]), by_objective_from(row["verdicts"]))
    return JudgedRequest(record, judgement)


def checked_from(row: Mapping[str, Any]) -> JudgedRequest:
    """The same. Raises one of DAMAGED for a row with a value that its column cannot have."""
    check_row(requests, row)
    return judged_from(row)


def by_objective_from(stored: str) -> tuple[tuple[str, Verdict], ...]:
    """The verdict of each objective from JSON."""
    return tuple((name, Verdict(verdict)) for name, verdict in json.loads(stored).items())


def _proxy_view(row: Mapping[str, Any]) -> ProxyView | None:
    if row["proxy_span_id"] is None:
        return None
    gaps = None if row["gaps"] is None else bins_from(row["gaps"])
    return ProxyView(gaps=gaps, **{name: row[name] for name in _PROXY_PLAIN})


def bins_from(stored: str) -> dict[int, int]:
    """Counts by bin from JSON, where the bins are texts."""
    return {int(place): count for place, count in json.loads(stored).items()}


def _engine_view(row: Mapping[str, Any]) -> EngineView | None:
    if row["engine_status"] is None:
        return None
    plain = {name: row[engine_column(name)] for name in _ENGINE_PLAIN}
    return EngineView(status=Status(row["engine_status"]), **plain)
