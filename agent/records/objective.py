"""Objectives and the requests that they apply to: judged, stored, and why one missed."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import msgspec

from agent.catalog.causes import Cause
from agent.catalog.definitions import Definition, Verdict
from agent.records.request import RequestRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The requests of an objective. Patterns are shell globs, None matches everything.

    A request whose tenant, route or input length is unknown does not match a condition on it.
    """

    model: str = "*"
    tenant: str | None = None
    route: str | None = None
    min_input_tokens: int | None = None
    max_input_tokens: int | None = None
    everything: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        conditions = (self.tenant, self.route, self.min_input_tokens, self.max_input_tokens)
        unconditional = self.model == "*" and all(value is None for value in conditions)
        object.__setattr__(self, "everything", unconditional)

    def covers(
        self, model: str | None, tenant: str | None, route: str | None, input_tokens: int | None
    ) -> bool:
        """Return whether the objective applies to a request with these fields."""
        return (
            self.covers_model(model)
            and (self.tenant is None or _fits(self.tenant, tenant))
            and (self.route is None or _fits(self.route, route))
            and self._covers_length(input_tokens)
        )

    def covers_model(self, model: str | None) -> bool:
        """Return whether the objective may apply to requests of this model."""
        return self.model == "*" or _fits(self.model, model)

    def _covers_length(self, input_tokens: int | None) -> bool:
        if self.min_input_tokens is None and self.max_input_tokens is None:
            return True
        if input_tokens is None:
            return False
        low = self.min_input_tokens or 0
        return low <= input_tokens and (
            self.max_input_tokens is None or input_tokens <= self.max_input_tokens
        )


def _fits(pattern: str, value: str | None) -> bool:
    return value is not None and fnmatchcase(value, pattern)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Limits on the TTFT of the turns of a session; None means no limit.

    The first turn must keep its own limit, and `share_of_turns` of the later ones theirs.
    """

    first_turn_ttft_s: float | None = None
    turn_ttft_s: float | None = None
    share_of_turns: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Limits that requests must keep, and the share that must keep them.

    Limits of one request are inclusive; None means no limit. `target` is the share of judged
    requests that must meet every limit within `window_s`. `max_error_ratio` and
    `min_output_tokens_per_s` apply to all traffic together, and to no verdict. `session` judges
    whole sessions, and no request. `count_invalid` says whether the client's own mistakes count as
    failures; with None the definition decides.
    `is_preset`: the settings have no objective, so this one judges, and no alert is on it.
    """

    name: str
    definition: Definition
    target: float
    window_s: float
    match: Match = field(default_factory=Match)
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    max_error_ratio: float | None = None
    min_output_tokens_per_s: float | None = None
    session: SessionLimits | None = None
    count_invalid: bool | None = None
    is_preset: bool = field(default=False, compare=False)

    @property
    def limits(self) -> tuple[str, ...]:
        """The names of its limits on one request."""
        limits = (("ttft", self.ttft_s), ("tpot", self.tpot_s), ("e2e", self.e2e_s))
        return tuple(name for name, limit_s in limits if limit_s is not None)

    @property
    def judges_invalid(self) -> bool:
        """Whether an invalid request gets a verdict, that of a failed one."""
        own = self.count_invalid
        return self.definition.counts_invalid if own is None else own


def objective_from(name: str, stored: Mapping[str, Any]) -> Objective:
    """The objective of a stored definition; what another version added to it is left out."""
    match = _known(Match, stored.get("match") or {})
    session = stored.get("session")
    rest = _known(Objective, stored) | {
        "name": name,
        "definition": Definition(**_known(Definition, stored["definition"])),
        "match": Match(**match),
        "session": SessionLimits(**_known(SessionLimits, session)) if session else None,
    }
    return Objective(**rest)


def objectives_by_agent(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, Objective]]:
    """Each stored objective with the name of its agent."""
    return [(row["agent"], objective_from(row["name"], row["definition"])) for row in rows]


def _known(kind: type[Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(kind) if field.init}
    return {name: value for name, value in stored.items() if name in names}


@dataclass(frozen=True, slots=True, eq=False)
class Judgement:
    """The verdict of each objective that applies to a request, by name, and the combined one.

    Many requests share one judgement; it is compared by identity.
    """

    verdict: Verdict
    by_objective: tuple[tuple[str, Verdict], ...]


class JudgedRequest(NamedTuple):
    """A request with its judgement."""

    record: RequestRecord
    judgement: Judgement


class WriteResult(NamedTuple):
    """`new` were not stored before; `counted` are counted from this write on.

    A request that waits for its other view is new and not counted yet. A joined request is counted
    once, as a record of its own. The verdicts of `final` are final from this write on. `refused`
    can never be stored: the database takes others, but not these.
    """

    new: list[JudgedRequest]
    counted: list[JudgedRequest]
    final: list[JudgedRequest]
    refused: Sequence[JudgedRequest] = ()


class Settled(NamedTuple):
    """`counted` are counted from now on, the verdicts of `final` are final from now on."""

    counted: list[JudgedRequest]
    final: list[JudgedRequest]


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
