"""Adds the figures of ended requests to stored rows, and deletes own rows that were superseded."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Engine, bindparam, or_, select, tuple_, update
from sqlalchemy.exc import SQLAlchemyError

from agent.analysis.joined_record import with_figures
from agent.analysis.verdicts import Judge
from agent.records.engine import EndedRequest
from agent.records.objective import JudgedRequest
from agent.store.connection import for_writing, logged_unavailable
from agent.store.inserting import Key
from agent.store.joining import delete_rows
from agent.store.rollups import add_to_rollups
from agent.store.rows import ALL_COLUMNS, checked_from, counted_values
from agent.store.tables import requests
from agent.store.unreadable import readable

# Statements have a limited number of parameters.
_ROWS_PER_STEP = 1000
_NOT_NOW = "figures of engines' plugins could not be stored"

_VALUES = tuple(name for name in ALL_COLUMNS if name not in ("settles_at", "counted"))
_AMEND = (
    update(requests)
    .where(requests.c.id == bindparam("row"))
    .values({name: bindparam(name) for name in _VALUES})
)

Amend = Callable[[Mapping[Key, EndedRequest], Sequence[Key]], None]


def request_amend(engine: Engine, judge: Judge) -> Amend:
    """A function that amends and deletes rows and their rollups in one transaction.

    It gets the ended requests by the keys of their rows, and the keys of superseded rows. Keys
    without a row are ignored. It raises StoreUnavailable.
    """
    writing = for_writing(engine)

    def amend(figures: Mapping[Key, EndedRequest], superseded: Sequence[Key]) -> None:
        try:
            with writing.begin() as connection:
                counted, uncounted = _amended(connection, figures, judge)
                uncounted += _removed(connection, superseded)
                add_to_rollups(connection, counted, uncounted)
        except SQLAlchemyError as error:
            raise logged_unavailable(_NOT_NOW, error) from error

    return amend


def _amended(
    connection: Connection, figures: Mapping[Key, EndedRequest], judge: Judge
) -> tuple[list[JudgedRequest], list[JudgedRequest]]:
    """Amend rows; returns the counted ones as they are now, and as they were before."""
    counted, uncounted, values = [], [], []
    found = readable(
        requests, _rows(connection, list(figures)), lambda row: (row, checked_from(row))
    )
    for row, before in found:
        ended = next(figures[key] for key in _keys(row) if key in figures)
        after = judge.judged(with_figures(before.record, [ended]))
        values.append({"row": row["id"], **{name: counted_values(after)[name] for name in _VALUES}})
        if row["counted"]:
            uncounted.append(before)
            counted.append(after)
    if values:
        connection.execute(_AMEND, values)
    return counted, uncounted


def _removed(connection: Connection, superseded: Sequence[Key]) -> list[JudgedRequest]:
    """Delete rows; returns those that were counted."""
    rows = _rows(connection, superseded)
    delete_rows(connection, [row["id"] for row in rows])
    return readable(requests, (row for row in rows if row["counted"]), checked_from)


def _rows(connection: Connection, keys: Sequence[Key]) -> list[Mapping[str, Any]]:
    """The rows of these records."""
    found: dict[int, Mapping[str, Any]] = {}
    for first in range(0, len(keys), _ROWS_PER_STEP):
        some = keys[first : first + _ROWS_PER_STEP]
        query = select(requests).where(
            # SQLite uses no index for pairs.
            requests.c.trace_id.in_(sorted({trace_id for trace_id, _ in some})),
            # A proxy's row may have been joined since.
            or_(
                tuple_(requests.c.trace_id, requests.c.span_id).in_(some),
                tuple_(requests.c.trace_id, requests.c.proxy_span_id).in_(some),
            ),
        )
        found |= {row.id: dict(row._mapping) for row in connection.execute(query)}
    return [found[row] for row in sorted(found)]


def _keys(row: Mapping[str, Any]) -> tuple[Key, ...]:
    own = (row["trace_id"], row["span_id"])
    return own, (row["trace_id"], row["proxy_span_id"] or "")
