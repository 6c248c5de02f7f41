"""Conversations: the turns of sessions, from their requests.

A turn is a request of a session that got a response, also one whose client left it. Times are in
seconds, timestamps in Unix seconds, unknown None.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum
from statistics import median_low
from typing import NamedTuple

from agent.analysis.quantiles import bin_of, quantile
from agent.catalog.definitions import Verdict
from agent.records.objective import SessionLimits

# By name, the first turn and the last; None is no end.
TURN_BUCKETS: Mapping[str, tuple[int, int | None]] = {
    "1": (1, 1),
    "2-3": (2, 3),
    "4-7": (4, 7),
    "8-15": (8, 15),
    "16+": (16, None),
}
# Of more requests in a window, those that began last are read, so that the work is bounded.
MOST_TURNS = 10_000
# Caches hold whole blocks: fewer tokens may be missing of a prompt that is cached.
BLOCK_TOKENS = 16


class TurnRequest(NamedTuple):
    """What is read of the row of a turn."""

    session: str
    started_at: float
    ended_at: float
    engine: str | None = None
    model: str | None = None
    tenant: str | None = None
    route: str | None = None
    ttft_s: float | None = None
    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    cost_usd: float | None = None
    request_id: str | None = None
    trace_id: str = ""
    span_id: str = ""
    verdict: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of a session.

    `gap_s` is the time from the end of the turn before: a tool's time, or the user's; None if the
    turns overlap. `refilled_tokens` are those of the prompt before that were computed again, though
    this prompt is longer; None if it is not, or if the cache is unknown. They were evicted, or the
    session `moved` to another engine.
    """

    number: int
    request: TurnRequest
    gap_s: float | None
    refilled_tokens: int | None
    moved: bool


def turns_of(requests: Iterable[TurnRequest]) -> list[Turn]:
    """The turns of one session in the order of their begin."""
    turns: list[Turn] = []
    before: TurnRequest | None = None
    for number, request in enumerate(sorted(requests, key=lambda each: each.started_at), 1):
        turns.append(
            Turn(
                number=number,
                request=request,
                gap_s=None if before is None else _gap_s(before, request),
                refilled_tokens=None if before is None else _refilled(before, request),
                moved=before is not None and before.engine != request.engine,
            )
        )
        before = request
    return turns


def _gap_s(before: TurnRequest, request: TurnRequest) -> float | None:
    gap_s = request.started_at - before.ended_at
    return gap_s if gap_s >= 0 else None


def _refilled(before: TurnRequest, request: TurnRequest) -> int | None:
    """The tokens of the prompt before that are in this prompt, and no longer in the cache."""
    was, now, cached = before.input_tokens, request.input_tokens, request.cached_tokens
    if was is None or now is None or cached is None or now < was:
        return None
    missing = was - cached
    return missing if missing > BLOCK_TOKENS else 0


def session_verdict(turns: Sequence[Turn], limits: SessionLimits) -> Verdict:
    """Whether the first turn met its limit, and enough of the later ones theirs.

    Undetermined while turns without a TTFT could decide it.
    """
    first = [each for each in turns if each.number == 1]
    later = [each for each in turns if each.number > 1]
    verdicts = [
        _share_verdict([each.request.ttft_s for each in some], limit_s, share)
        for some, limit_s, share in (
            (first, limits.first_turn_ttft_s, 1.0),
            (later, limits.turn_ttft_s, limits.share_of_turns),
        )
        if limit_s is not None and some
    ]
    if Verdict.MISSED in verdicts:
        return Verdict.MISSED
    return Verdict.UNDETERMINED if Verdict.UNDETERMINED in verdicts or not verdicts else Verdict.MET


def _share_verdict(ttft_s: Sequence[float | None], limit_s: float, share: float) -> Verdict:
    met = sum(each is not None and each <= limit_s for each in ttft_s)
    possibly = met + sum(each is None for each in ttft_s)
    wanted = share * len(ttft_s) - 1e-9
    if met >= wanted:
        return Verdict.MET
    return Verdict.MISSED if possibly < wanted else Verdict.UNDETERMINED


@dataclass(slots=True)
class _Sums:
    turns: int = 0
    ttft: Counter[int] = field(default_factory=Counter)
    gaps: Counter[int] = field(default_factory=Counter)
    input_tokens: int = 0
    cached_tokens: int = 0
    refilled: Counter[bool] = field(default_factory=Counter)
    refill_known: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFigures:
    """The turns of one bucket. `cached_ratio` is of the tokens of prompts whose cache is known."""

    bucket: str
    turns: int
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    cached_ratio: float | None
    gap_p50_s: float | None
    gap_p95_s: float | None
    evicted_tokens: int | None
    moved_tokens: int | None


