"""The traced proxy before the engines."""

from typing import Annotated

from pydantic import Field

from agent.settings.section import Section
from agent.settings.values import Address, Duration, Number

_HeaderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$", max_length=100)]


class ProxySettings(Section):
    """Where clients find the proxy; without `listen` there is none.

    `engine` names the one engine behind it, otherwise all are. `tenant_header` names the tenant of
    a request; without it a digest of the API key does. `count_tokens` asks engines for the tokens
    of streams, and `continuous_usage` for those of each chunk; clients that asked for neither get
    neither. `trace_ratio` is the share of spans that are passed on, besides those of slow and
    failed requests. A request waits for the engine's own span for `join_wait`. A stop lets streams
    go on for `drain`. `answer_timeout` is from the request to the head of the answer, `gap_timeout`
    between two pieces of it; null waits for as long as the engine takes.
    """

    listen: Address | None = None
    engine: str | None = None
    tenant_header: _HeaderName | None = None
    count_tokens: bool = True
    continuous_usage: bool = False
    trace_ratio: Number = Field(default=1.0, ge=0, le=1)
    join_wait: Duration = Field(default="10s")  # type: ignore[assignment]
    drain: Duration = Field(default="30s")  # type: ignore[assignment]
    connect_timeout: Duration = Field(default="5s")  # type: ignore[assignment]
    answer_timeout: Duration | None = None
    gap_timeout: Duration | None = None
