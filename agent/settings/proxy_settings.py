"""Settings of the traced proxy."""

from typing import Annotated, Literal

from pydantic import Field

from agent.settings.section import Section
from agent.settings.values import Address, Duration, Number, WholeNumber

_HeaderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$", max_length=100)]


class OutlierSettings(Section):
    """When the proxy stops sending requests to an engine that fails."""

    enabled: bool = True
    """Whether engines that fail are taken out of the rotation."""
    failures: WholeNumber = Field(default=3, ge=1, le=1000)
    """Failed requests in a row after which a worker ejects an engine."""
    ejection: Duration = Field(default="10s")  # type: ignore[assignment]
    """How long an engine is first ejected, until a probe; each further time is twice as long."""
    max_ejection: Duration = Field(default="2m")  # type: ignore[assignment]
    """The longest ejection."""


class ProxySettings(Section):
    """The traced proxy; without `listen` there is none."""

    listen: Address | None = None
    """Address at which the proxy takes requests, as in `127.0.0.1:8080`."""
    workers: Literal["auto"] | Annotated[WholeNumber, Field(ge=1, le=64)] = 1
    """Processes of the proxy; `auto`: one for each four processor cores, at most 8."""
    engine: str | None = None
    """The one engine behind the proxy; null: all engines."""
    tenant_header: _HeaderName | None = None
    """Header with the tenant of a request; null: the tenant is a digest of the API key."""
    user_header: _HeaderName | None = None
    """Trusted header with the user of a request."""
    workload_header: _HeaderName | None = None
    """Trusted header with the workload of a request."""
    session_header: _HeaderName | None = None
    """Trusted header with the session of a request."""
    tenants: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = ()
    """Tenants that figures always tell apart."""
    max_tenants: WholeNumber = Field(default=1000, ge=0, le=100_000)
    """How many further tenants figures tell apart; the rest is `other`."""
    count_tokens: bool = True
    """Whether engines are asked for the token counts of streams."""
    continuous_usage: bool = False
    """Whether engines are asked for the token counts of each chunk of a stream.

    Counts are stripped again for clients that asked for none."""
    return_request_id: bool = True
    """Whether the request id that the proxy made is sent to the client."""
    client_sampling: bool = True
    """Whether a client's sampled flag decides if spans of its request are forwarded."""
    trace_ratio: Number = Field(default=1.0, ge=0, le=1)
    """Share of the proxy's other spans that are forwarded; slow and failed ones always are."""
    join_wait: Duration = Field(default="10s")  # type: ignore[assignment]
    """How long a row waits for the engine's span."""
    drain: Duration = Field(default="30s")  # type: ignore[assignment]
    """How long streams may go on at a stop."""
    connect_timeout: Duration = Field(default="5s")  # type: ignore[assignment]
    """How long a connection to an engine may take."""
    answer_timeout: Duration | None = None
    """Limit from a request to the head of its response; null: none."""
    gap_timeout: Duration | None = None
    """Limit between two pieces of a response; null: none."""
    outlier_detection: OutlierSettings = OutlierSettings()
    retry: bool = True
    """Whether a request that an engine did not take is sent to another engine, once."""
