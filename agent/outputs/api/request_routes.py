"""API routes about single requests: lists of them, and one with both its views."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Depends, HTTPException, Query, Response

from agent.analysis.quantiles import quantile
from agent.analysis.request_parts import LATENCIES, request_parts
from agent.outputs.api import responses
from agent.outputs.api.cause_response import explanation_response
from agent.outputs.api.query_parameters import (
    CursorText,
    Limit,
    Name,
    PathName,
    cursor_of,
    cursor_text,
    request_filter,
)
from agent.records.queries import Cursor, Latency, PageOf, RequestFilter

Row = Mapping[str, Any]


class RequestQueries(Protocol):
    """The store's queries of single requests."""

    def requests(self, wanted: RequestFilter, after: Cursor | None, limit: int) -> PageOf[Row]:
        """Requests, the newest first."""

    def worst_requests(self, wanted: RequestFilter, by: Latency, limit: int) -> Sequence[Row]:
        """The requests with the highest latency, the worst first."""

    def request(self, request_id: str, span_id: str | None = None) -> Sequence[Row]:
        """Every span with a request id of any kind, the one with this id first."""


Worst = Annotated[
    Latency | None,
    Query(
        description="the worst of all that match by this latency, instead of the newest; "
        "these are one page"
    ),
]

# A page takes ten times its bytes while it is built, and building is work of one processor anyway.
_PAGES_AT_ONCE = 4


def request_routes(queries: RequestQueries) -> APIRouter:
    """The routes of single requests."""
    router = APIRouter(tags=["requests"])

    building = ThreadPoolExecutor(_PAGES_AT_ONCE, "api-page")

    @router.get("/requests", response_model=responses.ListOf[responses.RequestResponse])
    async def requests(
        wanted: Annotated[RequestFilter, Depends(request_filter)],
        limit: Limit = 100,
        cursor: CursorText = None,
        worst: Worst = None,
    ) -> Response:
        """Requests, the newest first; `counted` is false for those that no figure counts."""
        after, loop = cursor_of(cursor), asyncio.get_running_loop()
        if worst is None:
            body = await loop.run_in_executor(building, _page, queries, wanted, after, limit)
        else:
            body = await loop.run_in_executor(building, _worst, queries, wanted, worst, limit)
        return Response(body, media_type="application/json")

    @router.get(
        "/requests/{request_id:path}", responses={404: {"model": responses.ProblemResponse}}
    )
    def request(request_id: PathName, span_id: Name = None) -> responses.RequestDetail:
        """The newest request with this id, and the others that have it: clients repeat ids.

        It may be the client's id, the proxy's, the engine's, the one in the response or the
        trace's. With `span_id`, the engine's or the proxy's, it is the request of that span.
        """
        rows = _found(queries, request_id, span_id)
        others = [responses.RequestResponse(**_fields(row)) for row in rows[1:]]
        return responses.RequestDetail(
            **_fields(rows[0]) | {"explanation": explanation_response(rows[0]["explanation"])},
            views=_views(rows[0]),
            others=others,
        )

    return router


def _found(queries: RequestQueries, request_id: str, span_id: str | None) -> Sequence[Row]:
    rows = queries.request(request_id, span_id or None)
    if not rows or (span_id and span_id not in (rows[0]["span_id"], rows[0]["proxy_span_id"])):
        span = f" with the span {span_id!r}" if span_id else ""
        raise HTTPException(404, f"no request {request_id!r}{span} is stored")
    return rows


def _page(
    queries: RequestQueries, wanted: RequestFilter, after: Cursor | None, limit: int
) -> bytes:
    page = queries.requests(wanted, after, limit)
    return _json(page.items, cursor_text(page.next))


def _worst(queries: RequestQueries, wanted: RequestFilter, by: Latency, limit: int) -> bytes:
    return _json(queries.worst_requests(wanted, by, limit), None)


def _json(rows: Sequence[Row], following: str | None) -> bytes:
    response = responses.ListOf[responses.RequestResponse](
        items=[responses.RequestResponse(**_fields(row)) for row in rows], next=following
    )
    return response.model_dump_json(by_alias=True).encode()


def _fields(row: Row) -> dict[str, Any]:
    part = row["settles_at"] is None and not row["counted"]
    parts = request_parts(**{name: row[name] for name in LATENCIES})
    return {**row, **parts._asdict(), "gaps": _gaps(row), "part": part}


def _gaps(row: Row) -> responses.Gaps | None:
    bins = row["gaps"]
    if not bins:
        return None
    return responses.Gaps(
        p50_s=quantile(bins, 0.5),
        p99_s=quantile(bins, 0.99),
        max_s=row["max_gap_s"],
        count=sum(bins.values()),
    )


# The columns of each view, by field of the response.
_OWN = {name: name for name in responses.RequestView.model_fields}
_AT_ENGINE = {
    name: f"engine_{name}" for name in ("request_id", "status", "ttft_s", "tpot_s", "e2e_s")
}
_VIEWS: Mapping[str, tuple[Mapping[str, str] | None, Mapping[str, str] | None]] = {
    "engine": (None, _OWN),
    "proxy": (_OWN, None),
    "joined": (_OWN | {"span_id": "proxy_span_id"}, _OWN | _AT_ENGINE),
}


def _views(row: Row) -> responses.RequestViews:
    proxy, engine = _VIEWS[row["vantage"]]
    # The response itself had the engine's times, and no span came.
    if engine is None and row["engine_status"] is not None:
        engine = _AT_ENGINE
    return responses.RequestViews(proxy=_view(row, proxy), engine=_view(row, engine))


def _view(row: Row, columns: Mapping[str, str] | None) -> responses.RequestView | None:
    if columns is None:
        return None
    return responses.RequestView(**{name: row[column] for name, column in columns.items()})
