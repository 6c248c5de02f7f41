"""What the rules read of an engine in a period: its activity, changes, lost hits and prompts."""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from agent.analysis.causes.activity import Activity, Slice
from agent.analysis.causes.baselines import USUAL_HITS
from agent.analysis.causes.rolling import RunningSums


class Prompts(msgspec.Struct, frozen=True):
    """Prompts of other requests that were prefilled in a period.

    `missing_share` is the share of their computed tokens that the prefix cache usually has; None
    unless all of their rows have cached tokens. `ended_tokens` are all tokens of those
    whose prefill ended in the period. `sizes` has the computed tokens of each prompt.
    `large` are large tokens (ComputedWork). If `own` is not 0, `sizes` also has the own prompt,
    of so many tokens. It is a view that holds until the next prompt is added to the log.
    """

    many: int = 0
    tokens: int = 0
    ended_tokens: int = 0
    missing_share: float | None = None
    sizes: "Sequence[int] | NDArray[np.int32]" = ()
    own: int = 0
    large: float = 0.0


class Change(msgspec.Struct, frozen=True):
    """What came to an engine since its queue began, and what usually comes in that time.

    `since` is when the queue was last seen empty.
    """

    since: float
    seconds: float
    arrivals: float
    usual_arrivals: float
    prefill_tokens: float
    usual_prefill_tokens: float
    usual_running: float


class UsualLoad(NamedTuple):
    """What an engine usually does, and its most prompt tokens and generated tokens a second."""

    activity: Activity
    most_prompt_tokens_per_s: float
    most_generated_per_s: float


class MissedHits(msgspec.Struct, frozen=True):
    """The shares of prompt tokens that the prefix cache had in a period, and usually has.

    `share` is the part of the computed prompt tokens that the cache usually has.
    """

    now: float
    usual: float
    share: float


class Period(msgspec.Struct, frozen=True):
    """The activity of an engine in a period (Unix time), and its source; None without a source."""

    start: float
    end: float
    activity: Activity
    source: str | None

    @property
    def seconds(self) -> float:
        """The length of the period."""
        return self.end - self.start


_MAX_SAMPLES = 4_096
# How far the usual rates look back, and how much of that must be known.
_USUAL_S = 600.0
_USUAL_AT_LEAST_S = 20.0
# Load swings: its peaks are those of times of this length.
_SWING_S = 10.0
# The newest minute, or half of what is known, may be what is unusual.
_NEWEST_S = 60.0
# The prefix cache lost hits if it served less than this share of its usual hits.
_HITS_LEFT = 0.5
# By the rows of requests, if it served less than this share.
_SERVED_LESS = 0.7
# In less time so few requests come that their hits are chance.
_HITS_AT_LEAST_S = 4.0
# The activity between two samples never changes, and all requests of that time need the same.
_MOST_REMEMBERED = 256


