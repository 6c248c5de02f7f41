"""Joins the views of one request in the database, and settles views whose wait has ended.

Every view is inserted as a row of its own. The engine's span is the child of the proxy's: if both
are stored, the engine's row becomes the joined one and the proxy's row is deleted.

A span whose parent is unknown, as with spans between the proxy's and the engine's, is joined by
trace and time. That is done when a view's wait ends: by then, other requests of the trace that the
span could belong to are stored.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Text,
    and_,
    bindparam,
    delete,
    or_,
    select,
    text,
    update,
)

from agent.analysis.joined_record import awaits_choices, is_prefill_alone, joined
from agent.analysis.verdicts import Judge
from agent.catalog.definitions import Verdict
from agent.records.objective import ExplainedRequest, JudgedRequest
from agent.records.request import RequestRecord, Status, Vantage
from agent.store.explanations import earlier
from agent.store.inserting import Key, key_of
from agent.store.routers import seen_by_others
from agent.store.rows import (
    ALL_COLUMNS,
    SettlesAt,
    checked_from,
    counted_values,
    judged_from,
    sqlite_timestamp,
)
from agent.store.tables import CHANGED, requests
from agent.store.unreadable import DAMAGED, readable

Row = Mapping[str, Any]

# Statements have a limited number of parameters; two rows of each request may be read.
ROWS_PER_STEP = 4096
# A view that is undetermined alone is in all figures after its wait, but its verdict is final only
# so long after its receipt: late figures and views may still determine it.
FINAL_AFTER_S = 300.0
# A clock that is set back by less does not end the wait of a view.
_CLOCK_SLACK_S = 60.0


# A failed request at a router waits for the other views, which come after their request's end.
ROUTER_WAIT_S = 10.0


def waiting_for(wait_s: float | None, with_plugin: Collection[str] = ()) -> SettlesAt:
    """A function from a view to its `settles_at`: None where nothing more can follow.

    Without `wait_s` no views are joined, and only routers' views wait.

    Figures of the plugin may follow a span of an engine in `with_plugin`; they have preemptions.
    """

    def settles_at(record: RequestRecord) -> float | None:
        if record.is_aside:
            return None
        if record.vantage is Vantage.ROUTER:
            return record.received_at + (ROUTER_WAIT_S if wait_s is None else wait_s)
        if wait_s is None:
            return None
        if record.vantage is Vantage.ENGINE:
            has_figures = record.preemptions is not None or record.engine not in with_plugin
            waits = record.parent_span_id is not None or not has_figures
        else:
            waits = record.vantage is Vantage.PROXY
        return record.received_at + wait_s if waits else None

    return settles_at


@dataclass(slots=True)
class Recount:
    """The changes of rollups after a join.

    `counted` are added and `uncounted` subtracted. `first` are the added requests of which no view
    was counted before, and `final` those whose verdict became final, if it was not before.
    `unexplained` are the subtracted requests that had an explanation.
    """

    counted: list[JudgedRequest] = field(default_factory=list)
    uncounted: list[JudgedRequest] = field(default_factory=list)
    first: list[JudgedRequest] = field(default_factory=list)
    final: list[JudgedRequest] = field(default_factory=list)
    unexplained: list[ExplainedRequest] = field(default_factory=list)

    def add(self, other: "Recount") -> None:
        """Add the changes of another one."""
        for each in fields(self):
            getattr(self, each.name).extend(getattr(other, each.name))

    def take_back(self, rows: Iterable[Row]) -> list[JudgedRequest]:
        """Subtract the rows that are counted; returns their requests."""
        counted = [(row, judged_from(row)) for row in rows if row["counted"]]
        for row, judged in counted:
            self.unexplained += earlier(row, judged)
        requests_of = [judged for _, judged in counted]
        self.uncounted += requests_of
        return requests_of


@dataclass(slots=True)
class _Changes:
    """Changes of rows by their ids.

    A join has the id, the time when one of its views was first explained, and the joined request.
    """

    joins: list[tuple[int, float | None, JudgedRequest]] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    settled: list[int] = field(default_factory=list)
    not_final: list[tuple[int, float]] = field(default_factory=list)

    @property
    def rows(self) -> set[int]:
        """The ids of all changed rows."""
        joined = (row for row, _, _ in self.joins)
        return {*joined, *self.parts, *self.gone, *self.settled}


def join_new(connection: Connection, views: Sequence[JudgedRequest], judge: Judge) -> Recount:
    """Join these views, which were just stored, with stored views.

    A joined request counts in place of a view that was settled before the other view came. The
    caller updates the rollups.
    """
    recount = Recount()
    for first in range(0, len(views), ROWS_PER_STEP):
        pairs = _pairs(connection, [key_of(item) for item in views[first : first + ROWS_PER_STEP]])
        if pairs:
            rows = _rows(connection, {row for pair in pairs for row in pair})
            _change(connection, _resolved_readable(pairs, rows, judge, recount))
    return recount


def _resolved_readable(
    pairs: Sequence[tuple[int, int]], rows: Mapping[int, Row], judge: Judge, recount: Recount
) -> _Changes:
    """The changes to make. A stored view that cannot be read joins nothing."""
    try:
        found = Recount()
        changes = _resolved(pairs, rows, judge, found, settling=False)
    except DAMAGED:
        found = Recount()
        whole = readable(requests, rows.values(), lambda row: (row["id"], row, checked_from(row)))
        kept = {number: row for number, row, _ in whole}
        changes = _resolved(pairs, kept, judge, found, settling=False)
    recount.add(found)
    return changes


def due_rows(connection: Connection, now: float, wait_s: float | None) -> dict[int, Key]:
    """The views whose wait has ended, the oldest first, ROWS_PER_STEP at most.

    Views that came before the agent's clock was set back would wait longer by that time: they are
    due at once.
    """
    due = _some_of(connection, ROWS_PER_STEP, requests.c.settles_at <= now)
    latest = now + (wait_s or 0.0) + _CLOCK_SLACK_S
    waits_longer = and_(
        requests.c.settles_at > latest,
        or_(~requests.c.counted, requests.c.settles_at > latest + FINAL_AFTER_S),
    )
    due |= _some_of(connection, ROWS_PER_STEP - len(due), waits_longer)
    return due


def _some_of(connection: Connection, most: int, condition: ColumnElement[bool]) -> dict[int, Key]:
    query = select(requests.c.id, requests.c.trace_id, requests.c.span_id).where(condition)
    found = connection.execute(query.order_by(requests.c.settles_at).limit(most))
    return {row: (trace_id, span_id) for row, trace_id, span_id in found}


def settle_rows(
    connection: Connection,
    keys: Mapping[int, Key],
    judge: Judge,
    now: float,
    *,
    alone: bool = False,
) -> Recount:
    """Settle these views; with `alone`, without looking for another view of each.

    A view that another may determine is counted in the rollups, which the caller updates, and
    settled once its verdict is final.
    """
    recount = Recount()
    pairs = [] if alone else _pairs(connection, list(keys.values()))
    if not alone:
        found = {row for pair in pairs for row in pair}
        pairs = sorted({*pairs, *_pairs_by_time(connection, keys.keys() - found)})
    rows = _rows(connection, {*keys, *(row for pair in pairs for row in pair)})
    changes = _resolved(pairs, rows, judge, recount, settling=True)
    if not alone:
        _settle_routers(
            connection, changes, recount, [rows[key] for key in keys.keys() & rows.keys()], judge
        )
    waiting = (row for row in keys.keys() & rows.keys() if rows[row]["settles_at"] is not None)
    for number in sorted(set(waiting) - changes.rows):
        _settle_lone(changes, recount, rows[number], now)
    _change(connection, changes)
    return recount


def _settle_routers(
    connection: Connection, changes: _Changes, recount: Recount, due: Iterable[Row], judge: Judge
) -> None:
    """Set routers' views aside whose requests have other views; an engine's gets the failure."""
    failed = {row["id"]: row for row in due if row["vantage"] == Vantage.ROUTER}
    seen = seen_by_others(connection, list(failed.values())) if failed else {}
    engines = _rows(connection, {row for row in seen.values() if row is not None})
    for number, other in seen.items():
        changes.parts.append(number)
        engine = None if other is None else engines[other]
        if engine is not None and engine["id"] not in changes.rows:
            _fail(changes, recount, engine, failed[number], judge)


def _fail(changes: _Changes, recount: Recount, engine: Row, router: Row, judge: Judge) -> None:
    """Give an engine's view of a success the status that its router reported."""
    before = judged_from(engine).record
    if before.status is not Status.OK:
        return
    counted = recount.take_back((engine,))
    status = {"status": Status(router["status"]), "http_status": router["http_status"]}
    judged = judge.judged(before._replace(**status))
    changes.joins.append((engine["id"], engine["explained_at"], judged))
    recount.counted.append(judged)
    if not counted:
        recount.first.append(judged)
    if not _is_final(engine):
        recount.final.append(judged)


