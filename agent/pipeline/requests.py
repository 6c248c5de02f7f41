"""The way of a request: it is judged, stored, and only then counted and acknowledged."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from agent.analysis.verdicts import Judge
from agent.catalog.reasons import StoreWrite
from agent.errors import StoreUnavailable
from agent.records.objective import JudgedRequest
from agent.records.request import RequestRecord, Vantage
from agent.records.written import Written


class Writer(Protocol):
    """Where judged requests are stored."""

    def submit(self, judged: Sequence[JudgedRequest]) -> "Future[Written]":
        """A future of what became of them, done when they are committed."""

    def settle(self, now: float) -> "Future[list[JudgedRequest]]":
        """A future of the requests that are counted because nothing more is waited for."""


class RequestMeter(Protocol):
    """Where stored requests are counted."""

    def stored(self, counted: Sequence[JudgedRequest], sent: int, new: int) -> None:
        """Requests count from now on; of `sent` spans that were handed in, `new` were new.

        A request that two views tell of counts once, one that waits for its other view not yet.
        """

    def store_failed(self, what: StoreWrite) -> None:
        """The store did not take something."""


class RequestPipeline:
    """Takes requests from any source."""

    def __init__(self, judge: Judge, writer: Writer, meter: RequestMeter) -> None:
        self._judge = judge
        self._writer = writer
        self._meter = meter

    async def accept(self, records: Sequence[RequestRecord]) -> None:
        """Returns when the records are committed, and counted unless they wait for another view.

        Raises StoreUnavailable where they are not; the same records may be handed in again.
        """
        if not records:
            return
        judge = self._judge
        judged = [JudgedRequest(record, judge(record)) for record in records]
        try:
            written = await asyncio.wrap_future(self._writer.submit(judged))
        except StoreUnavailable:
            self._meter.store_failed(StoreWrite.REQUESTS)
            raise
        self._meter.stored(written.counted, sent=_spans(judged), new=_spans(written.new))

    def settle(self, now: float) -> None:
        """Count what has waited long enough for another view; to be called each second.

        Where the database is away it is counted later.
        """
        try:
            counted = self._writer.settle(now).result()
        except StoreUnavailable:
            self._meter.store_failed(StoreWrite.SETTLE)
        else:
            self._meter.stored(counted, sent=0, new=0)


def _spans(judged: Sequence[JudgedRequest]) -> int:
    """How many came as spans: what the proxy saw is handed in by itself."""
    return len([item for item in judged if item.record.vantage is Vantage.ENGINE])
