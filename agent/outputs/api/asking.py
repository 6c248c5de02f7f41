"""What callers may ask for, checked: windows, steps, cursors, page sizes."""

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from math import floor
from typing import Annotated

from fastapi import HTTPException, Query

from agent.records.questions import Cursor, Selection, Window
from agent.settings import duration_s

MAX_WINDOW_S = 7 * 86400
MAX_STEPS = 1000
MAX_ITEMS = 1000

WindowText = Annotated[str, Query(description="length of the window, as in 5m, 1h or 7d")]
Limit = Annotated[int, Query(ge=1, le=MAX_ITEMS, description="items on a page")]
CursorText = Annotated[str | None, Query(description="`next` of the page before")]


def refuse(sentence: str) -> HTTPException:
    """The error that tells a caller what is wrong with the question."""
    return HTTPException(status_code=422, detail=sentence)


def seconds(name: str, text: str) -> float:
    """Seconds of a duration, or a refusal that names the parameter."""
    try:
        return duration_s(text)
    except ValueError as error:
        raise refuse(f"{name}: {error}") from error


def window_s(text: str) -> float:
    """The length of a window, within bounds."""
    length_s = seconds("window", text)
    if not 10 <= length_s <= MAX_WINDOW_S:
        raise refuse(f"window: {text} is not between 10s and 7d")
    return length_s


def window_before(now: float, length_s: float, grid_s: int) -> Window:
    """The window that ends now and starts on the grid, nearest to the length asked for."""
    from_s = round((now - length_s) / grid_s) * grid_s
    return Window(from_s=min(from_s, floor(now) // grid_s * grid_s), until=now)


def selection(
    engine: str | None = None,
    model: str | None = None,
    tenant: str | None = None,
    objective: str | None = None,
) -> Selection:
    """Which requests are meant. An empty parameter is none."""
    return Selection(
        engine=engine or None,
        model=model or None,
        tenant=tenant or None,
        objective=objective or None,
    )


def cursor_of(text: str | None) -> Cursor | None:
    """The place that a cursor names, or a refusal where no page gave it out."""
    if not text:
        return None
    try:
        at, row = json.loads(urlsafe_b64decode(text.encode("ascii")))
        return Cursor(float(at), int(row))
    except (ValueError, TypeError) as error:
        raise refuse("cursor: no page gave out this cursor; start without one") from error


def cursor_text(cursor: Cursor | None) -> str | None:
    """A cursor as callers get it."""
    if cursor is None:
        return None
    return urlsafe_b64encode(json.dumps([cursor.at, cursor.row]).encode()).decode("ascii")
