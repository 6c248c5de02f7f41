"""Booked minutes that follow each other, and what each request cost in them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent.analysis.efficiency.request_activity import request_activities
from agent.analysis.efficiency.serving import Serving
from agent.analysis.efficiency.time_range import TimeRange
from agent.analysis.efficiency.work import decode_work, prefill_work
from agent.records.columns import VANTAGES, Array, BookedRequests
from agent.records.minute import LONGEST_REQUEST_S, MinuteRow, RequestCost

_AT_ONCE = 4096


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BookedMinutes:
    """Consecutive minutes, and what each request cost in them in dollars and in GPU-hours.

    Costs are NaN where no minute knows them. `cached_share` is the engine's share of cached prompt
    tokens in all of them.
    """

    minutes: Sequence[MinuteRow]
    requests: BookedRequests
    usd: Array
    gpu_hours: Array
    serving: Serving
    cached_share: float

    def costs_in(self, time: TimeRange) -> Iterator[RequestCost]:
        """The costs of the requests that overlap a time, in these minutes, and their whole work."""
        ended_at = self.requests.ended_at
        overlap = (self.requests.started_at <= time.until) & (ended_at >= time.from_at)
        places = np.flatnonzero(overlap & (ended_at < time.until + LONGEST_REQUEST_S))
        requests = self.requests.chosen(places)
        columns = (
            requests.rows,
            np.array([vantage.value for vantage in VANTAGES])[requests.vantages],
            requests.ended_at < self.minutes[-1].until,
            *(self.usd[places], self.gpu_hours[places], *self._works(requests)),
        )
        return _costs(columns)

    def _works(self, requests: BookedRequests) -> Iterator[Array]:
        """FLOPs and bytes of prefill, then of decode."""
        active = request_activities(requests, self.cached_share)
        for work_of in (prefill_work, decode_work):
            work = work_of(active, self.serving)
            for values in (work.flops, work.kv_bytes):
                found = np.full(requests.rows.size, np.nan)
                if self.serving.model is not None:
                    found[requests.places_of(active.rows)] = values
                yield found


def _costs(columns: Sequence[NDArray[Any]]) -> Iterator[RequestCost]:
    """One for each row of the columns, made when it is written: all at once take much memory."""
    for first in range(0, columns[0].size, _AT_ONCE):
        yield from map(RequestCost, *[_values(each[first : first + _AT_ONCE]) for each in columns])


def _values(column: NDArray[Any]) -> list[Any]:
    """The values of a column; None where one is unknown."""
    values: list[Any] = column.tolist()
    return [None if value != value else value for value in values]