class SampledActivity:
    """The slices between samples. Add in the order of time."""

    def __init__(self) -> None:
        self.sums = RunningSums(len(Activity.__struct_fields__) - 1, max_rows=_MAX_SAMPLES)
        self.has_drafts = False
        self._empty_at = array("d")
        self._usual = lru_cache(_MOST_REMEMBERED)(self._before)
        self._earlier = lru_cache(_MOST_REMEMBERED)(self._before_newest)
        self._change = lru_cache(_MOST_REMEMBERED)(self._changed)
        self._missed = lru_cache(_MOST_REMEMBERED)(self._missed_between)

    def add(self, done: Slice, sums: Sequence[float], *, queue_empty: bool) -> None:
        """Add a slice with its sums; `queue_empty` if it shows that no request waits."""
        self.sums.add(done.since, done.until, sums)
        self.has_drafts |= done.drafts > 0
        if queue_empty:
            self._empty_at.append(done.until)
            if len(self._empty_at) > 2 * _MAX_SAMPLES:
                del self._empty_at[:-_MAX_SAMPLES]

    @property
    def until(self) -> float:
        """The time of the newest sample; minus infinity without any."""
        return self.sums.last_at

    def between(self, start: float, end: float) -> Activity:
        """What the engine did in a period."""
        return Activity(*self.sums.between(start, end))

    def change(self, arrived_at: float, until: float) -> Change | None:
        """What came since the queue began that a request found; None if too little is known."""
        index = bisect_right(self._empty_at, arrived_at)
        since = self._empty_at[index - 1] if index else self.sums.first_at
        next_sample = self.sums.after(arrived_at)
        if next_sample is None:
            return None
        return self._change(since, min(max(next_sample, since), until + 5.0))

    def _changed(self, since: float, until: float) -> Change | None:
        now, usual = self.between(since, until), self._usual(since)
        if usual.seconds < _USUAL_AT_LEAST_S or not now.seconds:
            return None
        share = now.seconds / usual.seconds
        return Change(
            since,
            now.seconds,
            now.arrivals,
            usual.arrivals * share,
            now.prefill_tokens,
            usual.prefill_tokens * share,
            usual.running,
        )

    def missed_hits(self, start: float, end: float) -> MissedHits | None:
        """How much less the prefix cache had than usual around a period; None if not much less.

        Both the share of hits and the hits of the time must fall. New prompts, which no cache can
        have, lower only the share.
        """
        around = self._around(start, end)
        return None if around is None else self._missed(*around)

    def served_less(self, start: float, end: float) -> bool:
        """Whether the prefix cache had fewer tokens than it usually has in such a time.

        True if that is unknown. A cache that has nothing of new prompts serves the others as ever.
        """
        around = self._around(start, end)
        expected = None if around is None else self._hits_expected(*around)
        if around is None or not expected:
            return True
        return self.between(*around).hit_tokens < _SERVED_LESS * expected

    def _around(self, start: float, end: float) -> tuple[float, float] | None:
        since = self.sums.before(start - _HITS_AT_LEAST_S)
        until = self.sums.after(end)
        return None if since is None or until is None else (since, until)

    def _hits_expected(self, since: float, until: float) -> float:
        """The hit tokens of a time by what started, if those that usually come came as well."""
        usual, now = self._usual(since), self.between(since, until)
        usual_arrivals = usual.arrivals * now.seconds / max(1.0, usual.seconds)
        of_usual = min(1.0, usual_arrivals / max(1.0, now.arrivals))
        return now.started * of_usual * usual.hit_tokens / max(1.0, usual.arrivals)

    def _missed_between(self, since: float, until: float) -> MissedHits | None:
        usual = self._usual(since)
        if (usual.hit_share or 0.0) < USUAL_HITS:
            return None
        now = self.between(since, until)
        if now.hit_share is None or now.hit_share >= _HITS_LEFT * (usual.hit_share or 0.0):
            return None
        expected = self._hits_expected(since, until)
        if not expected or now.hit_tokens >= _HITS_LEFT * expected:
            return None
        lost = (expected - now.hit_tokens) / max(1.0, now.query_tokens - now.hit_tokens)
        return MissedHits(now.hit_share, usual.hit_share or 0.0, min(1.0, lost))

    def usual_load(self, at: float) -> UsualLoad | None:
        """What the engine did in the _USUAL_S that ended _NEWEST_S before a time."""
        since = self.sums.before(at)
        usual = None if since is None else self._earlier(since)
        return None if usual is None or usual.activity.seconds < _USUAL_AT_LEAST_S else usual

    def _before_newest(self, sample: float) -> UsualLoad:
        until = sample - min(_NEWEST_S, (sample - self.sums.first_at) / 2)
        whole = self.between(until - _USUAL_S, until)
        pieces = [
            self.between(until - (number + 1) * _SWING_S, until - number * _SWING_S)
            for number in range(int(whole.seconds / _SWING_S))
        ]
        return UsualLoad(
            whole,
            max((each.prefill_tokens for each in pieces), default=0.0) / _SWING_S,
            max((each.decode_tokens for each in pieces), default=0.0) / _SWING_S,
        )

    def accepted_share(self, start: float, end: float) -> float | None:
        """Accepted tokens per draft in a period; only samples count drafts."""
        return self.between(start, end).accepted_share if self.has_drafts else None

    def usual_accepted_share(self, at: float) -> float | None:
        """Accepted tokens per draft in the _USUAL_S before a time."""
        usual = self._usual_at(at)
        return None if usual is None else usual.accepted_share

    def rejected(self, start: float, end: float) -> float:
        """Requests that the engine refused between the samples around a period."""
        return self.between(start - 1.0, self.sums.after(end) or end).rejected

    def _usual_at(self, at: float) -> Activity | None:
        since = self.sums.before(at)
        usual = None if since is None else self._usual(since)
        return None if usual is None or usual.seconds < _USUAL_AT_LEAST_S else usual

    def _before(self, sample: float) -> Activity:
        return self.between(sample - _USUAL_S, sample)


