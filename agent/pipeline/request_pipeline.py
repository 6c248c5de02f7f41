"""Every request: its labels are bounded, it is judged, stored, then counted and acknowledged."""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from agent.analysis.verdicts import Judge
from agent.catalog.reasons import StoreWrite
from agent.catalog.time_units import DAY_S
from agent.errors import StoreUnavailable
from agent.outputs.prometheus.meter import Meter
from agent.records.objective import JudgedRequest, Settled
from agent.records.request import PROXY_VIEWS, ProxyView, RequestRecord, Status
from agent.store.writing import RequestWriter

# The label of all requests whose tenant may not be a label.
OTHER_TENANT = "other"

_IDLE_S = float(DAY_S)


class TenantLabels:
    """The tenants that may be a label; the others are counted as OTHER_TENANT. For one thread at a
    time.

    A known tenant always is one. Of others, `limit` may be labels at a time. Then a new tenant
    replaces the oldest one that was not seen for a day.
    """

    def __init__(self, known: Iterable[str], limit: int) -> None:
        self._known = frozenset(known)
        self._limit = limit
        # The Unix time when each tenant was last seen, in this order.
        self._seen_at: OrderedDict[str, float] = OrderedDict()

    def may_be_label(self, tenant: str, now: float, *, may_take: bool) -> bool:
        """Whether the tenant is a label at a Unix time; with `may_take` it may become one."""
        if tenant in self._known:
            return True
        if tenant not in self._seen_at and not (may_take and self._is_free(now)):
            return False
        self._seen_at[tenant] = now
        self._seen_at.move_to_end(tenant)
        return True

    def _is_free(self, now: float) -> bool:
        if len(self._seen_at) < self._limit:
            return True
        oldest = next(iter(self._seen_at), None)
        if oldest is None or now - self._seen_at[oldest] < _IDLE_S:
            return False
        del self._seen_at[oldest]
        return True


class ClientLabels:
    """Replaces a model or tenant of a proxied record that must not become a label.

    `answered` gets the engine and model of each successful request. `is_served` returns whether any
    engine serves a model of this name. `on_replaced` gets the name of each replaced field.
    """

    def __init__(
        self,
        *,
        answered: Callable[[str | None, str], None],
        is_served: Callable[[str], bool],
        tenants: TenantLabels,
        on_replaced: Callable[[str], None],
    ) -> None:
        self._answered = answered
        self._is_served = is_served
        self._tenants = tenants
        self._on_replaced = on_replaced
        # The proxy's records come on one thread, and those of middlewares on another.
        self._lock = threading.Lock()

    def labelled(self, record: RequestRecord) -> RequestRecord:
        """The record; a replaced value is kept in the proxy's view as the client wrote it."""
        if record.proxied is None:
            return record
        with self._lock:
            model, tenant = self._model(record), self._tenant(record)
        if model == record.model and tenant == record.tenant:
            return record
        return self._replaced(record, record.proxied, {"model": model, "tenant": tenant})

    def _replaced(
        self, record: RequestRecord, proxied: ProxyView, labels: dict[str, Any]
    ) -> RequestRecord:
        written = {name: getattr(record, name) for name in labels}
        replaced = [name for name, label in labels.items() if label != written[name]]
        for name in replaced:
            self._on_replaced(name)
        requested = {f"requested_{name}": written[name] for name in replaced}
        return record._replace(**labels, proxied=proxied._replace(**requested))

    def _model(self, record: RequestRecord) -> str | None:
        if record.model is None:
            return None
        if record.status is Status.OK:
            self._answered(record.engine, record.model)
        return record.model if self._is_served(record.model) else None

    def _tenant(self, record: RequestRecord) -> str | None:
        """The tenant, or OTHER_TENANT. An invalid request (wrong key) makes no new label."""
        if record.tenant is None:
            return None
        may_take = record.status is not Status.INVALID
        at = record.received_at
        is_label = self._tenants.may_be_label(record.tenant, at, may_take=may_take)
        return record.tenant if is_label else OTHER_TENANT


OnCounted = Callable[[Sequence[JudgedRequest]], None]


class RequestPipeline:
    """Judges requests of any source, and has them stored and counted."""

    def __init__(
        self,
        judge: Judge,
        writer: RequestWriter,
        meter: Meter,
        on_counted: OnCounted | None = None,
        *,
        complete: Callable[[RequestRecord], RequestRecord | None] | None = None,
        was_counted: Callable[[RequestRecord], bool] | None = None,
    ) -> None:
        """`on_counted` gets the requests that were counted, and must not wait.

        `complete` adds the figures of an engine's plugin to a record; it returns None of a span
        that has no row, since the row of its request needs none. `was_counted` says whether a row
        that a record replaced was counted.
        """
        self._was_counted = was_counted
        self._complete = complete
        self._judge = judge
        self._on_counted = on_counted
        self._writer = writer
        self._meter = meter

    async def accept(self, records: Sequence[RequestRecord]) -> int:
        """Judge and store records; returns after the commit how many the database refused.

        Requests that wait for no other view are counted by then. Raises StoreUnavailable when no
        record is committed; the caller may pass the same records again.
        """
        if not records:
            return 0
        if self._complete is not None:
            completed = [self._complete(record) for record in records]
            records = [record for record in completed if record is not None]
            self._meter.stored((), sent=len(completed) - len(records), new=0)
        judged = [self._judge.judged(record) for record in records]
        try:
            result = await asyncio.wrap_future(self._writer.submit(judged))
        except StoreUnavailable:
            self._meter.store_failed(StoreWrite.REQUESTS)
            raise
        sent = _spans(judged) - _spans(result.refused)
        self._count(Settled(result.counted, result.final), sent=sent, new=_spans(result.new))
        return len(result.refused)

    def settle(self, now: float) -> None:
        """Count the requests whose wait for another view has ended; a job calls it each second.

        While the database is away, they wait for a later call.
        """
        try:
            settled = self._writer.settle(now).result()
        except StoreUnavailable:
            self._meter.store_failed(StoreWrite.SETTLE)
        else:
            self._count(settled, sent=0, new=0)

    def _count(self, settled: Settled, *, sent: int, new: int) -> None:
        counted, final = settled
        if was_counted := self._was_counted:
            counted, final = (
                [item for item in items if not was_counted(item.record)] for items in settled
            )
        self._meter.stored(counted, sent=sent, new=new, final=final)
        if self._on_counted is not None:
            # Those that are missed only now have no cause yet.
            known = {id(item) for item in settled.counted}
            later = [item for item in settled.final if id(item) not in known]
            self._on_counted([*settled.counted, *later])


def _spans(judged: Sequence[JudgedRequest]) -> int:
    """How many requests were received as spans; not as records of the proxy."""
    return len([item for item in judged if item.record.vantage not in PROXY_VIEWS])
