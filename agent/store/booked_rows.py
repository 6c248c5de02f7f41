"""Reads requests for booking: only the columns that it needs, a batch of rows at a time."""

import json
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import func, or_

from agent.catalog.definitions import Verdict
from agent.records.columns import STATUSES, VANTAGES, MinuteRequests
from agent.store.tables import requests
from agent.store.unreadable import DAMAGED, UNREADABLE

# With one prompt, an engine counts it once for each choice. Elsewhere a request may have several
# prompts, and how many choices each has is unknown.
ONE_PROMPT_ROUTE = "/v1/chat/completions"

_STATUSES = {status.value: place for place, status in enumerate(STATUSES)}
_VANTAGES = {vantage.value: place for place, vantage in enumerate(VANTAGES)}

_NUMBERS = (
    *("started_at", "ended_at", "ttft_s", "queue_s", "prefill_s", "decode_s"),
    *("input_tokens", "cached_tokens", "output_tokens", "choices"),
)
_MASKS = {
    "aborted": func.coalesce(requests.c.finish_reason == "abort", False),
    "one_prompt": func.coalesce(requests.c.route == ONE_PROMPT_ROUTE, False),
    "priced": or_(
        *(requests.c[name].is_not(None) for name in ("priced_at", "cost_usd", "decode_flops"))
    ),
    "met": requests.c.verdict == Verdict.MET.value,
}
_NAMES = ("rows", "vantages", "statuses", "verdicts", *_NUMBERS, *_MASKS)

# What a query for requests selects, in the order of a row of `minute_requests_from`.
BOOKED_COLUMNS = (
    *(requests.c.id, requests.c.vantage, requests.c.status, requests.c.verdicts),
    *(requests.c[name] for name in _NUMBERS),
    *_MASKS.values(),
)
_WIDTH = len(BOOKED_COLUMNS)


def minute_requests_from(batches: Iterable[Sequence[Sequence[Any]]]) -> MinuteRequests:
    """Requests from batches of rows of BOOKED_COLUMNS, in the order of their ids."""
    verdicts = _Verdicts()
    parts = [_readable_columns(batch, verdicts) for batch in chain(batches, [[]])]
    order = np.argsort(np.concatenate([part["rows"] for part in parts]))
    # The parts of a column are dropped as soon as it is whole: all of them take much memory.
    columns = {name: np.concatenate([part.pop(name) for part in parts])[order] for name in _NAMES}
    return MinuteRequests(**columns, met_objectives=tuple(verdicts.met))


class _Verdicts:
    """The different verdicts of requests, which are few, by their stored text."""

    def __init__(self) -> None:
        self.met: list[tuple[str, ...]] = []
        self._places: dict[str, int] = {}

    def place(self, stored: str) -> int:
        """The place of the objectives that were met in `met`."""
        place = self._places.get(stored)
        if place is None:
            place = self._places[stored] = len(self.met)
            judged: dict[str, str] = json.loads(stored)
            self.met.append(tuple(name for name, verdict in judged.items() if verdict == "met"))
        return place


def _readable_columns(
    rows: Sequence[Sequence[Any]], verdicts: _Verdicts
) -> dict[str, NDArray[Any]]:
    """The columns of the rows that can be read; the others are counted."""
    try:
        return _columns(rows, verdicts)
    except DAMAGED:
        return _columns([row for row in rows if _can_be_read(row, verdicts)], verdicts)


def _can_be_read(row: Sequence[Any], verdicts: _Verdicts) -> bool:
    try:
        _columns([row], verdicts)
    except DAMAGED as error:
        UNREADABLE.add(requests.name, {"id": row[0]}, error)
        return False
    return True


def _columns(rows: Sequence[Sequence[Any]], verdicts: _Verdicts) -> dict[str, NDArray[Any]]:
    ids, vantages, statuses, texts, *plain = zip(*rows, strict=True) if rows else [()] * _WIDTH
    numbers, masks = plain[: len(_NUMBERS)], plain[len(_NUMBERS) :]
    numbers_by_name = {
        n: np.array(each, dtype=np.float64) for n, each in zip(_NUMBERS, numbers, strict=True)
    }
    if any(np.isinf(each).any() for each in numbers_by_name.values()):
        raise ValueError("a number is infinite")
    return {
        "rows": np.array(ids, dtype=np.intp),
        "vantages": np.array([_VANTAGES[each] for each in vantages], dtype=np.int8),
        "statuses": np.array([_STATUSES[each] for each in statuses], dtype=np.int8),
        "verdicts": np.array([verdicts.place(each) for each in texts], dtype=np.int32),
        # Unknown becomes NaN.
        **numbers_by_name,
        **{n: np.array(each, dtype=bool) for n, each in zip(_MASKS, masks, strict=True)},
    }
