"""Bounds the labels that clients choose: models that engines serve, and a number of tenants."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from agent.catalog.time_units import DAY_S
from agent.records.request import ProxyView, RequestRecord, Status

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