def _settle_lone(changes: _Changes, recount: Recount, row: Row, now: float) -> None:
    judged, final_at = judged_from(row), row["received_at"] + FINAL_AFTER_S
    if not row["counted"]:
        recount.counted.append(judged)
        recount.first.append(judged)
        may_change = _may_be_determined(judged.record)
        is_open = may_change and judged.judgement.verdict is Verdict.UNDETERMINED
        if is_open and row["received_at"] <= now < final_at:
            changes.not_final.append((row["id"], final_at))
            return
    recount.final.append(judged)
    changes.settled.append(row["id"])


def _may_be_determined(record: RequestRecord) -> bool:
    """Whether another view may still determine the verdict of a view that is alone.

    The user's view has the engine's times of a response that is not streamed.
    """
    of_engine = record.vantage is Vantage.ENGINE
    return of_engine or (record.status is Status.OK and record.engine_view is None)


def set_row_aside(connection: Connection, row: int) -> None:
    """End a row's wait without counting it: its values cannot be read or counted."""
    _change(connection, _Changes(parts=[row]))


# Pairs of row numbers: an engine's view and its parent, the proxy's or joined view. The parent, or
# one of the engine's views of the same parent, is a wanted one.
#
# SQLite's planner does not know the length of the list; CROSS JOIN keeps the written order.
_PAIRS = text("""
WITH wanted AS (
    SELECT json_extract(value, '$[0]') AS trace_id, json_extract(value, '$[1]') AS span_id
    FROM json_each(:keys)
)
SELECT e.id, p.id FROM wanted w
    CROSS JOIN requests v
        ON v.trace_id = w.trace_id AND v.span_id = w.span_id AND v.vantage = 'engine'
    CROSS JOIN requests p ON p.trace_id = v.trace_id AND p.proxy_span_id = v.parent_span_id
    CROSS JOIN requests e
        ON e.trace_id = p.trace_id AND e.parent_span_id = p.proxy_span_id AND e.vantage = 'engine'
UNION
SELECT e.id, p.id FROM wanted w
    CROSS JOIN requests p
        ON p.trace_id = w.trace_id AND p.span_id = w.span_id AND p.vantage <> 'engine'
    CROSS JOIN requests e
        ON e.trace_id = p.trace_id AND e.parent_span_id = p.proxy_span_id AND e.vantage = 'engine'
""").bindparams(bindparam("keys", type_=Text))


