"""Routers: what a router's span says about a request that an engine measured.

A router's view is stored as a row. It is never counted if the request succeeded: the engine's row
gets the time between the two arrivals. The view of a failed request waits. Then it is counted, if
no other view has the request.
"""

import json
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, Text, bindparam, select, text, update

from agent.records.objective import JudgedRequest
from agent.records.request import PROXY_VIEWS, Vantage
from agent.store.hops import began_at_engine
from agent.store.tables import requests

Row = Mapping[str, Any]
_Pair = tuple[Row, Row]

# llm-d's sidecar runs beside its engine; clocks of machines that are kept in step differ by less.
_CLOCKS_DIFFER_S = 0.1
# A gateway repeats a failed request sooner, with the same parent (Envoy: 25 to 250 ms).
_REPEATED_WITHIN_S = 1.0

_WITH_ROUTER = text("""
SELECT DISTINCT r.trace_id FROM json_each(:traces) w
    CROSS JOIN requests r ON r.trace_id = w.value AND r.vantage = 'router'
""").bindparams(bindparam("traces", type_=Text))
_COLUMNS = (
    *("id", "trace_id", "span_id", "parent_span_id", "proxy_span_id", "engine_request_id"),
    *("vantage", "started_at", "ended_at", "clock_skew_s", "hop", "settles_at", "counted"),
    "router_wait_s",
)
_ATTACH = (
    update(requests)
    .where(requests.c.id == bindparam("row"))
    .values(router_wait_s=bindparam("wait_s"))
)


class RouterViews:
    """Gives requests the time since their router got them.

    It reads nothing before the first router's span of this run: most agents get none.
    """

    def __init__(self) -> None:
        self._any = False

    def are_among(self, judged: Sequence[JudgedRequest]) -> bool:
        """Whether one of these is a router's view."""
        found = any([item.record.vantage is Vantage.ROUTER for item in judged])
        self._any = self._any or found
        return found

    def attach(self, connection: Connection, new: Sequence[JudgedRequest]) -> None:
        """Give the requests of the traces of these rows, which were just stored, that time."""
        if not self._any:
            return
        pairs = _pairs(connection, {item.record.trace_id for item in new})
        values = [
            {"row": row["id"], "wait_s": max(row["started_at"] - router["started_at"], 0.0)}
            for router, row in pairs
            if row["router_wait_s"] is None
        ]
        if values:
            connection.execute(_ATTACH, values)


def seen_by_others(connection: Connection, failed: Sequence[Row]) -> dict[int, int | None]:
    """Those of these routers' views whose request has another view, by row number.

    The value is the row number of the engine's view; None if it is another one's: the user's, or
    the router's view of the next try.
    """
    wanted = {row["id"] for row in failed}
    traces = {row["trace_id"] for row in failed}
    found: dict[int, int | None] = {
        router["id"]: row["id"]
        for router, row in _pairs(connection, traces)
        if router["id"] in wanted
    }
    for rows in _by_trace(connection, traces).values():
        others = _ByStart(rows)
        for router in (row for row in rows if row["id"] in wanted):
            near = others.near(router)
            if any(_is_of_user(row, router) or _is_next_try(row, router) for row in near):
                found[router["id"]] = None
    return found


def _pairs(connection: Connection, traces: Collection[str]) -> list[_Pair]:
    """Routers' views, each with the engine's view of its request. Those with several are left."""
    return [
        pair for rows in _by_trace(connection, traces).values() for pair in _pairs_of_trace(rows)
    ]


def _by_trace(connection: Connection, traces: Collection[str]) -> dict[str, list[Row]]:
    """The rows of those traces that have a router's view."""
    given = {"traces": json.dumps(sorted(traces))}
    routed = connection.execute(_WITH_ROUTER, given).scalars().all()
    found: dict[str, list[Row]] = defaultdict(list)
    if routed:
        columns = (requests.c[name] for name in _COLUMNS)
        query = select(*columns).where(requests.c.trace_id.in_(routed)).order_by(requests.c.id)
        for row in connection.execute(query):
            found[row.trace_id].append(dict(row._mapping))
    return found


class _ByStart:
    """Rows by their start. A client may give thousands of requests one trace."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = sorted(rows, key=itemgetter("started_at"))
        self._starts = [row["started_at"] for row in self._rows]

    def near(self, router: Row) -> Sequence[Row]:
        """Those that began during the router's view, or soon after it."""
        first = bisect_left(self._starts, router["started_at"] - _CLOCKS_DIFFER_S)
        return self._rows[
            first : bisect_right(self._starts, router["ended_at"] + _REPEATED_WITHIN_S)
        ]


def _pairs_of_trace(rows: Sequence[Row]) -> Iterator[_Pair]:
    routers = [row for row in rows if row["vantage"] == Vantage.ROUTER]
    engines = _ByStart([row for row in rows if _may_be_routed(row)])
    pairs = [
        (one, other) for one in routers for other in engines.near(one) if _is_within(other, one)
    ]
    of_routers, of_engines = (Counter(pair[place]["id"] for pair in pairs) for place in (0, 1))
    for router, row in pairs:
        if of_routers[router["id"]] == of_engines[row["id"]] == 1:
            yield router, row


def _may_be_routed(row: Row) -> bool:
    """Whether it is an engine's view of a request, no hop and no part of another one."""
    is_request = not row["hop"] and (row["settles_at"] is not None or row["counted"])
    return is_request and row["clock_skew_s"] is None and began_at_engine(row)


def _is_within(inner: Row, outer: Row) -> bool:
    return bool(
        outer["clock_skew_s"] is None
        and outer["started_at"] - _CLOCKS_DIFFER_S <= inner["started_at"]
        and inner["ended_at"] <= outer["ended_at"] + _CLOCKS_DIFFER_S
    )


def _is_of_user(row: Row, router: Row) -> bool:
    is_users = row["vantage"] in PROXY_VIEWS and not began_at_engine(row)
    return is_users and _is_within(router, row)


def _is_next_try(row: Row, router: Row) -> bool:
    return bool(
        row["vantage"] == Vantage.ROUTER
        and row["id"] != router["id"]
        and row["parent_span_id"] == router["parent_span_id"] is not None
        and 0.0 <= row["started_at"] - router["ended_at"] <= _REPEATED_WITHIN_S
    )
