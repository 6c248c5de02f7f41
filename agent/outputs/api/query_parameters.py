"""Checked query parameters of the API."""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from math import ceil, floor
from typing import Annotated, Any, Literal

from fastapi import Depends, Query
from pydantic import AfterValidator

from agent.catalog.time_units import DAY_S
from agent.outputs.api.base_responses import Status, Verdict
from agent.outputs.api.problems import refuse
from agent.records.queries import (
    NEWEST_FIRST,
    Cursor,
    Latency,
    RequestFilter,
    RequestOrder,
    Selection,
    SortKey,
    Window,
)
from agent.settings import duration_s
from agent.settings.values import DURATION, duration_text

MIN_WINDOW_S = 10
MAX_STEPS = 1000
MAX_ITEMS = 1000
# The calendar of both databases ends with the year 9999, and no request is older than 1970.
LAST_MOMENT_S = datetime(9999, 12, 31, tzinfo=UTC).timestamp()
MAX_ROW = 2**63 - 1


def without_nul(text: str | None) -> str | None:
    """The name, or an error if it holds a NUL character."""
    if text is not None and "\0" in text:
        raise ValueError("no name holds a NUL character")
    return text


Name = Annotated[str | None, Query(max_length=256), AfterValidator(without_nul)]
PathName = Annotated[str, AfterValidator(without_nul)]
# In the document alone: the refusal in `seconds` says more than that of a pattern.
_DURATION = {"pattern": f"^{DURATION.pattern}$"}
WindowText = Annotated[
    str | None,
    Query(description="length of the window, as in 5m, 1h or 30d", json_schema_extra=_DURATION),
]
_MOMENT = "ISO 8601 (UTC without a zone), Unix seconds, now, or as in now-2h"
FromText = Annotated[str | None, Query(alias="from", description=f"begin of the window: {_MOMENT}")]
UntilText = Annotated[
    str | None, Query(description=f"end of the window, now if it is absent: {_MOMENT}")
]
StepText = Annotated[
    str, Query(description="length of a step, as in 10s, 1m or 1d", json_schema_extra=_DURATION)
]
Limit = Annotated[int, Query(ge=1, le=MAX_ITEMS, description="items on a page")]
CursorText = Annotated[str | None, Query(description="`next` of the page before")]


def seconds(name: str, text: str) -> float:
    """Seconds of a duration, or a refusal that names the parameter."""
    try:
        return duration_s(text)
    except ValueError as error:
        raise refuse(f"{name}: {error}") from error


def window_s(text: str, longest_s: float) -> float:
    """The length of a window, within bounds."""
    length_s = seconds("window", text)
    if not MIN_WINDOW_S <= length_s <= longest_s:
        raise refuse(f"window: {text} is not between 10s and {duration_text(longest_s)}")
    return length_s


def step_s(text: str, length_s: float, grid_s: int) -> int:
    """The length of the steps of a window that lies on a grid."""
    step = seconds("step", text)
    if not step or step % grid_s:
        raise refuse(f"step: {text} is not a multiple of {grid_s}s, the grid of this window")
    if step > length_s:
        raise refuse(f"step: {text} is longer than the window")
    if length_s / step > MAX_STEPS:
        raise refuse(f"step: {text} makes more than {MAX_STEPS} steps of this window")
    return int(step)


def moment_s(name: str, text: str, now: float) -> float:
    """Unix seconds of a moment, or a refusal that names the parameter."""
    try:
        if text == "now":
            return now
        if text.startswith("now-"):
            return now - duration_s(text[4:])
        if text.isascii() and text.replace(".", "", 1).isdigit():
            return min(float(text), LAST_MOMENT_S)
        # A "+" of a time zone that was not escaped came as a space.
        return unix_s(datetime.fromisoformat(text.replace(" ", "+") if "T" in text else text))
    except ValueError:
        raise refuse(f"{name}: {text!r} is not a moment; write {_MOMENT}") from None