def _pairs(connection: Connection, keys: Sequence[Key]) -> list[tuple[int, int]]:
    found = connection.execute(_PAIRS, {"keys": json.dumps(keys)})
    return sorted((row[0], row[1]) for row in found)


# Pairs of row numbers of one trace, one of each pair wanted: an engine's view whose parent is
# unknown and that is no part of another request, and a view of the proxy at the same time.
_OF_ENGINE = """
    e.vantage = 'engine' AND e.parent_span_id IS NOT NULL AND e.clock_skew_s IS NULL
    AND (e.settles_at IS NOT NULL OR e.counted)
    AND NOT EXISTS (SELECT 1 FROM requests o
        WHERE o.trace_id = e.trace_id AND o.proxy_span_id = e.parent_span_id)
"""
_OF_PROXY = """
    p.vantage NOT IN ('engine', 'router') AND p.trace_id = e.trace_id
    AND p.started_at < e.ended_at AND e.started_at < p.ended_at
"""
_AT_ONE_TIME = text(f"""
WITH wanted AS (SELECT value AS id FROM json_each(:rows))
SELECT e.id, p.id FROM wanted w
    CROSS JOIN requests e ON e.id = w.id AND {_OF_ENGINE} CROSS JOIN requests p ON {_OF_PROXY}
UNION
SELECT e.id, p.id FROM wanted w
    CROSS JOIN requests p ON p.id = w.id
    CROSS JOIN requests e ON e.trace_id = p.trace_id AND {_OF_ENGINE} AND {_OF_PROXY}
""").bindparams(bindparam("rows", type_=Text))


