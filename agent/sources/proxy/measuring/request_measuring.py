"""Starts the measurement of each request that asks a model for text."""

from collections.abc import Callable
from dataclasses import dataclass

from agent.catalog.reasons import ProxyFailure
from agent.records.request import RequestRecord
from agent.sources.proxy.exchange import Arrival, OnFailure, Tracing
from agent.sources.proxy.measuring.api_protocols import PROTOCOLS, ApiProtocol
from agent.sources.proxy.measuring.measured_exchange import (
    ClientHeaders,
    MeasuredExchange,
    MeasuringContext,
)
from agent.sources.proxy.measuring.request_fields import (
    UNKNOWN,
    RequestFields,
    read_request_fields,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuringOptions:
    """How requests are measured; the settings of the same names explain each.

    An engine that counts in each event for all clients (`--enable-force-include-usage`) needs
    neither `count_tokens` nor `continuous_usage`. With the latter its clients would lose counts
    that they rely on.
    """

    tenant_header: str | None = None
    user_header: str | None = None
    workload_header: str | None = None
    session_header: str | None = None
    count_tokens: bool = True
    continuous_usage: bool = False
    return_request_id: bool = True


def _header(name: str | None) -> bytes | None:
    return name.lower().encode() if name else None


class RequestMeasuring:
    """Measures the requests to the routes of `PROTOCOLS`; each becomes one record for the sink."""

    def __init__(
        self,
        agent: str,
        tracing: Tracing,
        sink: Callable[[RequestRecord], None],
        on_failure: OnFailure,
        options: MeasuringOptions = MeasuringOptions(),
        *,
        opened: Callable[[RequestRecord], None] | None = None,
        lost: Callable[[str], None] | None = None,
    ) -> None:
        """`opened` gets a record of each request that was sent to an engine, for the case that this
        process dies, and `lost` the span id of a request whose record `sink` will not get."""
        self._tracing = tracing
        self._context = MeasuringContext(
            agent,
            ClientHeaders(
                tenant=_header(options.tenant_header),
                user=_header(options.user_header),
                workload=_header(options.workload_header),
                session=_header(options.session_header),
            ),
            options.return_request_id,
            sink,
            opened,
            lost,
            on_failure,
        )
        self._options = options

    def wants(self, method: str, path: str) -> bool:
        """Return whether a request is measured: a POST to one of the routes."""
        return method == "POST" and path in PROTOCOLS

    def begin(self, arrival: Arrival) -> MeasuredExchange:
        """Start the measurement of a request."""
        protocol = PROTOCOLS[arrival.path]
        return MeasuredExchange(
            context=self._context,
            arrival=arrival,
            protocol=protocol,
            fields=self._fields(arrival, protocol),
            span=self._tracing.begin(arrival.headers),
        )

    def _fields(self, arrival: Arrival, protocol: ApiProtocol) -> RequestFields:
        if arrival.body is None:
            if not arrival.client_left:
                self._context.on_failure(ProxyFailure.BODY_NOT_READ)
            return UNKNOWN
        fields = read_request_fields(
            arrival.body,
            protocol,
            count_tokens=self._options.count_tokens,
            continuous_usage=self._options.continuous_usage,
        )
        if fields is UNKNOWN:
            self._context.on_failure(ProxyFailure.BODY_UNREADABLE)
        return fields
