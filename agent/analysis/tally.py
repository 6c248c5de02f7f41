"""Counts, sums and latency bins of a group of requests, sums by cause, and groups of lengths."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from agent.analysis.quantiles import bins_of
from agent.records.objective import CauseShare, Explanation, JudgedRequest, Judgement
from agent.records.request import BY_CLIENT, FAILED, PROXY_VIEWS, Status, Vantage

# Edges of groups of lengths: powers of four, of inputs from 1024 tokens on. A group includes its
# lower edge.
EDGES_TOKENS = (1024, 4096, 16384, 65536)
INPUT_LENGTHS = ("0-1k", "1k-4k", "4k-16k", "16k-64k", "64k+")
OUTPUT_EDGES_TOKENS = (64, 256, 1024, 4096)
OUTPUT_LENGTHS = ("0-64", "64-256", "256-1k", "1k-4k", "4k+")


def input_length_of(input_tokens: int | None) -> str | None:
    """The group of a number of input tokens; None if it is unknown."""
    return None if input_tokens is None else INPUT_LENGTHS[bisect_right(EDGES_TOKENS, input_tokens)]


MEASURES = ("ttft_s", "tpot_s", "e2e_s", "queue_s")

# The key of the verdict of all objectives together; no objective can have this name.
ALL_OBJECTIVES = ""


@dataclass(slots=True)
class VerdictCounts:
    """Requests with one verdict, and the sum of their known output tokens."""

    requests: int = 0
    output_tokens: int = 0

    def add(self, other: "VerdictCounts") -> None:
        """Add the counts of others."""
        self.requests += other.requests
        self.output_tokens += other.output_tokens


@dataclass(slots=True)
class Tally:
    """Counts, sums and latency bins of requests; `..._known` counts those with a known value.

    `verdicts` maps (objective or ALL_OBJECTIVES, verdict) to counts, `bins` a measure to its bins.
    Of the requests seen at the proxy, `proxy_counted` counts those with a known share in the next
    two: `proxy_ended` leaves out what the client cancelled or spoilt, `proxy_failed` failed.
    """

    requests: int = 0
    statuses: dict[str, int] = field(default_factory=dict)
    seen_at_proxy: int = 0
    input_tokens: int = 0
    input_tokens_known: int = 0
    output_tokens: int = 0
    output_tokens_known: int = 0
    proxy_counted: int = 0
    proxy_ended: int = 0
    proxy_failed: int = 0
    verdicts: dict[tuple[str, str], VerdictCounts] = field(default_factory=dict)
    bins: dict[str, dict[int, int]] = field(default_factory=dict)

    def add(self, other: "Tally") -> None:
        """Add another group. The order of adding never matters."""
        self.requests += other.requests
        self.seen_at_proxy += other.seen_at_proxy
        self.input_tokens += other.input_tokens
        self.input_tokens_known += other.input_tokens_known
        self.output_tokens += other.output_tokens
        self.output_tokens_known += other.output_tokens_known
        self.proxy_counted += other.proxy_counted
        self.proxy_ended += other.proxy_ended
        self.proxy_failed += other.proxy_failed
        _add_counts(self.statuses, other.statuses)
        for key, counts in other.verdicts.items():
            self.verdicts.setdefault(key, VerdictCounts()).add(counts)
        for measure, bins in other.bins.items():
            _add_counts(self.bins.setdefault(measure, {}), bins)


def tally_of(judged: Sequence[JudgedRequest]) -> Tally:
    """The tally of these requests, made column by column: several times faster than by row."""
    records = [item.record for item in judged]
    at_proxy = [r.status for r in records if r.vantage in PROXY_VIEWS]
    input_tokens = [r.input_tokens for r in records if r.input_tokens is not None]
    output_tokens = [r.output_tokens for r in records if r.output_tokens is not None]
    # A refusal takes no time, and would hide how long real responses take.
    timed = [r for r in records if r.status is not Status.INVALID]
    latencies_s = {
        "ttft_s": [r.ttft_s for r in timed if r.ttft_s is not None],
        "tpot_s": [r.tpot_s for r in timed if r.tpot_s is not None],
        "e2e_s": [r.e2e_s for r in timed if r.e2e_s is not None],
        "queue_s": [r.queue_s for r in timed if r.queue_s is not None],
    }
    return Tally(
        requests=len(records),
        statuses={str(key): n for key, n in Counter([r.status for r in records]).items()},
        seen_at_proxy=len(at_proxy),
        input_tokens=sum(input_tokens),
        input_tokens_known=len(input_tokens),
        output_tokens=sum(output_tokens),
        output_tokens_known=len(output_tokens),
        proxy_counted=len(at_proxy),
        proxy_ended=sum([status not in BY_CLIENT for status in at_proxy]),
        proxy_failed=sum([status in FAILED for status in at_proxy]),
        verdicts=_verdict_counts(judged),
        bins={name: bins_of(values_s) for name, values_s in latencies_s.items() if values_s},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Alike:
    """Requests of one vantage, status and judgement, with the sums of their known tokens."""

    requests: int
    vantage: Vantage
    status: Status
    judgement: Judgement
    input_tokens: int
    input_tokens_known: int
    output_tokens: int
    output_tokens_known: int


def tally_of_alike(alike: Alike) -> Tally:
    """The tally of these requests, without latencies."""
    number, status = alike.requests, alike.status
    at_proxy = number if alike.vantage in PROXY_VIEWS else 0
    names = ((ALL_OBJECTIVES, alike.judgement.verdict), *alike.judgement.by_objective)
    return Tally(
        requests=number,
        statuses={str(status): number},
        seen_at_proxy=at_proxy,
        input_tokens=alike.input_tokens,
        input_tokens_known=alike.input_tokens_known,
        output_tokens=alike.output_tokens,
        output_tokens_known=alike.output_tokens_known,
        proxy_counted=at_proxy,
        proxy_ended=0 if status in BY_CLIENT else at_proxy,
        proxy_failed=at_proxy if status in FAILED else 0,
        verdicts={
            (name, str(verdict)): VerdictCounts(number, alike.output_tokens)
            for name, verdict in names
        },
    )


def _verdict_counts(judged: Iterable[JudgedRequest]) -> dict[tuple[str, str], VerdictCounts]:
    output_tokens: dict[Judgement, list[int]] = {}
    for item in judged:
        output_tokens.setdefault(item.judgement, []).append(item.record.output_tokens or 0)
    counts: dict[tuple[str, str], VerdictCounts] = {}
    for judgement, tokens in output_tokens.items():
        group = VerdictCounts(len(tokens), sum(tokens))
        for name, verdict in ((ALL_OBJECTIVES, judgement.verdict), *judgement.by_objective):
            counts.setdefault((name, str(verdict)), VerdictCounts()).add(group)
    return counts


def _add_counts(into: dict[Any, int], counts: Mapping[Any, int]) -> None:
    for key, count in counts.items():
        into[key] = into.get(key, 0) + count


class CausePlace(NamedTuple):
    """What a sum is of. ALL_OBJECTIVES stands for the objective that a request exceeded most."""

    objective: str
    limit: str
    cause: str


@dataclass(slots=True)
class CauseSum:
    """Missed requests with a share of a cause, and the seconds of these shares.

    Of `top_requests` it is the first cause. `excess_s` is None if no share has known seconds.
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
    """One request in each sum, and in one of its first cause: the one that took most seconds."""
    sums: dict[CausePlace, CauseSum] = {}
    for share in shares:
        key = CausePlace(objective, share.limit, str(share.cause))
        sums.setdefault(key, CauseSum(requests=1)).add(CauseSum(excess_s=share.excess_s))
    of_top = [key for key in sums if key.cause == top]
    if of_top:
        sums[max(of_top, key=lambda key: sums[key].excess_s or 0.0)].top_requests = 1
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
    for key, each in sums.items():
        by_cause.setdefault(key.cause, {}).setdefault(key.limit, CauseSum()).add(each)
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
