"""Sums of missed requests and of their excess seconds, by objective, limit and cause."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agent.analysis.tally import ALL_OBJECTIVES
from agent.records.objective import CauseShare, Explanation


class CausePlace(NamedTuple):
    """What a sum is of. ALL_OBJECTIVES stands for the objective that a request exceeded most."""

    objective: str
    limit: str
    cause: str


@dataclass(slots=True)
class CauseSum:
    """Missed requests with a share of a cause, and the seconds of these shares.

    Of `top_requests` it is the first cause. `excess_s` is None where no share has known seconds.
    """

    requests: int = 0
    top_requests: int = 0
    excess_s: float | None = None

    def add(self, other: "CauseSum") -> None:
        """Add another sum. The order of adding never matters."""
        self.requests += other.requests
        self.top_requests += other.top_requests
        if other.excess_s is not None:
            self.excess_s = (self.excess_s or 0.0) + other.excess_s


CauseSums = Mapping[CausePlace, CauseSum]


def sums_of(explanation: Explanation) -> dict[CausePlace, CauseSum]:
    """The sums of one missed request.

    Each of its objectives has a first cause of its own; that of all objectives together is the
    explanation's.
    """
    shares_of: dict[str, list[CauseShare]] = {}
    for share in explanation.shares:
        shares_of.setdefault(share.objective, []).append(share)
    sums: dict[CausePlace, CauseSum] = {}
    for objective, shares in shares_of.items():
        sums |= _sums(objective, shares, _top(shares))
    if shares_of:
        sums |= _sums(ALL_OBJECTIVES, _most_exceeded(shares_of, explanation.top), explanation.top)
    return sums


def _most_exceeded(shares_of: Mapping[str, Sequence[CauseShare]], top: str) -> Sequence[CauseShare]:
    def exceeded(shares: Sequence[CauseShare]) -> tuple[bool, float]:
        return any(share.cause == top for share in shares), _seconds(shares)

    return max(shares_of.values(), key=exceeded)


def _seconds(shares: Sequence[CauseShare]) -> float:
    return sum(share.excess_s or 0.0 for share in shares)


def _top(shares: Sequence[CauseShare]) -> str:
    """The cause with the most seconds over all limits."""
    seconds: dict[str, float] = {}
    for share in shares:
        seconds[share.cause] = seconds.get(share.cause, 0.0) + (share.excess_s or 0.0)
    return max(seconds, key=lambda cause: seconds[cause])


def _sums(objective: str, shares: Sequence[CauseShare], top: str) -> dict[CausePlace, CauseSum]:
    """One request in each sum, and in one of its first cause: where that took most seconds."""
    sums: dict[CausePlace, CauseSum] = {}
    for share in shares:
        place = CausePlace(objective, share.limit, str(share.cause))
        sums.setdefault(place, CauseSum(requests=1)).add(CauseSum(excess_s=share.excess_s))
    of_top = [place for place in sums if place.cause == top]
    if of_top:
        sums[max(of_top, key=lambda place: sums[place].excess_s or 0.0)].top_requests = 1
    return sums


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitFigures:
    """A cause over one limit."""

    requests: int
    """missed requests with a share of the cause over this limit"""
    seconds: float | None
    """null for requests without a response"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseFigures:
    """One cause in a window. Of `requests` it is the first cause; each request has one.

    `share` is that of the excess seconds of all causes. Seconds are over all limits, so a second
    over two of them counts for both.
    """

    cause: str
    share: float | None
    seconds: float | None
    requests: int
    limits: Mapping[str, LimitFigures]


def figures_by_cause(sums: CauseSums) -> list[CauseFigures]:
    """The causes of one objective, those with the most seconds first."""
    by_cause: dict[str, dict[str, CauseSum]] = {}
    for place, each in sums.items():
        by_cause.setdefault(place.cause, {}).setdefault(place.limit, CauseSum()).add(each)
    totals = {cause: _total(by_limit.values()) for cause, by_limit in by_cause.items()}
    whole_s = sum(total.excess_s or 0.0 for total in totals.values())
    figures = [
        CauseFigures(
            cause=cause,
            share=None if total.excess_s is None or not whole_s else total.excess_s / whole_s,
            seconds=total.excess_s,
            requests=total.top_requests,
            limits={
                limit: LimitFigures(requests=each.requests, seconds=each.excess_s)
                for limit, each in sorted(by_cause[cause].items())
            },
        )
        for cause, total in totals.items()
    ]
    return sorted(figures, key=lambda each: (-(each.seconds or 0.0), -each.requests, each.cause))


def _total(sums: Iterable[CauseSum]) -> CauseSum:
    total = CauseSum()
    for each in sums:
        total.add(each)
    return total
