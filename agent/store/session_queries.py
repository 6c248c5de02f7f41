"""The requests of sessions, for their turns."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, literal, select

from agent.analysis.conversations import MOST_TURNS, TurnRequest
from agent.records.queries import Selection
from agent.records.request import Status
from agent.store.rollup_queries import selected
from agent.store.sql_functions import has_verdict
from agent.store.tables import requests
from agent.store.unreadable import check_row, readable

_COLUMNS = tuple(requests.c[name] for name in ("id", *TurnRequest._fields))
_WITH_RESPONSE = (Status.OK, Status.CANCELLED)


def session_turns(
    connection: Connection, chosen: Selection, from_s: float, until: float, session: str | None
) -> Sequence[TurnRequest]:
    """The requests of one session, or of all, that began between two Unix times, newest first.

    At most MOST_TURNS, those that began last.
    """
    started = requests.c.started_at
    query = (
        select(*_COLUMNS)
        .where(
            requests.c.counted,
            requests.c.session.is_not(None),
            requests.c.status.in_(_WITH_RESPONSE),
            started >= literal(from_s, started.type),
            started < literal(until, started.type),
            *selected(requests, chosen),
        )
        .order_by(started.desc(), requests.c.id.desc())
        .limit(MOST_TURNS)
    )
    if session is not None:
        query = query.where(requests.c.session == session)
    if chosen.objective is not None:
        query = query.where(has_verdict(requests.c.verdicts, chosen.objective))
    return readable(requests, connection.execute(query).all(), _turn)


def _turn(row: Mapping[str, Any]) -> TurnRequest:
    # A plain dictionary is searched for each column in a fraction of the time.
    plain = dict(row)
    check_row(requests, plain)
    del plain["id"]
    return TurnRequest(**plain)
