"""The way of a request: it is judged, stored, and only then counted and acknowledged."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from agent.analysis.verdicts import Judge
from agent.errors import StoreUnavailable
from agent.records.objective import JudgedRequest
from agent.records.request import RequestRecord


class Writer(Protocol):
    """Where judged requests are stored."""

    def submit(self, judged: Sequence[JudgedRequest]) -> "Future[list[JudgedRequest]]":
        """A future of those that were new, done when they are committed."""


class RequestMeter(Protocol):
    """Where stored requests are counted."""

    def stored(self, new: Sequence[JudgedRequest], sent: int) -> None:
        """Requests were committed; `sent` were handed in, duplicates included."""

    def store_failed(self, what: str) -> None:
        """The store did not take something."""


class RequestPipeline:
    """Takes requests from any source."""

    def __init__(self, judge: Judge, writer: Writer, meter: RequestMeter) -> None:
        self._judge = judge
        self._writer = writer
        self._meter = meter

    async def accept(self, records: Sequence[RequestRecord]) -> None:
        """Returns when the records are committed and counted.

        Raises StoreUnavailable where they are not; the same records may be handed in again.
        """
        if not records:
            return
        judge = self._judge
        judged = [JudgedRequest(record, judge(record)) for record in records]
        try:
            new = await asyncio.wrap_future(self._writer.submit(judged))
        except StoreUnavailable:
            self._meter.store_failed("requests")
            raise
        self._meter.stored(new, sent=len(records))
