"""Settings of the traced proxy."""

from typing import Annotated, Literal

from pydantic import Field

from agent.settings.section import Section
from agent.settings.values import Address, Duration, Number, WholeNumber

_HeaderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$", max_length=100)]


class ProxySettings(Section):
    """The section `proxy`; without `listen` there is no proxy.

    `workers` is the number of its processes; auto: one for each four processor cores, at most 8.
    `engine` is the one engine behind the proxy; null: all engines. `tenant_header` has the tenant
    of a request; otherwise the tenant is a digest of the API key. `user_header`,
    `workload_header` and `session_header` have those. Figures tell `tenants` apart, and
    up to `max_tenants` others. `count_tokens` asks engines for
    the tokens of streams, `continuous_usage` for those of each chunk; the usage is stripped again
    for clients that asked for none. `return_request_id` sends the request id that the proxy made to
    the client. `client_sampling` lets a client's sampled flag decide whether spans of its request
    are forwarded; of all others `trace_ratio` is the share of the proxy's spans that are, and those
    of slow and failed requests always are. A row waits `join_wait` for the engine's span. At a
    stop, streams may go on for `drain`. `answer_timeout` is from the request to the head of the
    response, `gap_timeout` between two pieces of it; null is no limit.
    """

    listen: Address | None = None
    workers: Literal["auto"] | Annotated[WholeNumber, Field(ge=1, le=64)] = 1
    engine: str | None = None
    tenant_header: _HeaderName | None = None
    user_header: _HeaderName | None = None
    workload_header: _HeaderName | None = None
    session_header: _HeaderName | None = None
    tenants: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = ()
    max_tenants: WholeNumber = Field(default=1000, ge=0, le=100_000)
    count_tokens: bool = True
    continuous_usage: bool = False
    return_request_id: bool = True
    client_sampling: bool = True
    trace_ratio: Number = Field(default=1.0, ge=0, le=1)
    join_wait: Duration = Field(default="10s")  # type: ignore[assignment]
    drain: Duration = Field(default="30s")  # type: ignore[assignment]
    connect_timeout: Duration = Field(default="5s")  # type: ignore[assignment]
    answer_timeout: Duration | None = None
    gap_timeout: Duration | None = None