def _pairs_by_time(connection: Connection, wanted: Collection[int]) -> list[tuple[int, int]]:
    """Pairs as those of `_pairs`, of views that no other view of their trace overlaps.

    Requests of one trace may run at once. Then time does not tell whose an engine's view is.
    """
    near = _at_one_time(connection, wanted)
    if not near:
        return []
    around = near | _at_one_time(connection, {row for pair in near for row in pair})
    engines, others = Counter(pair[0] for pair in around), Counter(pair[1] for pair in around)
    alone = [each for each in near if engines[each[0]] == 1 and others[each[1]] == 1]
    rows = _rows(connection, {row for pair in alone for row in pair})
    return [pair for pair in alone if _is_within(rows[pair[0]], rows[pair[1]])]


def _at_one_time(connection: Connection, rows: Collection[int]) -> set[tuple[int, int]]:
    if not rows:
        return set()
    found = connection.execute(_AT_ONE_TIME, {"rows": json.dumps(sorted(rows))})
    return {(row[0], row[1]) for row in found}


def _is_within(engine: Row, proxy: Row) -> bool:
    """Whether an engine's view may be of the proxy's request, which has no other one."""
    # To the proxy, a router before prefill and decode engines is the engine.
    names = ("output_tokens",) if engine["prefill_engine"] else ("engine", "output_tokens")
    same = all(engine[name] == proxy[name] or None in (engine[name], proxy[name]) for name in names)
    return (
        same
        and proxy["vantage"] == Vantage.PROXY
        and proxy["started_at"] <= engine["started_at"]
        and engine["ended_at"] <= proxy["ended_at"]
    )


def _rows(connection: Connection, rows: Iterable[int]) -> dict[int, Row]:
    query = select(requests).where(requests.c.id.in_(sorted(rows))).order_by(requests.c.id)
    return {row.id: dict(row._mapping) for row in connection.execute(query)}


def _resolved(
    pairs: Sequence[tuple[int, int]],
    rows: Mapping[int, Row],
    judge: Judge,
    recount: Recount,
    *,
    settling: bool,
) -> _Changes:
    """The changes to make; rows that cannot be read are not among `rows`.

    If only the spans of its choices have its tokens, a request of several choices waits for all of
    them, until its wait has ended.
    """
    engines_of: dict[int, list[Row]] = {}
    for engine_row, other_row in pairs:
        if engine_row in rows and other_row in rows and not rows[engine_row]["hop"]:
            engines_of.setdefault(other_row, []).append(rows[engine_row])
    changes = _Changes()
    for other_row, engines in engines_of.items():
        other = rows[other_row]
        if other["vantage"] == Vantage.PROXY:
            waits = not settling and other["settles_at"] is not None
            proxy = judged_from(other).record
            engines.sort(key=lambda row: is_prefill_alone(proxy, row["output_tokens"]))
            prefilled_alone = is_prefill_alone(proxy, engines[0]["output_tokens"])
            if waits and (prefilled_alone or awaits_choices(proxy, len(engines))):
                continue
            if not prefilled_alone:
                _join(changes, recount, other, engines, judge)
                del engines[0]
        # Each of several choices has a span; the request is counted once.
        changes.parts += [row["id"] for row in engines if not _is_part(row)]
        recount.take_back(engines)
    return changes


