"""API routes about single requests: lists of them, and one with both its views."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any, Literal
from urllib.parse import quote

from fastapi import APIRouter, Depends, HTTPException, Response
from pydantic import Field

from agent.analysis.joined_record import is_from_front
from agent.analysis.latency import LATENCIES, first_token_parts, request_parts
from agent.analysis.quantiles import quantile
from agent.outputs.api.api_context import ApiContext, ApiQueries
from agent.outputs.api.base_responses import (
    BaseResponse,
    ExplanationResponse,
    ListOf,
    Status,
    Verdict,
    explanation_response,
)
from agent.outputs.api.problems import ProblemResponse
from agent.outputs.api.query_parameters import (
    AskedWindow,
    CursorText,
    Limit,
    Name,
    PathName,
    asked_window,
    cursor_of,
    cursor_text,
    request_filter,
    request_order,
)
from agent.records.queries import NEWEST_FIRST, Cursor, RequestFilter, RequestOrder


class Gaps(BaseResponse):
    """Seconds between chunks that held tokens, as the user got them.

    p50 and p99 are within the `relative_error` of the summary.
    """

    p50_s: float | None
    p99_s: float | None
    max_s: float | None
    count: int


class FirstTokenResponse(BaseResponse):
    """Where the time to the first token went, of a request with a prefill engine."""

    whole_s: float = Field(
        description="the user's TTFT; else from the arrival at the router, else at prefill"
    )
    router_s: float = Field(description="outside of both engines")
    prefill_s: float = Field(description="at the prefill engine, its queue included")
    kv_wait_s: float | None = Field(
        description="the decode engine's queue: for the KV values and for a place in the batch"
    )
    decode_s: float = Field(description="the rest at the decode engine")


class RequestResponse(BaseResponse):
    """One request.

    A request with the user's and the engine's view has the vantage `joined`: its latencies, times
    and status are the user's, and `engine_...` holds the engine's. The user's view is that of the
    proxy, or of vLLM's plugin in the engine's front; alone its vantage is `proxy`. A request with
    the vantage `router` failed before an engine measured it.
    """

    request_id: str | None
    response_id: str | None = Field(description="the id in the response's body")
    trace_id: str
    span_id: str = Field(
        description="the engine's span, or that of the user's view; made up without any"
    )
    parent_span_id: str | None
    proxy_span_id: str | None
    agent: str | None
    engine: str | None
    model: str | None
    service_name: str | None
    tenant: str | None
    route: str | None
    vantage: Literal["engine", "proxy", "joined", "router"]
    started_at: datetime
    ended_at: datetime
    clock_skew_s: float | None = Field(description="set if the times are estimates")
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None
    max_gap_s: float | None
    input_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    reasoning_tokens: int | None
    preemptions: int | None = Field(description="of the engine's plugin")
    finish_reason: str | None
    status: Status
    http_status: int | None
    verdict: Verdict
    verdicts: Mapping[str, Verdict] = Field(description="by objective")
    cause: str | None = Field(description="why it missed: the cause with the most excess seconds")
    explained_at: datetime | None = Field(
        description="when its causes were stored first; a span that comes late takes them back"
    )
    cost_usd: float | None
    first_byte_s: float | None
    first_visible_s: float | None = Field(description="to the first token that is not reasoning")
    gaps: Gaps | None
    gap_tokens: int | None = Field(description="most tokens in a chunk after the first")
    input_bytes: int | None
    output_bytes: int | None
    error: str | None
    choices: int | None
    streamed: bool | None
    ttft_limit_s: float | None = Field(description="set by the client")
    tpot_limit_s: float | None = Field(description="set by the client")
    requested_model: str | None = Field(
        description="as the client wrote it, if no engine serves such a model"
    )
    requested_tenant: str | None = Field(
        description="as the client wrote it, if the tenant is `other`"
    )
    reasoning_s: float | None = Field(
        description="from the first reasoning token to the first other token"
    )
    media_parts: int | None = Field(description="images, audio and video in the messages")
    media_bytes: int | None = Field(description="of the media that the request itself holds")
    priority: int | None = Field(description="vLLM's, of its header or the body")
    end_user: str | None = Field(description="by `proxy.user_header`, or the plugin's variable")
    workload: str | None = Field(description="by `proxy.workload_header`, or the plugin's variable")
    session: str | None = Field(description="by `proxy.session_header`, or the plugin's variable")
    engine_request_id: str | None
    engine_status: Status | None
    engine_ttft_s: float | None
    engine_tpot_s: float | None
    engine_e2e_s: float | None
    holdback_s: float | None = Field(description="ttft_s less engine_ttft_s")
    front_s: float | None = Field(description="ttft_s less queue_s and prefill_s")
    rest_s: float | None = Field(
        description="e2e_s less queue_s, prefill_s, decode_s and front_s: after the last token, "
        "and what the views differ by"
    )
    settles_at: datetime | None = Field(
        description="set while another view may come and change the verdict"
    )
    counted: bool = Field(description="whether summaries and series count it")
    priced_at: datetime | None = Field(
        description="null until all its minutes are counted; until then its cost may grow"
    )
    gpu_hours: float | None = Field(description="its share of all GPU hours")
    prefill_flops: float | None = Field(description="an estimate, as the three below")
    prefill_kv_bytes: float | None
    decode_flops: float | None
    decode_kv_bytes: float | None
    part: bool = Field(description="true for a span that belongs to the request of another row")
    hop: bool | None = Field(
        description="true of the prefill for a request that another engine decodes"
    )
    prefill_engine: str | None = Field(description="the engine that computed the prompt")
    prefill_hop_s: float | None = Field(description="arrival at that engine to its end there")
    prefill_queue_s: float | None = Field(description="of this, the wait in its queue")
    prefill_gap_s: float | None = Field(
        description="end there to arrival at `engine`; negative if both ran at once"
    )
    router_wait_s: float | None = Field(
        description="arrival at the router to arrival at `engine`; a prefill is in it"
    )
    first_token: FirstTokenResponse | None = Field(description="null without a prefill engine")


class RequestView(BaseResponse):
    """One view of a request. Latencies are from the arrival there."""

    request_id: str | None
    span_id: str | None = Field(
        default=None, description="null if the response itself had the engine's times"
    )
    status: Status
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None


class RequestViews(BaseResponse):
    """The views of a request, null for one that is missing."""

    proxy: RequestView | None
    engine: RequestView | None


class RequestDetail(RequestResponse):
    """A request, and the other spans with its id: of n > 1, or of clients that repeat ids."""

    views: RequestViews
    explanation: ExplanationResponse | None = Field(description="null unless it missed")
    others: list[RequestResponse]
    trace_url: str | None = Field(description="where its trace is shown, by the setting trace_url")


Row = Mapping[str, Any]
# A page takes ten times its bytes while it is built, and building is work of one processor anyway.
_PAGES_AT_ONCE = 4


def request_routes(context: ApiContext) -> APIRouter:
    """The routes of single requests."""
    router = APIRouter(tags=["requests"])
    building = ThreadPoolExecutor(_PAGES_AT_ONCE, "api-page")

    @router.get("/requests", response_model=ListOf[RequestResponse])
    async def requests(
        wanted: Annotated[RequestFilter, Depends(request_filter)],
        asked: Annotated[AskedWindow, asked_window("1h")],
        order: Annotated[RequestOrder, Depends(request_order)],
        limit: Limit = 100,
        cursor: CursorText = None,
    ) -> Response:
        """Requests, the newest first; `counted` is false for those that no figure counts."""
        after, loop = cursor_of(cursor, order), asyncio.get_running_loop()
        begun = _begun(_within(wanted, asked, context), order, context.now())

        def page(queries: ApiQueries) -> bytes:
            return _page(queries, begun, after, limit, order)

        body = await loop.run_in_executor(building, context.read, page)
        return Response(body, media_type="application/json")

    @router.get("/requests/{request_id:path}", responses={404: {"model": ProblemResponse}})
    def request(request_id: PathName, span_id: Name = None) -> RequestDetail:
        """The newest request with this id, and the others that have it: clients repeat ids.

        It may be the client's id, the proxy's, the engine's, the one in the response or the
        trace's. With `span_id`, the engine's or the proxy's, it is the request of that span.
        """
        rows = context.read(lambda queries: _found(queries, request_id, span_id))
        others = [RequestResponse(**_fields(row)) for row in rows[1:]]
        return RequestDetail(
            **_fields(rows[0]) | {"explanation": explanation_response(rows[0]["explanation"])},
            views=_views(rows[0]),
            others=others,
            trace_url=_trace_url(context.trace_url, rows[0]),
        )

    return router


def _trace_url(template: str | None, row: Row) -> str | None:
    """The address of a trace. Ids are hexadecimal, but for those of a sender that is not."""
    if template is None:
        return None
    ids = {name: quote(row[name], safe="") for name in ("trace_id", "span_id")}
    for name, value in ids.items():
        template = template.replace(f"{{{name}}}", value)
    return template


def _within(wanted: RequestFilter, asked: AskedWindow, context: ApiContext) -> RequestFilter:
    """The filter, of requests that arrived in the window if there is one."""
    if not asked.given:
        return wanted
    begin, end = asked.bounds(context.now(), context.longest_row_window_s)
    return replace(
        wanted,
        started_from=max(begin, wanted.started_from or begin),
        started_until=min(end, wanted.started_until or end),
    )


def _begun(wanted: RequestFilter, order: RequestOrder, now: float) -> RequestFilter:
    """The filter, without requests that a clock, which was set back since, dated later."""
    if order == NEWEST_FIRST:
        return wanted
    until = now if wanted.started_until is None else wanted.started_until
    return replace(wanted, started_until=until)


def _found(queries: ApiQueries, request_id: str, span_id: str | None) -> Sequence[Row]:
    rows = queries.request(request_id, span_id or None)
    if not rows or (span_id and span_id not in (rows[0]["span_id"], rows[0]["proxy_span_id"])):
        span = f" with the span {span_id!r}" if span_id else ""
        raise HTTPException(404, f"no request {request_id!r}{span} is stored")
    return rows


def _page(
    queries: ApiQueries,
    wanted: RequestFilter,
    after: Cursor | None,
    limit: int,
    order: RequestOrder,
) -> bytes:
    page = queries.requests(wanted, after, limit, order)
    response = ListOf[RequestResponse](
        items=[RequestResponse(**_fields(row)) for row in page.items],
        next=cursor_text(page.next, order),
    )
    return response.model_dump_json(by_alias=True).encode()


def _fields(row: Row) -> dict[str, Any]:
    part = row["settles_at"] is None and not row["counted"]
    parts = request_parts(**{name: row[name] for name in LATENCIES})
    found = {"gaps": _gaps(row), "part": part, "first_token": _first_token(row)}
    return {**row, **parts._asdict(), **found}


def _first_token(row: Row) -> FirstTokenResponse | None:
    is_users = row["vantage"] == "joined" and not is_from_front(
        row["span_id"], row["proxy_span_id"], row["engine_request_id"]
    )
    parts = first_token_parts(
        user_ttft_s=row["ttft_s"] if is_users else _ttft_since_router_s(row),
        decode_ttft_s=row["engine_ttft_s"] if is_users else row["ttft_s"],
        decode_queue_s=row["queue_s"],
        prefill_hop_s=row["prefill_hop_s"],
        prefill_gap_s=row["prefill_gap_s"],
    )
    return None if parts is None else FirstTokenResponse(**parts._asdict())


def _ttft_since_router_s(row: Row) -> float | None:
    known = None not in (row["router_wait_s"], row["ttft_s"])
    return row["router_wait_s"] + row["ttft_s"] if known else None


def _gaps(row: Row) -> Gaps | None:
    bins = row["gaps"]
    if not bins:
        return None
    return Gaps(
        p50_s=quantile(bins, 0.5),
        p99_s=quantile(bins, 0.99),
        max_s=row["max_gap_s"],
        count=sum(bins.values()),
    )


# The columns of each view, by field of the response.
_OWN = {name: name for name in RequestView.model_fields}
_AT_ENGINE = {
    name: f"engine_{name}" for name in ("request_id", "status", "ttft_s", "tpot_s", "e2e_s")
}
_VIEWS: Mapping[str, tuple[Mapping[str, str] | None, Mapping[str, str] | None]] = {
    "engine": (None, _OWN),
    "proxy": (_OWN, None),
    "joined": (_OWN | {"span_id": "proxy_span_id"}, _OWN | _AT_ENGINE),
    "router": (None, None),
}


def _views(row: Row) -> RequestViews:
    proxy, engine = _VIEWS[row["vantage"]]
    # The response itself had the engine's times, and no span came.
    if engine is None and row["engine_status"] is not None:
        engine = _AT_ENGINE
    return RequestViews(proxy=_view(row, proxy), engine=_view(row, engine))


def _view(row: Row, columns: Mapping[str, str] | None) -> RequestView | None:
    if columns is None:
        return None
    return RequestView(**{name: row[column] for name, column in columns.items()})
