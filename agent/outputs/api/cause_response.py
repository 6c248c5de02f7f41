"""Causes of misses in a response: of a window, of a group, and of one request."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal

from pydantic import Field

from agent.analysis.cause_sums import CauseSums, figures_by_cause
from agent.catalog.causes import CAUSES
from agent.outputs.api.base_response import BaseResponse

Limit = Literal["ttft", "tpot", "e2e", "failure"]


class CauseAdvice(BaseResponse):
    """What a cause means, and what an operator can do about it."""

    part: str = Field(description="queue, prefill, decode, front, failure or unknown")
    meaning: str
    knob: str = Field(description="what to turn")
    flag: str | None = Field(description="of vLLM; null where none helps")
    costs: str | None = Field(description="what turning it takes away; null for nothing")


class CauseLimitResponse(BaseResponse):
    """A cause over one limit."""

    requests: int = Field(description="missed requests with a share of the cause over this limit")
    seconds: float | None = Field(description="null for requests without a response")


class CauseResponse(BaseResponse):
    """A cause of misses in a window."""

    cause: str
    share: float | None = Field(description="of the excess seconds of all causes")
    seconds: float | None = Field(
        description="excess seconds over all limits; a second over two limits counts for both"
    )
    requests: int = Field(description="missed requests of which it is the first cause")
    limits: Mapping[str, CauseLimitResponse]
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
    """The explanation of a row; None where it has none."""
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
    return None if facts is None else CauseAdvice(**facts._asdict())