def figures_by_turn(turns: Iterable[Turn]) -> list[TurnFigures]:
    """The figures of each bucket that has turns, the first turns first."""
    sums: defaultdict[str, _Sums] = defaultdict(_Sums)
    for turn in turns:
        _add(sums[bucket_of(turn.number)], turn)
    return [_figures(name, sums[name]) for name in TURN_BUCKETS if name in sums]


def bucket_of(number: int) -> str:
    """The bucket of a turn."""
    return next(name for name, (_, last) in TURN_BUCKETS.items() if last is None or number <= last)


def _add(sums: _Sums, turn: Turn) -> None:
    request = turn.request
    sums.turns += 1
    if request.ttft_s is not None:
        sums.ttft[bin_of(request.ttft_s)] += 1
    if turn.gap_s is not None:
        sums.gaps[bin_of(turn.gap_s)] += 1
    if request.input_tokens is not None and request.cached_tokens is not None:
        sums.input_tokens += request.input_tokens
        sums.cached_tokens += request.cached_tokens
    if turn.refilled_tokens is not None:
        sums.refilled[turn.moved] += turn.refilled_tokens
        sums.refill_known += 1


def _figures(name: str, sums: _Sums) -> TurnFigures:
    known = sums.refill_known > 0
    return TurnFigures(
        bucket=name,
        turns=sums.turns,
        ttft_p50_s=quantile(sums.ttft, 0.5),
        ttft_p95_s=quantile(sums.ttft, 0.95),
        cached_ratio=sums.cached_tokens / sums.input_tokens if sums.input_tokens else None,
        gap_p50_s=quantile(sums.gaps, 0.5),
        gap_p95_s=quantile(sums.gaps, 0.95),
        evicted_tokens=sums.refilled[False] if known else None,
        moved_tokens=sums.refilled[True] if known else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The turns of one session together."""

    session: str
    turns: Sequence[Turn]

    @property
    def refilled_tokens(self) -> int | None:
        """Tokens that were computed again; None if the cache is unknown of every turn."""
        known = [each.refilled_tokens for each in self.turns if each.refilled_tokens is not None]
        return sum(known) if known else None

    @property
    def missed_turns(self) -> int | None:
        """Turns whose request missed an objective; None if none was judged."""
        verdicts = Counter(each.request.verdict for each in self.turns)
        missed = verdicts[Verdict.MISSED]
        return missed if missed + verdicts[Verdict.MET] else None

    @property
    def worst_ttft_s(self) -> float | None:
        """The longest TTFT of a turn."""
        return max(self._ttft_s(self.turns), default=None)

    @property
    def later_ttft_p50_s(self) -> float | None:
        """The median TTFT of the turns after the first."""
        known = self._ttft_s(self.turns[1:])
        return median_low(known) if known else None

    @staticmethod
    def _ttft_s(turns: Sequence[Turn]) -> Sequence[float]:
        return [each.request.ttft_s for each in turns if each.request.ttft_s is not None]

    @property
    def cached_ratio(self) -> float | None:
        """Of the tokens of prompts whose cache is known, those from a cache."""
        tokens = [(each.request.input_tokens, each.request.cached_tokens) for each in self.turns]
        known = [(of, cached) for of, cached in tokens if of is not None and cached is not None]
        all_tokens = sum(of for of, _ in known)
        return sum(cached for _, cached in known) / all_tokens if all_tokens else None

    @property
    def gap_p50_s(self) -> float | None:
        """The median time between its turns."""
        known = [each.gap_s for each in self.turns if each.gap_s is not None]
        return median_low(known) if known else None

    @property
    def cost_usd(self) -> float | None:
        """The cost of its turns that are priced."""
        known = [each.request.cost_usd for each in self.turns if each.request.cost_usd is not None]
        return fsum(known) if known else None


def conversations_of(requests: Iterable[TurnRequest]) -> list[Conversation]:
    """The sessions of these requests, the one that began last first."""
    by_session: defaultdict[str, list[TurnRequest]] = defaultdict(list)
    for request in requests:
        by_session[request.session].append(request)
    found = [Conversation(session=name, turns=turns_of(some)) for name, some in by_session.items()]
    return sorted(found, key=lambda each: (-each.turns[0].request.started_at, each.session))


def worst_first(found: Iterable[Conversation]) -> list[Conversation]:
    """By missed turns, of equals by tokens that were computed again, then by the longest TTFT."""

    def badness(one: Conversation) -> tuple[float, ...]:
        return (one.missed_turns or 0, one.refilled_tokens or 0, one.worst_ttft_s or 0.0)

    return sorted(found, key=badness, reverse=True)