# The prompts of a minute of the busiest engine.
_MAX_PROMPTS = 16_384
# A prompt that began in a period is looked for up to this long after it.
_LONG_PREFILL_S = 1.0
# Up to this many prompts in a period, each counts with the part of its prefill in the period.
_FEW = 16
# So many prompts show whether the cache lost those that usually come.
_MOST_AROUND = 64
# Two times of a first token differ by no more than rounding.
_SAME_S = 1e-6


class Prompt(NamedTuple):
    """A prompt: the Unix time of its first token, its prefill in seconds, its computed tokens.

    `missing` is how many of these tokens the prefix cache usually has; None if that is unknown.
    """

    span_id: str
    first_at: float
    prefill_s: float
    tokens: int
    missing: int | None = None
    large: float = 0.0


class PromptLog:
    """Prompts by the time of their first token, the newest _MAX_PROMPTS at least."""

    def __init__(self) -> None:
        self._at = array("d")
        self._prompts: list[Prompt] = []
        self._sums = _PromptSums()

    def add(self, prompt: Prompt) -> None:
        """Add a prompt, in any order of time."""
        index = bisect_right(self._at, prompt.first_at)
        self._at.insert(index, prompt.first_at)
        self._prompts.insert(index, prompt)
        self._sums.cut(index)
        if len(self._at) > 2 * _MAX_PROMPTS:
            del self._at[:-_MAX_PROMPTS]
            del self._prompts[:-_MAX_PROMPTS]
            self._sums.cut(0)

    def within(self, start: float, end: float, own: tuple[str, float]) -> Prompts:
        """The prompts that were prefilled in a period (Unix time), except the request's own.

        `own` is the span id of the request and the time of its first token. Of few prompts, each
        counts with the part of its prefill in the period. Of many, each whose prefill ended in the
        period counts whole.
        """
        low, high = bisect_left(self._at, start), bisect_right(self._at, end)
        many, own_tokens = high - low, 0
        if many <= _FEW:
            return self._one_by_one(low, (start, end), self._index_of(*own))
        sums = self._sums
        if len(sums) < len(self._prompts):
            sums.extend(self._prompts)
        tokens, missing, unknown, large = sums.between(low, high)
        span_id, first_at = own
        within = start - _SAME_S <= first_at <= end + _SAME_S
        mine = self._index_of(span_id, first_at) if within else -1
        if low <= mine < high:
            prompt = self._prompts[mine]
            many, own_tokens = many - 1, prompt.tokens
            tokens -= own_tokens
            missing -= prompt.missing or 0
            large -= prompt.large
            unknown -= prompt.missing is None
        share = None if unknown else missing / max(1, tokens)
        sizes = sums.sizes[low:high]
        return Prompts(many, tokens, tokens, share, sizes, own_tokens, large)

    def hits_around(self, start: float, end: float) -> tuple[int, int] | None:
        """The prompts that were prefilled in a period, and of how many the cache lost nothing.

        None if that is unknown. Of many prompts, the first _MOST_AROUND count.
        """
        low = bisect_left(self._at, start)
        high = min(bisect_right(self._at, end), low + _MOST_AROUND)
        self._sums.extend(self._prompts)
        unknown, served = self._sums.served(low, high)
        return None if unknown else (high - low, served)

    def _index_of(self, span_id: str, first_at: float) -> int:
        """The index of a request's own prompt; -1 without one."""
        times = self._at
        index = bisect_left(times, first_at - _SAME_S)
        while index < len(times) and times[index] <= first_at + _SAME_S:
            if self._prompts[index].span_id == span_id:
                return index
            index += 1
        return -1

    def _one_by_one(self, low: int, period: tuple[float, float], mine: int) -> Prompts:
        start, end = period
        high = bisect_right(self._at, end + _LONG_PREFILL_S, lo=low)
        sizes: list[int] = []
        within: list[float] = []
        missing: list[float | None] = []
        ended, large = 0, 0.0
        for index in range(low, min(high, low + 2 * _FEW)):
            _, first_at, took_s, tokens, lost, large_tokens = self._prompts[index]
            began_at = first_at - took_s
            if began_at >= end or index == mine:
                continue
            within_s = min(first_at, end) - max(began_at, start)
            part = within_s / took_s if took_s > 0 else 1.0
            sizes.append(tokens)
            ended += tokens if first_at <= end else 0
            within.append(tokens * part)
            large += large_tokens * part
            missing.append(None if lost is None else lost * part)
        share = _missing_share(within, missing)
        return Prompts(len(sizes), round(sum(within)), ended, share, sizes, large=large)