@dataclass(frozen=True, slots=True)
class AskedWindow:
    """The window that a query asks for by at most two of length, begin and end.

    Without a begin it has the `usual` length, without an end it ends now.
    """

    usual: str
    length: str | None = None
    begin: str | None = None
    end: str | None = None

    @property
    def given(self) -> bool:
        """Whether the query says anything of its window."""
        return bool(self.length or self.begin or self.end)

    def bounds(self, now: float, longest_s: float) -> tuple[float, float]:
        """Begin and end in Unix seconds, or a refusal."""
        if self.length and self.begin and self.end:
            raise refuse("window: give two of window, from and until, not all three")
        begin = moment_s("from", self.begin, now) if self.begin else None
        end = min(moment_s("until", self.end, now), now) if self.end else None
        if begin is None:
            end = now if end is None else end
            begin = end - window_s(self.usual if self.length is None else self.length, longest_s)
        elif end is None:
            end = now
            if self.length is not None:
                end = min(begin + window_s(self.length, longest_s), now)
        _check_bounds(begin, end, now, longest_s)
        return begin, end

    def over(self, now: float, longest_s: float, grid_of: Callable[[float], int]) -> Window:
        """The window on the grid of the rollups that are kept since its begin."""
        begin, end = self.bounds(now, longest_s)
        grid_s = grid_of(now - begin)
        return self._on_grids(begin, end, now, grid_s, grid_s)

    def in_steps(
        self, step: str, now: float, longest_s: float, grid_of: Callable[[float], int]
    ) -> tuple[Window, int]:
        """The window, which begins with a step, and the seconds of a step."""
        begin, end = self.bounds(now, longest_s)
        grid_s = grid_of(now - begin)
        # A window that is shorter than the grid is widened to it.
        each_s = step_s(step, max(end - begin, grid_s), grid_s)
        return self._on_grids(begin, end, now, each_s, grid_s), each_s

    def _on_grids(
        self, begin: float, end: float, now: float, begin_grid_s: int, end_grid_s: int
    ) -> Window:
        if not self.begin and end >= now:
            return window_before(now, now - begin, begin_grid_s)
        until = ceil(end / end_grid_s) * end_grid_s
        return Window(
            from_s=floor(begin / begin_grid_s) * begin_grid_s,
            until=min(until, now),
            ends_now=until >= now,
        )


def _check_bounds(begin: float, end: float, now: float, longest_s: float) -> None:
    if end - begin < MIN_WINDOW_S:
        raise refuse(f"from: the window must be {MIN_WINDOW_S}s or longer, and end in the past")
    # The begin may be what the caller was told a moment ago.
    if now - begin > longest_s + DAY_S:
        raise refuse(f"from: figures are kept for {duration_text(longest_s)}")


def asked_window(usual: str) -> Any:
    """A dependency: the window of a query, of this length unless the query says another."""

    def asked(
        window: WindowText = None, begin: FromText = None, until: UntilText = None
    ) -> AskedWindow:
        return AskedWindow(usual, window, begin or None, until or None)

    return Depends(asked)


