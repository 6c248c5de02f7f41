"""The way of every request: it is judged, stored, and only then counted and acknowledged."""

import asyncio
from collections.abc import Callable, Sequence

from agent.analysis.verdicts import Judge
from agent.catalog.reasons import StoreWrite
from agent.errors import StoreUnavailable
from agent.outputs.prometheus.meter import Meter
from agent.records.objective import JudgedRequest
from agent.records.request import RequestRecord, Vantage
from agent.store.writing import RequestWriter

OnCounted = Callable[[Sequence[JudgedRequest]], None]


def _ignored(_counted: Sequence[JudgedRequest]) -> None:
    """Do nothing with requests that were counted."""


def as_it_is(record: RequestRecord) -> RequestRecord:
    """The record unchanged: its engine has no plugin."""
    return record


class RequestPipeline:
    """Judges requests of any source, and has them stored and counted."""

    def __init__(
        self,
        judge: Judge,
        writer: RequestWriter,
        meter: Meter,
        on_counted: OnCounted | None = None,
        *,
        complete: Callable[[RequestRecord], RequestRecord] = as_it_is,
    ) -> None:
        """`on_counted` gets the requests that were counted, and must not wait. `complete` adds the
        figures of an engine's plugin to a record."""
        self._complete = complete
        self._judge = judge
        self._on_counted = on_counted or _ignored
        self._writer = writer
        self._meter = meter

    async def accept(self, records: Sequence[RequestRecord]) -> int:
        """Judge and store records; returns after the commit how many the database refused.

        Requests that wait for no other view are counted by then. Raises StoreUnavailable when no
        record is committed; the caller may pass the same records again.
        """
        if not records:
            return 0
        judged = [self._judge.judged(self._complete(record)) for record in records]
        try:
            result = await asyncio.wrap_future(self._writer.submit(judged))
        except StoreUnavailable:
            self._meter.store_failed(StoreWrite.REQUESTS)
            raise
        sent = _spans(judged) - _spans(result.refused)
        self._meter.stored(result.counted, sent=sent, new=_spans(result.new))
        self._on_counted(result.counted)
        return len(result.refused)

    def settle(self, now: float) -> None:
        """Count the requests whose wait for another view has ended; a job calls it each second.

        While the database is away, they wait for a later call.
        """
        try:
            counted = self._writer.settle(now).result()
        except StoreUnavailable:
            self._meter.store_failed(StoreWrite.SETTLE)
        else:
            self._meter.stored(counted, sent=0, new=0)
            self._on_counted(counted)


def _spans(judged: Sequence[JudgedRequest]) -> int:
    """How many requests were received as spans; records of the proxy are none."""
    return len([item for item in judged if item.record.vantage is Vantage.ENGINE])