class _PromptSums:
    """Running sums over the prompts in their order, computed when they are needed."""

    def __init__(self) -> None:
        # 32 bits are enough for a prompt, and quicker to sort for the evidence.
        self.sizes = np.zeros(2 * _MAX_PROMPTS + 1, np.int32)
        self._tokens = array("q", [0])
        self._missing = array("q", [0])
        self._unknown = array("q", [0])
        self._large = array("q", [0])
        self._served = array("q", [0])

    def __len__(self) -> int:
        return len(self._tokens) - 1

    def cut(self, index: int) -> None:
        """Drop the sums from this index on: a prompt was inserted there."""
        for sums in (self._tokens, self._missing, self._unknown, self._large, self._served):
            del sums[index + 1 :]

    def extend(self, prompts: Sequence[Prompt]) -> None:
        """Make the sums up to the newest prompt."""
        known = len(self)
        if known < len(prompts):
            added = prompts[known:]
            self.sizes[known : len(prompts)] = [prompt.tokens for prompt in added]
            _sum_up(self._tokens, (prompt.tokens for prompt in added))
            _sum_up(self._missing, (prompt.missing or 0 for prompt in added))
            _sum_up(self._unknown, (prompt.missing is None for prompt in added))
            _sum_up(self._large, (round(prompt.large) for prompt in added))
            _sum_up(self._served, (prompt.missing == 0 for prompt in added))

    def served(self, low: int, high: int) -> tuple[int, int]:
        """Of some prompts how many have unknown missing tokens, and how many have none."""
        return self._unknown[high] - self._unknown[low], self._served[high] - self._served[low]

    def between(self, low: int, high: int) -> tuple[int, int, int, float]:
        """Of some prompts the computed and missing tokens, how many have unknown ones, and the
        large tokens."""
        return (
            self._tokens[high] - self._tokens[low],
            self._missing[high] - self._missing[low],
            self._unknown[high] - self._unknown[low],
            float(self._large[high] - self._large[low]),
        )


def _sum_up(sums: "array[int]", values: Iterable[int]) -> None:
    sums.extend(accumulate(values, initial=sums.pop()))


def _missing_share(tokens: Sequence[float], missing: Sequence[float | None]) -> float | None:
    known = [each for each in missing if each is not None]
    if not known or len(known) < len(missing):
        return None
    return sum(known) / max(1.0, sum(tokens))
