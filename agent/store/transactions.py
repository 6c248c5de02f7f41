"""Transactions: store requests and update rollups, settle waiting ones, amend stored ones."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine, bindparam, or_, select, tuple_, update
from sqlalchemy.exc import DataError, IntegrityError, SQLAlchemyError

from agent.analysis.joined_record import with_figures
from agent.analysis.verdicts import Judge
from agent.catalog.definitions import Verdict
from agent.errors import StoreUnavailable
from agent.records.engine import EndedRequest
from agent.records.objective import JudgedRequest, Settled, WriteResult
from agent.records.request import Vantage
from agent.store.connection import driver_message, for_writing, logged_unavailable
from agent.store.explanations import subtract_causes
from agent.store.hops import Hops
from agent.store.inserting import Key, at_once, insert_new, key_of
from agent.store.joining import (
    Recount,
    delete_rows,
    due_rows,
    join_new,
    set_row_aside,
    settle_rows,
    waiting_for,
)
from agent.store.rollups import add_to_rollups
from agent.store.routers import RouterViews
from agent.store.rows import ALL_COLUMNS, SettlesAt, checked_from, counted_values
from agent.store.tables import requests
from agent.store.unreadable import readable
from agent.store.writing import Settle, Write

_LOG = logging.getLogger(__name__)

_STORED_LATER = "the requests could not be stored"
_SETTLED_LATER = "waiting requests could not be settled"

_StoreRows = Callable[[Connection, Sequence[JudgedRequest]], WriteResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """How the views of one request are joined.

    A view that another view may follow waits `wait_s` from its receipt, then it is settled alone;
    None if no views are joined. `judge` judges every joined request again. Figures of a plugin may
    follow the spans of engines in `with_plugin`. The rows of engines in `prefilling` are hops.
    """

    judge: Judge
    wait_s: float | None
    with_plugin: Collection[str] = ()
    prefilling: Collection[str] = ()


def request_write(
    engine: Engine, joining: Joining | None = None, verify: Callable[[], None] | None = None
) -> Write:
    """A function that stores requests and their rollups in one transaction.

    Rows that the database refuses for their content are left out. `verify` is called after each
    commit, and raises StoreUnavailable if the file of the commit was deleted or replaced.
    """
    writing = for_writing(engine)
    store = _storing(joining)

    def write(judged: Sequence[JudgedRequest]) -> WriteResult:
        try:
            with writing.begin() as connection:
                return store(connection, judged)
        except Exception as error:
            _raise_unless_unstorable(error)
        try:
            with writing.begin() as connection:
                return _store_apart(connection, judged, store)
        except SQLAlchemyError as error:
            raise logged_unavailable(_STORED_LATER, error) from error

    def write_verified(judged: Sequence[JudgedRequest]) -> WriteResult:
        result = write(judged)
        if verify is not None:
            verify()
        return result

    return write_verified


def _store_apart(
    connection: Connection, judged: Sequence[JudgedRequest], store: _StoreRows
) -> WriteResult:
    """Store each half on its own, again and again, until a row that fails is alone."""
    try:
        with connection.begin_nested():
            return store(connection, judged)
    except Exception as error:
        _raise_unless_unstorable(error)
        if len(judged) == 1:
            span = "span {1} of trace {0}".format(*key_of(judged[0]))
            _LOG.warning(
                "%s cannot be stored: %s", span, driver_message(error), exc_info=_is_ours(error)
            )
            return WriteResult([], [], [], judged)
    half = len(judged) // 2
    first = _store_apart(connection, judged[:half], store)
    second = _store_apart(connection, judged[half:], store)
    return WriteResult(*[[*one, *other] for one, other in zip(first, second, strict=True)])


# The errors of drivers and conversions for the value of a row.
_OF_VALUES = (DataError, IntegrityError, ValueError, OverflowError)


def _is_ours(error: Exception) -> bool:
    return not isinstance(error, (*_OF_VALUES, SQLAlchemyError))


def _raise_unless_unstorable(error: Exception) -> None:
    _raise_unless_of_rows(error, _STORED_LATER)


def _raise_unless_of_rows(error: Exception, sentence: str) -> None:
    """Raise StoreUnavailable unless the content of the rows caused the error."""
    if isinstance(error, StoreUnavailable):
        raise error
    if isinstance(error, SQLAlchemyError) and not isinstance(error, _OF_VALUES):
        raise logged_unavailable(sentence, error) from error


def _storing(joining: Joining | None) -> _StoreRows:
    if joining is None:
        return _store
    wait_s, judge = joining.wait_s, joining.judge
    waits = waiting_for(wait_s, joining.with_plugin)
    hops, routers = Hops(joining.prefilling), RouterViews()

    def store(connection: Connection, judged: Sequence[JudgedRequest]) -> WriteResult:
        are_routed = routers.are_among(judged)
        settles_at = waits if wait_s is not None or are_routed else at_once
        new = insert_new(connection, hops.marked(judged), settles_at)
        hops.attach(connection, new)
        routers.attach(connection, new)
        requests_of = [item for item in new if not item.record.is_aside]
        alone = [item for item in requests_of if settles_at(item.record) is None]
        views = [item for item in requests_of if _may_have_another(item, settles_at)]
        joins = wait_s is not None and views
        recount = join_new(connection, views, judge) if joins else Recount()
        subtract_causes(connection, recount.unexplained)
        add_to_rollups(connection, alone + recount.counted, recount.uncounted)
        return WriteResult(new, alone + recount.first, alone + recount.final)

    return store


def _may_have_another(item: JudgedRequest, settles_at: SettlesAt) -> bool:
    """Whether another view may be stored: also the engine's span of a request that was joined where
    it was measured."""
    return item.record.vantage is Vantage.JOINED or settles_at(item.record) is not None


def _store(connection: Connection, judged: Sequence[JudgedRequest]) -> WriteResult:
    new = insert_new(connection, judged, at_once)
    requests_of = [item for item in new if not item.record.is_aside]
    add_to_rollups(connection, requests_of)
    return WriteResult(new, requests_of, requests_of)


def request_settle(
    engine: Engine, joining: Joining, on_set_aside: Callable[[int], None] | None = None
) -> Settle:
    """A function that settles the views whose wait has ended, with rollups, in one transaction.

    A row that can be neither read nor counted is set aside, and `on_set_aside` gets its number: so
    the other rows need not wait for it.
    """
    writing = for_writing(engine)

    def settle(now: float) -> Settled:
        try:
            # Most of the time no wait has ended, and then nothing is written.
            with engine.connect() as connection:
                if not due_rows(connection, now, joining.wait_s):
                    return Settled([], [])
            with writing.begin() as connection:
                keys = due_rows(connection, now, joining.wait_s)
                return _settle(connection, keys, joining.judge, now)
        except Exception as error:
            _raise_unless_content(error)
        set_aside: list[int] = []
        try:
            with writing.begin() as connection:
                keys = due_rows(connection, now, joining.wait_s)
                settled = _settle_apart(connection, keys, joining.judge, now, set_aside)
        except SQLAlchemyError as error:
            raise logged_unavailable(_SETTLED_LATER, error) from error
        if on_set_aside is not None:
            for row in set_aside:
                on_set_aside(row)
        return settled

    return settle


def _settle(
    connection: Connection,
    keys: Mapping[int, Key],
    judge: Judge,
    now: float,
    *,
    alone: bool = False,
) -> Settled:
    if not keys:
        return Settled([], [])
    recount = settle_rows(connection, keys, judge, now, alone=alone)
    subtract_causes(connection, recount.unexplained)
    add_to_rollups(connection, recount.counted, recount.uncounted)
    return Settled(recount.first, recount.final)


def _settle_apart(
    connection: Connection,
    keys: Mapping[int, Key],
    judge: Judge,
    now: float,
    set_aside: list[int],
) -> Settled:
    """Settle each half on its own, again and again, until a row that fails is alone."""
    try:
        with connection.begin_nested():
            return _settle(connection, keys, judge, now)
    except Exception as error:
        _raise_unless_content(error)
    if len(keys) == 1:
        return _settle_alone(connection, keys, judge, now, set_aside)
    rows = [*keys.items()]
    half = len(rows) // 2
    one = _settle_apart(connection, dict(rows[:half]), judge, now, set_aside)
    other = _settle_apart(connection, dict(rows[half:]), judge, now, set_aside)
    return Settled(one.counted + other.counted, one.final + other.final)


def _settle_alone(
    connection: Connection,
    keys: Mapping[int, Key],
    judge: Judge,
    now: float,
    set_aside: list[int],
) -> Settled:
    """Settle a row without its other view, which may be the cause; if that fails, set it aside."""
    try:
        with connection.begin_nested():
            return _settle(connection, keys, judge, now, alone=True)
    except Exception as error:
        _raise_unless_content(error)
        ((row, (trace_id, span_id)),) = keys.items()
        _LOG.warning(
            "span %s of trace %s, row %d of requests, is never counted: %s",
            *(span_id, trace_id, row, driver_message(error)),
            exc_info=_is_ours(error),
        )
    set_row_aside(connection, row)
    set_aside.append(row)
    return Settled([], [])


def _raise_unless_content(error: Exception) -> None:
    _raise_unless_of_rows(error, _SETTLED_LATER)


# Statements have a limited number of parameters.
_ROWS_PER_STEP = 1000
_NOT_NOW = "figures of engines' plugins could not be stored"

_VALUES = tuple(name for name in ALL_COLUMNS if name != "counted")
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
        known = {name: counted_values(after)[name] for name in _VALUES}
        values.append({"row": row["id"], **known, "settles_at": _settles_at(row, after)})
        if row["counted"]:
            uncounted.append(before)
            counted.append(after)
    if values:
        connection.execute(_AMEND, values)
    return counted, uncounted


def _settles_at(row: Mapping[str, Any], after: JudgedRequest) -> float | None:
    """When an amended row is settled: now, if it only waited for a verdict and has one."""
    at: float | None = row["settles_at"]
    waits_for_verdict = at is not None and row["counted"]
    is_open = after.judgement.verdict is Verdict.UNDETERMINED
    return row["received_at"] if waits_for_verdict and not is_open else at


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
