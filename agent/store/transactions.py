"""Transactions: one stores requests and updates rollups, another settles waiting requests."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DataError, IntegrityError, SQLAlchemyError

from agent.analysis.verdicts import Judge
from agent.errors import StoreUnavailable
from agent.records.objective import JudgedRequest
from agent.records.write_result import WriteResult
from agent.store.connection import cause, for_writing, unavailable
from agent.store.inserting import at_once, insert_new, key_of
from agent.store.joining import Recount, join_new, settle_due, waiting_for
from agent.store.rollups import add_to_rollups
from agent.store.writing import Settle, Write

_LOG = logging.getLogger(__name__)

_StoreRows = Callable[[Connection, Sequence[JudgedRequest]], WriteResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """How the views of one request are joined.

    A view that may find another view waits `wait_s` from its receipt before it is counted alone;
    None where nothing is joined. `judge` judges every joined request anew. `agent` settles the rows
    that were stored under its name, also before a restart.
    """

    agent: str
    judge: Judge
    wait_s: float | None


def _trusted() -> None:
    """Trust every commit."""


def request_write(
    engine: Engine, joining: Joining | None = None, verify: Callable[[], None] = _trusted
) -> Write:
    """A function that stores requests and their rollups in one transaction.

    Rows that the database refuses for their content are left out of it. `verify` is called after
    each commit, and raises StoreUnavailable if the commit went to a file that is gone.
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
            raise _unavailable(error) from error

    def write_verified(judged: Sequence[JudgedRequest]) -> WriteResult:
        result = write(judged)
        verify()
        return result

    return write_verified


def _store_apart(
    connection: Connection, judged: Sequence[JudgedRequest], store: _StoreRows
) -> WriteResult:
    """Store halves of halves, until what cannot be stored stands alone."""
    try:
        with connection.begin_nested():
            return store(connection, judged)
    except Exception as error:
        _raise_unless_unstorable(error)
        if len(judged) == 1:
            span = "span {1} of trace {0}".format(*key_of(judged[0]))
            _LOG.warning("%s cannot be stored: %s", span, cause(error), exc_info=_is_ours(error))
            return WriteResult([], [], judged)
    half = len(judged) // 2
    first = _store_apart(connection, judged[:half], store)
    second = _store_apart(connection, judged[half:], store)
    return WriteResult(*[[*one, *other] for one, other in zip(first, second, strict=True)])


# What drivers and conversions raise for a value.
_OF_VALUES = (DataError, IntegrityError, ValueError, OverflowError)


def _is_ours(error: Exception) -> bool:
    return not isinstance(error, (*_OF_VALUES, SQLAlchemyError))


def _raise_unless_unstorable(error: Exception) -> None:
    """Raise StoreUnavailable unless the rows are at fault, however often they are tried."""
    if isinstance(error, StoreUnavailable):
        raise error
    if isinstance(error, SQLAlchemyError) and not isinstance(error, _OF_VALUES):
        raise _unavailable(error) from error


def _unavailable(error: SQLAlchemyError) -> StoreUnavailable:
    return unavailable("the requests could not be stored", error)


def _storing(joining: Joining | None) -> _StoreRows:
    if joining is None or joining.wait_s is None:
        return _store
    settles_at, judge = waiting_for(joining.wait_s), joining.judge

    def store(connection: Connection, judged: Sequence[JudgedRequest]) -> WriteResult:
        new = insert_new(connection, judged, settles_at)
        alone = [item for item in new if settles_at(item.record) is None]
        waiting = [item for item in new if settles_at(item.record) is not None]
        recount = join_new(connection, waiting, judge) if waiting else Recount()
        add_to_rollups(connection, alone + recount.counted, recount.uncounted)
        return WriteResult(new, alone + recount.first)

    return store


def _store(connection: Connection, judged: Sequence[JudgedRequest]) -> WriteResult:
    new = insert_new(connection, judged, at_once)
    add_to_rollups(connection, new)
    return WriteResult(new, new)


def request_settle(engine: Engine, joining: Joining) -> Settle:
    """A function that settles views that waited long enough, with rollups, in one transaction."""
    writing = for_writing(engine)

    def settle(now: float) -> list[JudgedRequest]:
        try:
            with writing.begin() as connection:
                recount = settle_due(connection, now, joining.agent, joining.judge)
                add_to_rollups(connection, recount.counted, recount.uncounted)
            return recount.first
        except (SQLAlchemyError, ValueError, OverflowError) as error:
            raise StoreUnavailable("waiting requests could not be settled", cause(error)) from error

    return settle