def window_before(now: float, length_s: float, grid_s: int) -> Window:
    """The window that ends now and starts on the grid, as near to this length as possible."""
    from_s = round((now - length_s) / grid_s) * grid_s
    return Window(from_s=min(from_s, floor(now) // grid_s * grid_s), until=now, ends_now=True)


def selection(
    engine: Name = None,
    model: Name = None,
    tenant: Name = None,
    objective: Name = None,
    agent: Name = None,
) -> Selection:
    """The selection of requests. An empty parameter counts as absent."""
    return Selection(
        engine=engine or None,
        model=model or None,
        tenant=tenant or None,
        objective=objective or None,
        agent=agent or None,
    )


Priority = Annotated[int | None, Query(ge=-(2**31), lt=2**31)]
Tokens = Annotated[int | None, Query(ge=0, lt=2**31)]
Shortest = Annotated[float | None, Query(ge=0)]
AnyId = Annotated[
    str | None,
    Query(
        alias="id",
        max_length=256,
        description="the client's id, the engine's, the one in the response, or the trace's",
    ),
    AfterValidator(without_nul),
]


def _named_by_clients(
    user: Name = None,
    workload: Name = None,
    session: Name = None,
    priority: Priority = None,
    any_id: AnyId = None,
) -> Mapping[str, Any]:
    return {
        "end_user": user or None,
        "workload": workload or None,
        "session": session or None,
        "priority": priority,
        "any_id": any_id or None,
    }


def request_filter(
    *,
    chosen: Annotated[Selection, Depends(selection)],
    verdict: Verdict | None = None,
    status: Status | None = None,
    cause: Name = None,
    min_input_tokens: Tokens = None,
    max_input_tokens: Tokens = None,
    started_from: datetime | None = None,
    started_until: datetime | None = None,
    min_ttft_s: Shortest = None,
    min_tpot_s: Shortest = None,
    min_e2e_s: Shortest = None,
    max_ttft_s: Shortest = None,
    max_tpot_s: Shortest = None,
    max_e2e_s: Shortest = None,
    named: Annotated[Mapping[str, Any], Depends(_named_by_clients)],
) -> RequestFilter:
    """The filter of a list of requests."""
    return RequestFilter(
        selection=chosen,
        verdict=verdict,
        status=status,
        cause=cause or None,
        min_input_tokens=min_input_tokens,
        max_input_tokens=max_input_tokens,
        started_from=None if started_from is None else unix_s(started_from),
        started_until=None if started_until is None else unix_s(started_until),
        min_ttft_s=min_ttft_s,
        min_tpot_s=min_tpot_s,
        min_e2e_s=min_e2e_s,
        max_ttft_s=max_ttft_s,
        max_tpot_s=max_tpot_s,
        max_e2e_s=max_e2e_s,
        **named,
    )


Worst = Annotated[
    Latency | None,
    Query(description="the worst by this latency first: short for sort and order=desc"),
]
Sort = Annotated[
    SortKey | None,
    Query(description="requests without this value are left out; newest first by default"),
]


def request_order(
    worst: Worst = None, sort: Sort = None, order: Literal["asc", "desc"] = "desc"
) -> RequestOrder:
    """The order of a list of requests."""
    if worst is not None and sort is not None:
        raise refuse("sort: give sort or worst, not both")
    return RequestOrder(worst or sort or NEWEST_FIRST.key, ascending=order == "asc")


def unix_s(time: datetime) -> float:
    """Unix seconds within the range of both databases; a time without a zone is UTC."""
    at = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    return min(max(at, 0.0), LAST_MOMENT_S)


def cursor_of(text: str | None, order: RequestOrder = NEWEST_FIRST) -> Cursor | None:
    """The position of a cursor, or a refusal if no page in this order returned that cursor."""
    if not text:
        return None
    try:
        at, row, *of = urlsafe_b64decode(text.encode("ascii")).split(b" ")
        if of != _order_marks(order):
            raise ValueError("a cursor of another order")
        cursor = Cursor(float(at), int(row))
    except ValueError:
        cursor = None
    if cursor is None or not (0 <= cursor.at <= LAST_MOMENT_S and 0 <= cursor.row <= MAX_ROW):
        raise refuse("cursor: no page gave out this cursor; start without one")
    return cursor


def cursor_text(cursor: Cursor | None, order: RequestOrder = NEWEST_FIRST) -> str | None:
    """A cursor as text."""
    if cursor is None:
        return None
    parts = [f"{float(cursor.at)!r} {cursor.row}".encode(), *_order_marks(order)]
    return urlsafe_b64encode(b" ".join(parts)).decode("ascii")


def _order_marks(order: RequestOrder) -> list[bytes]:
    if order == NEWEST_FIRST:
        return []
    return [order.key.encode(), b"asc" if order.ascending else b"desc"]
