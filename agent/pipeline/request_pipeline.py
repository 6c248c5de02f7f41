"""Every request: its labels are bounded, it is judged, stored, then counted and acknowledged."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from agent.analysis.verdicts import Judge
from agent.catalog.reasons import StoreWrite
from agent.catalog.time_units import DAY_S
from agent.errors import StoreUnavailable
from agent.outputs.prometheus.meter import Meter
from agent.records.objective import JudgedRequest
from agent.records.request import ProxyView, RequestRecord, Status, Vantage
from agent.store.writing import RequestWriter

# The tenant of all requests whose tenant got no place.
OTHER_TENANT = "other"

_IDLE_S = float(DAY_S)


class TenantPlaces:
    """The tenants that may be a label; the others are counted as OTHER_TENANT. For one thread.

    A known tenant always has a place. Another tenant takes a free place. It loses the place when a
    new tenant needs one and the tenant was not seen for a day.
    """

    def __init__(self, known: Iterable[str], places: int) -> None:
        self._known = frozenset(known)
        self._places = places
        # The Unix time when each tenant was last seen, in this order.
        self._seen_at: OrderedDict[str, float] = OrderedDict()

    def has_place(self, tenant: str, now: float, *, may_take: bool) -> bool:
        """Whether the tenant has a place at a Unix time; with `may_take` it takes a free one."""
        if tenant in self._known:
            return True
        if tenant not in self._seen_at and not (may_take and self._is_free(now)):
            return False
        self._seen_at[tenant] = now
        self._seen_at.move_to_end(tenant)
        return True

    def _is_free(self, now: float) -> bool:
        if len(self._seen_at) < self._places:
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
        tenants: TenantPlaces,
        on_replaced: Callable[[str], None],
    ) -> None:
        self._answered = answered
        self._is_served = is_served
        self._tenants = tenants
        self._on_replaced = on_replaced

    def labelled(self, record: RequestRecord) -> RequestRecord:
        """The record; a replaced value is kept in the proxy's view as the client wrote it."""
        if record.proxied is None:
            return record
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
        """The tenant, or OTHER_TENANT. An invalid request, as with a wrong key, takes no place."""
        if record.tenant is None:
            return None
        may_take = record.status is not Status.INVALID
        at = record.received_at
        has_place = self._tenants.has_place(record.tenant, at, may_take=may_take)
        return record.tenant if has_place else OTHER_TENANT


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