def _is_part(engine: Row) -> bool:
    return engine["settles_at"] is None and not engine["counted"]


def _join(
    changes: _Changes, recount: Recount, proxy: Row, engines: Sequence[Row], judge: Judge
) -> None:
    engine = engines[0]
    counted = recount.take_back((proxy, engine))
    first, *others = [judged_from(row).record for row in engines]
    judged = judge.judged(joined(judged_from(proxy).record, first, others))
    explained_at = proxy["explained_at"] or engine["explained_at"]
    changes.joins.append((engine["id"], explained_at, judged))
    changes.gone.append(proxy["id"])
    recount.counted.append(judged)
    if not counted:
        recount.first.append(judged)
    if not any(map(_is_final, (proxy, engine))):
        recount.final.append(judged)


def _is_final(row: Row) -> bool:
    """Whether the row was settled and its verdict counted."""
    return bool(row["counted"]) and row["settles_at"] is None


_row_number = requests.c.id == bindparam("row")
# A joined request may overlap other minutes than its views, so it is priced again.
_JOIN = (
    update(requests)
    .where(_row_number)
    .values(
        {name: bindparam(name) for name in (*ALL_COLUMNS, "explained_at")}
        | {"priced_at": None, "explanation": None}
    )
)
# A part of a request overlaps no minute, so it has no cost.
_PART = (
    update(requests)
    .where(_row_number)
    .values(
        settles_at=None,
        counted=False,
        cost_usd=None,
        gpu_hours=None,
        cause=None,
        explanation=None,
    )
)
_SETTLE = update(requests).where(_row_number).values(settles_at=None, counted=True)
_NOT_FINAL = (
    update(requests)
    .where(_row_number)
    .values(settles_at=bindparam("final_at", type_=requests.c.settles_at.type), counted=True)
)
_GONE = delete(requests).where(_row_number)
_DELETED = (
    "INSERT INTO deleted_requests (trace_id, span_id, started_at, changed) "
    f"SELECT trace_id, span_id, started_at, {CHANGED} FROM requests "
    "WHERE id = ? AND (settles_at IS NULL OR counted)"
)
_MOVED = f"{_DELETED} AND started_at <> ?"


def _change(connection: Connection, changes: _Changes) -> None:
    # The id of the proxy's span must be free before the joined row takes it.
    delete_rows(connection, changes.gone)
    for statement, rows in ((_PART, changes.parts), (_SETTLE, changes.settled)):
        if rows:
            connection.execute(statement, [{"row": row} for row in rows])
    if changes.not_final:
        not_final = [{"row": row, "final_at": at} for row, at in changes.not_final]
        connection.execute(_NOT_FINAL, not_final)
    if changes.joins:
        moved = [(row, sqlite_timestamp(item.record.started_at)) for row, _, item in changes.joins]
        connection.exec_driver_sql(_MOVED, moved)
        joins = [
            {"row": row, "explained_at": explained_at, **counted_values(item)}
            for row, explained_at, item in changes.joins
        ]
        connection.execute(_JOIN, joins)


def delete_rows(connection: Connection, rows: Sequence[int]) -> None:
    """Delete these rows, also from the shared database, where those that were settled may be."""
    if rows:
        connection.exec_driver_sql(_DELETED, [(row,) for row in rows])
        connection.execute(_GONE, [{"row": row} for row in rows])
