"""Stores why requests missed their objectives, with the sums of causes; finds those to explain."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from sqlalchemy import Connection, Engine, Select, bindparam, select, text, tuple_, update

from agent.analysis.tally import CausePlace, CauseSum, sums_of
from agent.catalog.causes import Cause
from agent.errors import StoreUnavailable
from agent.records.objective import CauseShare, ExplainedRequest, Explanation, JudgedRequest
from agent.store.connection import driver_message, for_writing, in_transaction, read_all
from agent.store.inserting import Key, key_of
from agent.store.rollups import (
    MAX_SERIES,
    WIDTHS_S,
    Series,
    other_series,
    place_of,
    series_ids,
    stored_ids,
    target_series,
)
from agent.store.rows import judged_from
from agent.store.tables import CHANGED, UNEXPLAINED, requests
from agent.store.unreadable import json_of, readable

_PLACE = ("width_s", "series", "starts_at", "objective", "limit_name", "cause")
SUMS = ("requests", "top_requests", "excess_s")

_ADD = text(
    f"INSERT INTO cause_rollups ({', '.join((*_PLACE, *SUMS))}, changed) "
    f"VALUES ({', '.join(f':{name}' for name in (*_PLACE, *SUMS))}, {CHANGED}) "
    f"ON CONFLICT ({', '.join(_PLACE)}) DO UPDATE SET "
    "requests = cause_rollups.requests + excluded.requests, "
    "top_requests = cause_rollups.top_requests + excluded.top_requests, "
    "excess_s = coalesce(cause_rollups.excess_s + excluded.excess_s, "
    "cause_rollups.excess_s, excluded.excess_s), changed = excluded.changed"
)
# A row without requests stays, to be published.
_SUBTRACT = text(
    f"UPDATE cause_rollups SET changed = {CHANGED}, requests = max(requests - :requests, 0), "
    "top_requests = max(top_requests - :top_requests, 0), excess_s = CASE "
    "WHEN requests > :requests THEN coalesce(excess_s - :excess_s, excess_s) END "
    f"WHERE {' AND '.join(f'{name} = :{name}' for name in _PLACE)}"
)

_Start = tuple[int, Series]


def add_causes(
    connection: Connection, explained: Sequence[ExplainedRequest], max_series: int = MAX_SERIES
) -> None:
    """Add missed requests to the rollups of their causes."""
    for agent, sums in _by_agent(explained).items():
        wanted = [series for _, series in sums]
        targets = target_series(connection, agent, wanted, max_series)
        ids = stored_ids(connection, set(targets.values()))
        rows = _rows(sums, {series: ids[targets[series]] for series in wanted})
        connection.execute(_ADD, rows)


def subtract_causes(connection: Connection, explained: Sequence[ExplainedRequest]) -> None:
    """Subtract missed requests from the rollups of their causes; what has expired is left out."""
    for sums in _by_agent(explained).values():
        wanted = {series for _, series in sums}
        ids = series_ids(connection, wanted | {other_series(series) for series in wanted})
        found = {series: ids.get(series, ids.get(other_series(series))) for series in wanted}
        rows = _rows(sums, found)
        if rows:
            connection.execute(_SUBTRACT, rows)


def _by_agent(
    explained: Sequence[ExplainedRequest],
) -> dict[str, dict[_Start, dict[CausePlace, CauseSum]]]:
    by_agent: dict[str, dict[_Start, dict[CausePlace, CauseSum]]] = {}
    for judged, explanation in explained:
        start = place_of(judged)
        sums = by_agent.setdefault(start[1].agent, {}).setdefault(start, {})
        for place, each in sums_of(explanation).items():
            sums.setdefault(place, CauseSum()).add(each)
    return by_agent


def _rows(
    sums: Mapping[_Start, Mapping[CausePlace, CauseSum]], ids: Mapping[Series, int | None]
) -> list[dict[str, Any]]:
    """The rows of every width."""
    wide: dict[tuple[Any, ...], CauseSum] = {}
    for (starts_at, series), by_place in sums.items():
        series_id = ids[series]
        if series_id is None:
            continue
        for width_s in WIDTHS_S:
            for place, each in by_place.items():
                row = (width_s, series_id, starts_at // width_s * width_s, *place)
                wide.setdefault(row, CauseSum()).add(each)
    return [
        dict(zip(_PLACE, row, strict=True)) | {name: getattr(wide[row], name) for name in SUMS}
        for row in sorted(wide)
    ]


_LOG = logging.getLogger(__name__)

# A write keeps the writer of requests waiting, so it is done in slices.
REQUESTS_PER_SLICE = 100
REQUESTS_PER_READ = 250

# Evidence is read by people; longer or more of it would only make rows large.
MAX_SENTENCES = 8
MAX_CHARACTERS = 300


class ExplanationStore:
    """Reads an agent's missed requests and writes their explanations. Raises StoreUnavailable.

    Beyond `max_series`, causes of new models and tenants are counted as those of `other`. A row
    that cannot be read is set aside as `unexplained`, and `on_set_aside` gets its number.
    """

    def __init__(
        self,
        engine: Engine,
        agent: str,
        max_series: int = MAX_SERIES,
        on_set_aside: Callable[[int], None] | None = None,
    ) -> None:
        self._engine = engine
        self._on_set_aside = on_set_aside
        self._writing = for_writing(engine)
        self._agent = agent
        self._max_series = max_series

    def unexplained(
        self, ended_from: float, ended_before: float, limit: int = REQUESTS_PER_READ
    ) -> list[JudgedRequest]:
        """Counted requests that missed and have no explanation; the earliest to end come first.

        They ended from `ended_from` to before `ended_before`, in Unix seconds.
        """
        conditions = (
            text(UNEXPLAINED),
            requests.c.agent == self._agent,
            requests.c.ended_at >= ended_from,
            requests.c.ended_at < ended_before,
            requests.c.counted,
        )
        query = select(requests).where(*conditions).order_by(requests.c.ended_at).limit(limit)
        try:
            return _read(self._engine, query)
        except StoreUnavailable:
            raise
        except Exception:
            found = read_all(self._engine, query.with_only_columns(requests.c.id))
            return [judged for (number,) in found for judged in self._read_alone(number)]

    def _read_alone(self, number: int) -> list[JudgedRequest]:
        """The request in a row; none where it cannot be read, which sets the row aside."""
        try:
            return _read(self._engine, select(requests).where(requests.c.id == number))
        except StoreUnavailable:
            raise
        except Exception as error:
            _LOG.warning("row %d of requests is never explained: %s", number, driver_message(error))
        in_transaction(
            self._writing,
            lambda connection: connection.execute(
                update(requests).where(requests.c.id == number).values(cause=Cause.UNEXPLAINED)
            ),
        )
        if self._on_set_aside is not None:
            self._on_set_aside(number)
        return []

    def explain(self, explained: Sequence[ExplainedRequest], now: float) -> list[ExplainedRequest]:
        """Store explanations; returns those whose request had none before, each once.

        An earlier explanation is replaced. A request that was joined since it was read is left
        out, and explained anew by a later call. Where the database fails after some slices, the
        explanations of these slices are returned.
        """
        first: list[ExplainedRequest] = []
        for begin in range(0, len(explained), REQUESTS_PER_SLICE):
            write = partial(
                _explain,
                explained={
                    key_of(item.judged): item
                    for item in explained[begin : begin + REQUESTS_PER_SLICE]
                },
                now=now,
                max_series=self._max_series,
            )
            try:
                first += in_transaction(self._writing, write)
            except StoreUnavailable as error:
                if begin == 0:
                    raise
                # Earlier slices are stored: a later call does not return their requests again.
                left = len(explained) - begin
                _LOG.warning("%d explanations are made anew later: %s", left, error)
                break
        return first


def _read(engine: Engine, query: Select[Any]) -> list[JudgedRequest]:
    return [judged_from(row._mapping) for row in read_all(engine, query)]


_SET = (
    update(requests)
    .where(requests.c.id == bindparam("row"))
    .values(
        cause=bindparam("top"),
        explanation=bindparam("as_text"),
        explained_at=bindparam("at"),
    )
)


def _explain(
    connection: Connection, explained: Mapping[Key, ExplainedRequest], now: float, max_series: int
) -> list[ExplainedRequest]:
    gone, new, first, rows = [], [], [], []
    for row in _unchanged(connection, explained):
        item = explained[row["trace_id"], row["span_id"]]
        as_text = explanation_text(item.explanation)
        if (row["cause"], row["explanation"]) == (item.explanation.top, as_text):
            continue
        gone += earlier(row, item.judged)
        new.append(item)
        if row["explained_at"] is None:
            first.append(item)
        at = now if row["explained_at"] is None else row["explained_at"]
        top = str(item.explanation.top)
        rows.append({"row": row["id"], "top": top, "as_text": as_text, "at": at})
    if rows:
        connection.execute(_SET, rows)
        subtract_causes(connection, gone)
        add_causes(connection, new, max_series)
    return first


def _unchanged(
    connection: Connection, explained: Mapping[Key, ExplainedRequest]
) -> list[Mapping[Any, Any]]:
    """The rows of these requests, except of those that were joined since they were read."""
    columns = ("id", "trace_id", "span_id", "vantage", "cause", "explanation", "explained_at")
    query = (
        select(*(requests.c[name] for name in columns))
        .where(
            # SQLite uses no index for pairs.
            requests.c.trace_id.in_(sorted({trace_id for trace_id, _ in explained})),
            tuple_(requests.c.trace_id, requests.c.span_id).in_(sorted(explained)),
            requests.c.verdict == "missed",
            requests.c.counted,
        )
        .order_by(requests.c.id)
    )
    return [
        row
        for row in connection.execute(query).mappings()
        if explained[row["trace_id"], row["span_id"]].judged.record.vantage == row["vantage"]
    ]


def explanation_text(explanation: Explanation) -> str:
    """The sources and shares of an explanation as JSON, with the evidence cut to its limits."""
    shares = [
        msgspec.structs.asdict(share)
        | {"evidence": [each[:MAX_CHARACTERS] for each in share.evidence[:MAX_SENTENCES]]}
        for share in explanation.shares
    ]
    stored = {"sources": explanation.sources, "shares": shares}
    return json.dumps(stored, ensure_ascii=False, separators=(",", ":"))


def earlier(row: Mapping[Any, Any], judged: JudgedRequest) -> list[ExplainedRequest]:
    """The explanation in a row, if it has one that can be read."""
    if row["explanation"] is None:
        return []
    return readable(requests, [row], lambda row: ExplainedRequest(judged, explanation_from(row)))


def explanation_from(row: Mapping[Any, Any]) -> Explanation:
    """The explanation in a row that has one; its causes may be of another version of the agent."""
    stored = json_of(requests, "explanation", row["explanation"])
    shares = (
        CauseShare(**share | {"evidence": tuple(share["evidence"])}) for share in stored["shares"]
    )
    return Explanation(
        trace_id=row["trace_id"],
        span_id=row["span_id"],
        top=row["cause"],
        shares=tuple(shares),
        sources=tuple(stored["sources"]),
    )
