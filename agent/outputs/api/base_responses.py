"""Response models that several routes share. Unknown is null; names carry units."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, with_config

from agent.analysis.efficiency.window_efficiency import BatchFill, PrefixCache, Speculation
from agent.analysis.savings import Drafting, Offload
from agent.analysis.summary import Attained, Failures
from agent.analysis.tally import CauseSums, LimitFigures, figures_by_cause
from agent.catalog.causes import CAUSES, Effect
from agent.records.queries import GroupCache, GroupCost


class BaseResponse(BaseModel):
    """Any response."""

    model_config = ConfigDict(extra="ignore")


# The docstrings below the fields of a dataclass are descriptions in the API's document. Of all
# responses, to look for them would be a tenth of the processor time of a start.
_describe = with_config(ConfigDict(use_attribute_docstrings=True))
for _value in (
    *(Attained, BatchFill, Drafting, Failures, GroupCache, GroupCost, LimitFigures),
    *(Offload, PrefixCache, Speculation),
):
    _describe(_value)


Item = TypeVar("Item")
Verdict = Literal["met", "missed", "undetermined"]
Status = Literal["ok", "error", "timeout", "cancelled", "throttled", "invalid"]
Confidence = Literal["certain", "probable", "suspected"]


class ListOf(BaseResponse, Generic[Item]):
    """One page of a list; `next` is the cursor of the following page, null at the end."""

    items: list[Item]
    next: str | None = None


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


class RequestFigures(BaseResponse):
    """Figures of requests. Rates are per second of `covered_s`, and null if that is 0.

    Goodput counts requests that met.

    Without a chosen objective, a request met if it met all that cover it.
    """

    requests: int
    met: int
    missed: int
    undetermined: int
    attainment: float | None = Field(
        description="met / (met + missed); null if several objectives judged: see by_objective"
    )
    by_objective: list[Attained] = Field(description="those that judged these requests")
    violations_per_min: float | None = Field(description="missed requests per minute")
    goodput_rps: float | None
    goodput_tokens_per_s: float | None
    throughput_rps: float | None = Field(description="requests without an error, per second")
    input_tokens_per_s: float | None
    output_tokens_per_s: float | None
    error_ratio: float | None = Field(
        description="failed / all but cancelled and invalid; null unless all have the user's view"
    )
    failures: Mapping[Literal["proxy", "engine"], Failures] = Field(
        description="by view: the user's (`proxy`: by the proxy or vLLM's plugin), or the engine's "
        "alone"
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


class EffectResponse(BaseResponse):
    """What a change did on vLLM's own scheduler, in cases of this cause: docs/causes-advice.md."""

    tried: int = Field(description="cases")
    helped: int = Field(description="of these, those with a tenth fewer excess seconds, or less")
    harmed: int = Field(description="of these, those with a tenth more excess seconds, or more")
    change: float = Field(description="of the excess seconds, median: -0.6 if 60 % fewer")


class TriedChange(BaseResponse):
    """Another change that was tried: it may have harmed."""

    change: str
    effect: EffectResponse


class CauseAdvice(BaseResponse):
    """What a cause means, and what an operator can do about it."""

    part: str = Field(description="queue, prefill, decode, front, failure or unknown")
    meaning: str
    remedy: str = Field(description="what to change")
    flag: str | None = Field(description="of vLLM; null if none helps")
    costs: str | None = Field(description="what the change costs; null if nothing")
    when: str | None = Field(
        description="the condition under which it helps; null if none is known"
    )
    effect: EffectResponse | None = Field(description="of the change; null if it was not tried")
    also: TriedChange | None = Field(description="another change; it may have harmed")
    text: str = Field(description="remedy, condition and effects, as sentences")


class CauseResponse(BaseResponse):
    """A cause of misses in a window."""

    cause: str
    share: float | None = Field(description="of the excess seconds of all causes")
    seconds: float | None = Field(
        description="excess seconds over all limits; a second over two limits counts for both"
    )
    requests: int = Field(description="missed requests of which it is the first cause")
    limits: Mapping[str, LimitFigures]
    advice: CauseAdvice | None = Field(description="null for a cause of another version")


class CauseShareResponse(BaseResponse):
    """A part of the seconds of one request over a limit."""

    objective: str
    limit: str = Field(description="ttft, tpot, e2e or failure")
    cause: str
    excess_s: float | None = Field(
        description="of TPOT: of one token times the tokens after the first; null for a failure"
    )
    evidence: list[str]
    advice: CauseAdvice | None


class ExplanationResponse(BaseResponse):
    """Why one request missed its objectives. Shares of one limit add up to its excess."""

    sources: list[str] = Field(description="views that were there: plugin, span, proxy, samples")
    shares: list[CauseShareResponse]


def explanation_response(stored: Mapping[str, Any] | None) -> ExplanationResponse | None:
    """The explanation of a row; None if it has none."""
    if stored is None:
        return None
    shares = [
        CauseShareResponse(**share, advice=_advice(share["cause"])) for share in stored["shares"]
    ]
    return ExplanationResponse(sources=stored["sources"], shares=shares)


def cause_shares(sums: CauseSums) -> dict[str, Any]:
    """The fields `explained` and `causes` of figures."""
    figures = figures_by_cause(sums)
    shares = {each.cause: each.share for each in figures if each.share is not None}
    return {"explained": sum(each.requests for each in figures), "causes": shares or None}


def causes_with_details(sums: CauseSums) -> dict[str, Any]:
    """These fields, and `cause_details`."""
    details = [
        CauseResponse(**asdict(each), advice=_advice(each.cause)) for each in figures_by_cause(sums)
    ]
    return {**cause_shares(sums), "cause_details": details}


def _advice(cause: str) -> CauseAdvice | None:
    facts = CAUSES.get(cause)  # type: ignore[call-overload]
    if facts is None:
        return None
    effect = None if facts.effect is None else _effect(facts.effect)
    also = facts.also and TriedChange(change=facts.also.change, effect=_effect(facts.also.effect))
    given = facts._asdict() | {"effect": effect, "also": also}
    return CauseAdvice(**given, text=facts.text)


def _effect(effect: Effect) -> EffectResponse:
    return EffectResponse(**effect._asdict())
