"""Figures of requests in a response, the same for a window, a step and a group. Unknown is null."""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from agent.outputs.api.base_response import BaseResponse


class Percentiles(BaseResponse):
    """Milliseconds, each within `relative_error` of a real request's value; null if unseen."""

    p50: float | None
    p95: float | None
    p99: float | None


class StreamSpeeds(BaseResponse):
    """Tokens per second of one user's stream after its first token, 1 / TPOT.

    95 % of the streams are at least as fast as `p5`. Null if unseen, or without any delay.
    """

    p50: float | None
    p5: float | None
    p1: float | None


class AttainedResponse(BaseResponse):
    """The verdicts of one objective."""

    objective: str
    met: int
    missed: int
    undetermined: int
    attainment: float | None = Field(description="met / (met + missed)")


class FailuresResponse(BaseResponse):
    """The requests that one vantage saw, and those of them that failed."""

    requests: int
    failed: int | None = Field(
        description="an engine's spans leave out most failures, so theirs are at least these"
    )
    error_ratio: float | None = Field(description="of the proxy: null for the engine")


class RequestFigures(BaseResponse):
    """Figures of requests. Rates are per second of `covered_s`, and null where that is 0.

    Goodput counts requests that met.

    Without a chosen objective, a request met if it met all that cover it.
    """

    requests: int
    met: int
    missed: int
    undetermined: int
    attainment: float | None = Field(
        description="met / (met + missed); null where several objectives judged: see by_objective"
    )
    by_objective: list[AttainedResponse] = Field(description="those that judged these requests")
    violations_per_min: float | None = Field(description="missed requests per minute")
    goodput_rps: float | None
    goodput_tokens_per_s: float | None
    throughput_rps: float | None = Field(description="requests without an error, per second")
    input_tokens_per_s: float | None
    output_tokens_per_s: float | None
    error_ratio: float | None = Field(
        description="failed / all but cancelled and invalid; null unless the proxy saw them all"
    )
    failures: Mapping[Literal["proxy", "engine"], FailuresResponse] = Field(
        description="by who saw the requests: the proxy, or the engine alone"
    )
    explained: int = Field(description="missed requests of which the causes are stored so far")
    causes: Mapping[str, float] | None = Field(
        description="share of each cause in the excess seconds of the explained requests; without "
        "a chosen objective those over the one that a request exceeded most; null without any"
    )
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    e2e_ms: Percentiles
    queue_ms: Percentiles
    stream_tokens_per_s: StreamSpeeds
