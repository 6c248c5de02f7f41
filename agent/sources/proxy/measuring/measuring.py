"""Begins the measurement of each request that asks a model for text."""

from collections.abc import Callable
from dataclasses import dataclass

from agent.records.request import RequestRecord
from agent.sources.proxy.exchange import Arrival, Tracing
from agent.sources.proxy.measuring.asked import UNKNOWN, Asked, read_asked
from agent.sources.proxy.measuring.exchange import MeasuredExchange, Surroundings
from agent.sources.proxy.measuring.protocols import PROTOCOLS, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuringOptions:
    """How requests are measured.

    `tenant_header` names the tenant, in lower case; without it a digest of the API key does.
    `count_tokens` asks engines to count the tokens of streams whose clients did not ask for it, and
    `continuous_usage` to count them in each event; the client gets none of these counts. An engine
    that counts in each event for all clients (`--enable-force-include-usage`) needs neither, and
    with `continuous_usage` its clients would miss the counts that they get from it alone.
    """

    tenant_header: str | None = None
    count_tokens: bool = True
    continuous_usage: bool = False


class RequestMeasuring:
    """Measures the requests to the routes of `PROTOCOLS`; each becomes one record for the sink.

    What could not be measured is counted by reason through `on_failure`: `slo_header`,
    `body_unreadable`, `compressed_answer`, `answer_too_large`, `answer_unreadable`,
    `event_unreadable`, `measuring` and `record`.
    """

    def __init__(
        self,
        agent: str,
        tracing: Tracing,
        sink: Callable[[RequestRecord], None],
        on_failure: Callable[[str], None],
        options: MeasuringOptions = MeasuringOptions(),
    ) -> None:
        self._tracing = tracing
        named = options.tenant_header
        header = named.lower().encode() if named else None
        self._around = Surroundings(agent, header, sink, on_failure)
        self._options = options

    def wants(self, method: str, path: str) -> bool:
        """Whether a request is measured: a POST to one of the routes."""
        return method == "POST" and path in PROTOCOLS

    def begin(self, arrival: Arrival) -> MeasuredExchange:
        """The measurement of a request that is wanted."""
        protocol = PROTOCOLS[arrival.path]
        return MeasuredExchange(
            around=self._around,
            arrival=arrival,
            protocol=protocol,
            asked=self._asked(arrival, protocol),
            span=self._tracing.begin(arrival.headers),
        )

    def _asked(self, arrival: Arrival, protocol: Protocol) -> Asked:
        if arrival.body is None:
            return UNKNOWN
        asked = read_asked(
            arrival.body,
            protocol,
            counted=self._options.count_tokens,
            continuous=self._options.continuous_usage,
        )
        if asked is UNKNOWN:
            self._around.on_failure("body_unreadable")
        return asked
