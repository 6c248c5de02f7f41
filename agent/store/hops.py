"""Hops: what a prefill engine did for a request that another engine decodes.

A hop is stored as a row that no figure counts. The row of its request gets its engine and times. It
is found by the trace, or by the request's id, which routers without tracing pass on.
"""

import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Text, bindparam, select, text, update

from agent.analysis.joined_record import is_from_front
from agent.catalog.definitions import Verdict
from agent.catalog.time_units import DAY_S
from agent.records.objective import JudgedRequest, Judgement
from agent.records.request import Vantage
from agent.store.inserting import Key, key_of
from agent.store.tables import requests

Row = Mapping[str, Any]

# A request reaches its decode engine so long after its prefill at most. Clients repeat ids.
_LONGEST_BETWEEN_S = 30.0
_NO_VERDICT = Judgement(Verdict.UNDETERMINED, ())


class Hops:
    """Stores the hops of one writer.

    Views of engines in `prefilling` are hops, and those whose source says so. It reads nothing
    before the first hop of this run, if there are no such engines: most agents get none.
    """

    def __init__(self, prefilling: Collection[str]) -> None:
        self._prefilling = prefilling
        self._any = bool(prefilling)

    def marked(self, judged: Sequence[JudgedRequest]) -> Sequence[JudgedRequest]:
        """The requests; hops are marked as such and have no verdict."""
        are_hops = [
            bool(item.record.hop or item.record.engine in self._prefilling) for item in judged
        ]
        if not any(are_hops):
            return judged
        self._any = True
        return [
            JudgedRequest(item.record._replace(hop=True), _NO_VERDICT) if is_hop else item
            for item, is_hop in zip(judged, are_hops, strict=True)
        ]

    def attach(self, connection: Connection, new: Sequence[JudgedRequest]) -> None:
        """Give the requests among these rows their hops, and the requests of these hops theirs."""
        if self._any and new:
            _attach(connection, [key_of(item) for item in new])


# Pairs of row numbers: a hop and a request that it may be of. One of each pair is a wanted one.
_SAME = (
    "{other}.trace_id = {wanted}.trace_id",
    "{other}.request_id = {wanted}.request_id",
    "{request}.engine_request_id = {hop}.request_id",
)
_PAIR = f"""
    h.hop AND d.hop IS NULL AND d.vantage NOT IN ('proxy', 'router') AND d.prefill_engine IS NULL
    AND d.ended_at >= h.ended_at
    AND (julianday(d.started_at) - julianday(h.ended_at)) * {DAY_S} <= {_LONGEST_BETWEEN_S}
"""
_WANTED = """
WITH wanted AS (
    SELECT json_extract(value, '$[0]') AS trace_id, json_extract(value, '$[1]') AS span_id
    FROM json_each(:keys)
)
"""
# SQLite's planner does not know the length of the list; CROSS JOIN keeps the written order.
_PAIRS = text(
    _WANTED
    + " UNION ".join(
        f"SELECT h.id, d.id FROM wanted w CROSS JOIN requests {wanted} "
        f"ON {wanted}.trace_id = w.trace_id AND {wanted}.span_id = w.span_id "
        f"CROSS JOIN requests {other} "
        f"ON {same.format(wanted=wanted, other=other, hop='h', request='d')} AND {_PAIR}"
        for wanted, other in (("h", "d"), ("d", "h"))
        for same in _SAME
    )
).bindparams(bindparam("keys", type_=Text))

_COLUMNS = (
    *("id", "vantage", "span_id", "proxy_span_id", "engine_request_id", "engine", "model"),
    *("started_at", "ended_at", "e2e_s", "queue_s", "input_tokens"),
)
_HOP_FIELDS = ("prefill_engine", "prefill_hop_s", "prefill_queue_s", "prefill_gap_s")
_ATTACH = (
    update(requests)
    .where(requests.c.id == bindparam("row"))
    .values({name: bindparam(name) for name in _HOP_FIELDS})
)


def _attach(connection: Connection, keys: Sequence[Key]) -> None:
    """A hop that may be of several requests is left alone."""
    pairs = connection.execute(_PAIRS, {"keys": json.dumps(keys)}).all()
    if not pairs:
        return
    rows = _rows(connection, {row for pair in pairs for row in pair})
    requests_of, hops_of = defaultdict(list), defaultdict(list)
    for hop, request in pairs:
        if _may_be_of(rows[hop], rows[request]):
            requests_of[hop].append(request)
            hops_of[request].append(hop)
    attached = []
    for request, found in hops_of.items():
        hops = [rows[hop] for hop in found if len(requests_of[hop]) == 1]
        if hops:
            attached.append({"row": request, **_values(max(hops, key=_rank), rows[request])})
    if attached:
        connection.execute(_ATTACH, attached)


def _rows(connection: Connection, numbers: Collection[int]) -> dict[int, Row]:
    columns = (requests.c[name] for name in _COLUMNS)
    query = select(*columns).where(requests.c.id.in_(sorted(numbers)))
    return {row.id: dict(row._mapping) for row in connection.execute(query)}


def _may_be_of(hop: Row, request: Row) -> bool:
    return all(
        hop[name] == request[name] or None in (hop[name], request[name])
        for name in ("model", "input_tokens")
    )


def _rank(hop: Row) -> tuple[bool, float]:
    """Of several tries the last one counts, by the engine's own times if there are any."""
    return hop["vantage"] != Vantage.PROXY, hop["ended_at"]


def _values(hop: Row, request: Row) -> dict[str, Any]:
    whole_s = hop["e2e_s"]
    return {
        "prefill_engine": hop["engine"],
        "prefill_hop_s": hop["ended_at"] - hop["started_at"] if whole_s is None else whole_s,
        "prefill_queue_s": hop["queue_s"],
        "prefill_gap_s": _gap_s(hop, request),
    }


def _gap_s(hop: Row, request: Row) -> float | None:
    at_engine = began_at_engine(request)
    return request["started_at"] - hop["ended_at"] if at_engine else None


def began_at_engine(request: Row) -> bool:
    """Whether the row's start is the arrival at an engine: that of a span, or in its front."""
    ids = (request[name] for name in ("span_id", "proxy_span_id", "engine_request_id"))
    return request["vantage"] == Vantage.ENGINE or is_from_front(*ids)
