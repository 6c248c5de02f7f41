"""Why a request missed its objectives: its excess seconds, charged to causes with evidence."""

from typing import NamedTuple

import msgspec

from agent.catalog.causes import Cause
from agent.records.objective import JudgedRequest


class CauseShare(msgspec.Struct, frozen=True):
    """A part of the excess over one limit of one objective.

    `limit` is `ttft`, `tpot` or `e2e`, or `failure` for a request without a response. `excess_s` is
    in seconds of the request's own time: for TPOT, the excess of one token times the tokens after
    the first. It is None for a failure. `evidence` are sentences with the figures and where they
    came from.

    A struct, because several are made for every missed request and a named tuple takes three times
    as long to make.
    """

    objective: str
    limit: str
    cause: Cause
    excess_s: float | None
    evidence: tuple[str, ...]


class Explanation(msgspec.Struct, frozen=True):
    """The shares of one missed request.

    Those of one objective and limit add up to its excess. `top` is the cause with the most seconds
    over all limits of the objective that was exceeded most. `sources` names the views that were
    there: `plugin`, `span`, `proxy`, `samples`.
    """

    trace_id: str
    span_id: str
    top: Cause
    shares: tuple[CauseShare, ...]
    sources: tuple[str, ...]


class ExplainedRequest(NamedTuple):
    """A missed request as it was when it was explained, and its explanation."""

    judged: JudgedRequest
    explanation: Explanation
