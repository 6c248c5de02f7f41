"""The activity of an engine over any period by its samples, and its usual activity."""

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache

from agent.analysis.causes.activity import Activity, Slice
from agent.analysis.causes.baselines import USUAL_HITS
from agent.analysis.causes.periods import Change, MissedHits
from agent.analysis.causes.running_sums import RunningSums

_MAX_SAMPLES = 4_096
# How far the usual rates look back, and how much of that must be known.
_USUAL_S = 600.0
_USUAL_AT_LEAST_S = 20.0
# The prefix cache lost hits where it served less than this share of its usual hits.
_HITS_LEFT = 0.5
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
        self._change = lru_cache(_MOST_REMEMBERED)(self._changed)
        self._missed = lru_cache(_MOST_REMEMBERED)(self._missed_between)

    def add(self, done: Slice, sums: Sequence[float], *, queue_empty: bool) -> None:
        """Add a slice with its sums; `queue_empty` where it shows that no request waits."""
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
        """What came since the queue began that a request found; None where too little is known."""
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

        Both the share of hits and the hits per request must fall. New prompts, which no cache can
        have, lower only the share.
        """
        since = self.sums.before(start - _HITS_AT_LEAST_S)
        until = self.sums.after(end)
        return None if since is None or until is None else self._missed(since, until)

    def _missed_between(self, since: float, until: float) -> MissedHits | None:
        usual = self._usual(since)
        if (usual.hit_share or 0.0) < USUAL_HITS:
            return None
        now = self.between(since, until)
        if now.hit_share is None or now.hit_share >= _HITS_LEFT * (usual.hit_share or 0.0):
            return None
        expected = now.arrivals * usual.hit_tokens / max(1.0, usual.arrivals)
        if not expected or now.hit_tokens >= _HITS_LEFT * expected:
            return None
        lost = (expected - now.hit_tokens) / max(1.0, now.query_tokens - now.hit_tokens)
        return MissedHits(now.hit_share, usual.hit_share or 0.0, min(1.0, lost))

    def usual_prompt_tokens_per_s(self, at: float) -> float | None:
        """Computed prompt tokens per second in the _USUAL_S before a time."""
        usual = self._usual_at(at)
        return None if usual is None else usual.prefill_tokens / usual.seconds

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
        """What the engine did in the _USUAL_S before the time of a sample."""
        return self.between(sample - _USUAL_S, sample)
