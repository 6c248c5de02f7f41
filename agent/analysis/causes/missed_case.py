"""One missed request with all that the rules look at, computed when a rule first needs it."""

from collections.abc import Callable
from enum import StrEnum
from itertools import compress
from typing import Any, Generic, NamedTuple, TypeVar, overload

import msgspec

from agent.analysis.causes.activity import Activity
from agent.analysis.causes.baselines import (
    Usual,
    engine_e2e_of,
    engine_ttft_of,
    front_of,
    outside_of,
)
from agent.analysis.causes.engine_timeline import COLD_S, EngineTimeline
from agent.analysis.causes.periods import Change, MissedHits, Period, Prompts, UsualLoad
from agent.analysis.causes.step_costs import ComputedWork, Costs
from agent.analysis.joined_record import is_from_front
from agent.analysis.verdicts import E2E, TPOT, Excess, later_tokens
from agent.catalog.causes import Cause
from agent.records.engine import EndedRequest
from agent.records.request import ENGINE_VIEWS, RequestRecord

_Value = TypeVar("_Value")


class computed_once(Generic[_Value]):  # noqa: N801 - a decorator, as `functools.cached_property`
    """`functools.cached_property` without its lock, which would take most of the time."""

    def __init__(self, compute: Callable[[Any], _Value]) -> None:
        self._compute = compute
        self._name = compute.__name__
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, owner: None, kind: type) -> "computed_once[_Value]": ...
    @overload
    def __get__(self, owner: object, kind: type) -> _Value: ...
    def __get__(self, owner: object, kind: type) -> "_Value | computed_once[_Value]":
        """The value, stored as an attribute: the next access does not come here."""
        if owner is None:
            return self
        value = self._compute(owner)
        # Access to `owner.__dict__` would first make that dictionary.
        setattr(owner, self._name, value)
        return value


# The queue before a request is judged over this many times the request's own wait, and at least
# over the second value.
_BACKLOG_TIMES = 10.0
_BACKLOG_AT_LEAST_S = 5.0
# A stall delays requests that come so long after it, as those ahead of them wait.
STALL_BEFORE_S = 2.0
# Steps that took this share longer than usual are not slow: costs are learned no better.
_NOT_SLOW = 0.05
# Requests that were held in a part of so long before a period run at once in it, if that lasted
# until a sample before it.
_HELD_BEFORE_S, _HELD_SHARE, _HELD_UNTIL_S = 30.0, 0.05, 6.0
_HELD = (
    ("kv_full_s", Cause.KV_PRESSURE, "a full KV cache"),
    ("at_cap_s", Cause.SEQUENCE_CAP, "a full batch"),
    ("deferred_s", Cause.DEFERRED, "what they were deferred for"),
)
# So many times the usual requests take the cache of others.
_SURGE = 2.0
# So many usual prompts show whether the cache has theirs.
_ENOUGH_PROMPTS = 8
# Steps that were slow for a larger share of that time hold requests, too.
_SLOW_BEFORE_SHARE = 0.2
# More than usual is what chance seldom explains: lengths of prompts vary by more than a normal
# distribution.
_DEVIATIONS = 3.0
# From this share on, the longer prompts are most of the computed tokens.
_MOST = 0.8


class Phase(StrEnum):
    """A part of a request's time. Each phase has its own rules.

    OUTSIDE: on the way to the engine and back. FRONT: in the engine before its queue. STREAM: the
    response after the engine had sent it. Where the user's view was measured in the engine's front,
    OUTSIDE and STREAM are that front's own time. UNSPLIT: the time to the first token if its phases
    are unknown, because only the proxy saw the request.
    """

    OUTSIDE = "outside"
    STREAM = "stream"
    FRONT = "front"
    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"
    UNSPLIT = "unsplit"


class Sign(StrEnum):
    """A condition of an engine near a request, without which some rules explain nothing.

    Most requests have no sign, so their rules are not called. CPU_WAITS: a process waited for a
    processor. GPU_THROTTLED: a GPU was slow. STARTED: the engine started lately. DRAFTS: the engine
    decodes speculatively. STALLED: a step stood out.
    """

    CPU_WAITS = "cpu_waits"
    GPU_THROTTLED = "gpu_throttled"
    STARTED = "started"
    DRAFTS = "drafts"
    STALLED = "stalled"


_SIGNS = tuple(Sign)


def _usual_prompts(usual: Activity, seconds: float) -> tuple[float, float]:
    """The prompt tokens that usually come in a time, and their standard deviation.

    Lengths of prompts vary as much as their mean, and so does the number of prompts.
    """
    of_usual = seconds / usual.seconds
    mean = usual.prefill_tokens / max(1.0, usual.arrivals)
    prompts = max(1.0, usual.arrivals * of_usual)
    return usual.prefill_tokens * of_usual, mean * float((2 * prompts) ** 0.5)


def _usual_generated(usual: Activity, seconds: float) -> tuple[float, float]:
    """The tokens that are usually generated in a time, and their standard deviation.

    That is the one of the number of requests that run or come.
    """
    of_usual = seconds / usual.seconds
    expected = usual.decode_tokens * of_usual
    requests = max(1.0, usual.running + usual.arrivals * of_usual)
    return expected, expected / float(requests**0.5)


class PhaseTime(msgspec.Struct, frozen=True):
    """How long a phase took, and how long it takes such a request on a quiet engine, in seconds."""

    phase: Phase
    seconds: float
    needed_s: float


class Claim(msgspec.Struct, frozen=True):
    """Seconds that a rule explains, and why.

    A struct takes a third of the time of a named tuple to make; each missed request has several.
    """

    seconds: float
    evidence: tuple[str, ...]
    # If not that of the rule.
    cause: Cause | None = None


class Hold(NamedTuple):
    """What held requests before a period, since a Unix time: then all of them run at once."""

    since: float
    cause: Cause
    text: str


class More(NamedTuple):
    """Tokens beyond the usual, and what had held their requests before."""

    tokens: float
    hold: Hold | None = None


_NO_MORE = More(0.0)


class Worked(msgspec.Struct, frozen=True):
    """What steps computed, what that usually takes, and the prompt tokens of other requests.

    `prompts_s` are the seconds of all prompts, `prompt_token_s` those of a prompt token with its
    part of what each prompt takes. `slow_s` are seconds beyond what the work usually takes, 0 if
    these are few.
    """

    work: ComputedWork
    costs: Costs
    others_tokens: float
    prompts_s: float
    prompt_token_s: float
    slow_s: float


def _worked_of(work: ComputedWork, costs: Costs, others_tokens: float) -> Worked:
    steps, tokens, prompt_tokens, prompts, large_tokens, products, took_s = work
    step_s, token_s, prompt_token_s, prompt_s, large_token_s, product_s = costs
    prompts_s = prompt_tokens * prompt_token_s + prompts * prompt_s + large_tokens * large_token_s
    prompts_s += products * product_s
    slow_s = took_s - (steps * step_s + tokens * token_s + prompts_s)
    if slow_s <= _NOT_SLOW * took_s:
        slow_s = 0.0
    if prompt_tokens:
        prompt_token_s = prompts_s / prompt_tokens
    return Worked(work, costs, others_tokens, prompts_s, prompt_token_s, slow_s)


class MissedCase:
    """A missed request, what such requests usually take, and what its engine did meanwhile.

    Attributes that end in `_at` are Unix seconds.
    """

    def __init__(
        self, record: RequestRecord, timeline: EngineTimeline, ended: EndedRequest | None = None
    ) -> None:
        self.record = record
        self.timeline = timeline
        self.ended = ended
        self._prompts: dict[float, Prompts] = {}
        # What rules found of a period that further rules need.
        self.found: dict[tuple[str, float], Any] = {}
        self._missed_hits: dict[float, MissedHits | None] = {}
        self.usual: Usual = timeline.baselines.usual(record)
        self.arrived_at = record.started_at
        front_s = front_of(record)
        self.split = front_s is not None
        queue_s, prefill_s = record.queue_s or 0.0, record.prefill_s or 0.0
        self.queued_at = self.arrived_at + (front_s or 0.0)
        self.scheduled_at = self.queued_at + queue_s
        self.first_at = self.scheduled_at + prefill_s
        if not self.split:
            ttft_s = record.ttft_s if record.ttft_s is not None else record.e2e_s
            self.scheduled_at = self.first_at = self.arrived_at + (ttft_s or 0.0)
        decode_s = record.decode_s
        if decode_s is None:
            decode_s = record.ended_at - self.first_at
        self.last_at = self.first_at + max(0.0, decode_s)
        # Of a queue that is never empty, only the newest part counts.
        longest_s = _BACKLOG_TIMES * (self.scheduled_at - self.queued_at) + _BACKLOG_AT_LEAST_S
        self._backlog_from = self.queued_at - longest_s

    @computed_once
    def signs(self) -> frozenset[Sign]:
        """The signs since the earliest time that a rule looks at."""
        timeline, ready_at = self.timeline, self.timeline.ready_at
        earliest = min(self.arrived_at, self._backlog_from)
        there = (
            timeline.processor_waits.until >= earliest,
            timeline.gpu_slowness.until >= earliest,
            ready_at is not None and earliest - ready_at <= COLD_S,
            timeline.sampled.has_drafts,
            timeline.stalls.until >= earliest - STALL_BEFORE_S,
        )
        return frozenset(compress(_SIGNS, there))

    @computed_once
    def in_front(self) -> bool:
        """Whether the user's view was measured in the engine's front, so that neither a network nor
        the client's reading is in it."""
        record, view = self.record, self.record.engine_view
        engine_id = None if view is None else view.request_id
        return is_from_front(record.span_id, record.proxy_span_id, engine_id)

    @computed_once
    def has_span(self) -> bool:
        """Whether the engine's figures came with a span, and not with the plugin alone."""
        return self.split and self.record.vantage in ENGINE_VIEWS and not self.in_front

    @computed_once
    def queue(self) -> Period:
        """What the engine did while the request waited in its queue."""
        return self.timeline.period(self.queued_at, self.scheduled_at)

    @computed_once
    def backlog(self) -> Period:
        """What the engine did since its queue last was empty before the request came."""
        since = self.queued_at if self.change is None else min(self.change.since, self.queued_at)
        return self.timeline.period(max(since, self._backlog_from), self.scheduled_at)

    @computed_once
    def prefill(self) -> Period:
        """What the engine did from the request's first step to its first token."""
        return self.timeline.period(self.scheduled_at, self.first_at)

    @computed_once
    def decode(self) -> Period:
        """What the engine did from the first to the last token."""
        return self.timeline.period(self.first_at, self.last_at)

    @computed_once
    def change(self) -> Change | None:
        """What came to the engine since its queue began."""
        return self.timeline.sampled.change(self.queued_at, self.scheduled_at)

    @computed_once
    def computed(self) -> int:
        """The request's own prompt tokens that were computed."""
        return self.timeline.computed(self.record) or 0

    @computed_once
    def cache_lost(self) -> bool:
        """Whether the prefix cache lost prompts, and did not only get some that it cannot have.

        What a tenant's own requests show needs no further sign.
        """
        return self.record.tenant is not None or self.lost_by_others(self.prefill)

    def lost_by_others(self, period: Period) -> bool:
        """Whether the cache lost prompts that usually come, and did not only get new ones.

        Then fewer prompts than usually come have their usual hits. If too few prompts are known,
        the engine's hits of that time count.
        """
        sampled, usual = self.timeline.sampled, self.usual_load
        if usual is not None and usual.activity.arrivals:
            usual_per_s = usual.activity.arrivals / usual.activity.seconds
            around_s = _ENOUGH_PROMPTS / usual_per_s
            since, until = period.start - around_s / 2, period.end + around_s / 2
            known = self.timeline.prompts.hits_around(since, until)
            # Requests whose prompts are computed then have waited about as long as this one.
            waited_s = self.scheduled_at - self.queued_at
            now = sampled.between(since - waited_s, until - waited_s)
            if known is not None and now.arrivals:
                came_per_s = now.arrivals / now.seconds
                if came_per_s >= _SURGE * usual_per_s:
                    # The prompts of more requests take the cache of others.
                    return False
                expected = known[0] * min(1.0, usual_per_s / came_per_s)
                if expected >= _ENOUGH_PROMPTS / 2:
                    return known[1] < expected / 2
        return sampled.served_less(period.start, period.end)

    def _usual_prefill_s(self) -> float | None:
        share, record = self.usual.cached_share, self.record
        if share is not None:
            # If the cache had as much as usual, it makes no difference whether it lost prompts.
            tokens, cached = record.input_tokens or 0, record.cached_tokens or 0
            if round(tokens * (1 - share)) >= tokens - cached or not self.cache_lost:
                share = None
        return self.timeline.baselines.usual_prefill_s(record, share)

    @computed_once
    def usual_load(self) -> UsualLoad | None:
        """What the engine usually does; None if too little is known."""
        return self.timeline.sampled.usual_load(self.arrived_at)

    @computed_once
    def prefill_token_s(self) -> float:
        """Seconds of one prompt token, 0 if that is unknown."""
        for worked in (self.prefill_work, self.decode_work, self.backlog_work):
            if worked is not None and worked.work.prompt_tokens and worked.prompt_token_s:
                return worked.prompt_token_s
        return self.timeline.baselines.long_prompt_rate(self.record.model) or 0.0

    @computed_once
    def prefill_work(self) -> "Worked | None":
        """What the steps of the request's prefill computed."""
        return self._worked(self.prefill, self.timeline.steps_of_prompt(self.computed))

    @computed_once
    def decode_work(self) -> "Worked | None":
        """What the steps of the request's decode computed."""
        return self._worked(self.decode, later_tokens(self.record))

    @computed_once
    def backlog_work(self) -> "Worked | None":
        """What the steps computed while the queue grew."""
        return self._all_worked(self.backlog)

    def _all_worked(self, period: Period) -> "Worked | None":
        """What all steps of a period computed."""
        costs, done = self.timeline.costs(period.source), period.activity
        if costs is None or not done.timed:
            return None
        others, large, steps = done.prefill_tokens, done.large_tokens, done.steps
        if period.source == "plugin":
            others, large = self._prompts_of_steps(period, 0)
        else:
            # Costs are those of a token of a request, of which a draft gives several.
            steps *= 1 + (done.accepted_share or 0.0)
            rows = self.prompts(period)
            large = rows.large / max(1, rows.tokens) * others
        prompts = done.prompt_steps if period.source == "plugin" else 0.0
        work = ComputedWork(
            steps, done.decode_tokens, others, prompts, large, done.products, done.busy_s
        )
        return _worked_of(work, costs, others)

    def _prompts_of_steps(self, period: Period, own: int) -> tuple[float, float]:
        """The prompt tokens of others in the steps of a period, and of them the large ones."""
        done = period.activity
        others = max(0.0, done.prefill_tokens - own)
        large = max(0.0, done.large_tokens - self.timeline.beyond_free(own))
        if self.timeline.knows_pieces:
            return others, large
        # The engine counts a prompt in the last of its steps, and rows tell all of them.
        prompts = self.prompts(period)
        unknown = max(0.0, others - prompts.ended_tokens)
        large *= unknown / others if others else 0.0
        return prompts.tokens + unknown, prompts.large + large

    def _worked(self, period: Period, steps: float) -> "Worked | None":
        """What the steps of a phase computed; `steps` are those of the request's own tokens."""
        costs, done = self.timeline.costs(period.source), period.activity
        if costs is None:
            return None
        own = self.computed if period is self.prefill else 0
        own_large = self.timeline.beyond_free(own)
        if period.source == "plugin":
            if not done.timed:
                return None
            others, large = self._prompts_of_steps(period, own)
            steps, tokens, seconds = done.steps, done.decode_tokens, done.busy_s
            prompts = done.prompt_steps
        else:
            rows = self.prompts(period)
            others, large = float(rows.tokens), rows.large
            tokens = max(done.decode_tokens, steps if period is self.decode else 0.0)
            seconds, prompts = period.seconds, 0.0
        work = ComputedWork(
            steps, tokens, others + own, prompts, large + own_large, done.products, seconds
        )
        return _worked_of(work, costs, others)

    def more_prompts(self, period: Period, tokens: float) -> More:
        """Of others' prompt tokens in a period, those beyond the usual; 0 if they may be chance."""
        usual = self.usual_load
        if usual is None:
            return More(tokens)
        seconds = period.seconds
        if tokens <= usual.most_prompt_tokens_per_s * seconds:
            return _NO_MORE
        expected, chance = _usual_prompts(usual.activity, seconds)
        if tokens <= expected + _DEVIATIONS * chance:
            return _NO_MORE
        hold = self.hold(period)
        if hold is not None:
            whole_s, own = period.end - hold.since, (self.record.span_id, self.first_at)
            whole = self.timeline.prompts.within(hold.since, period.end, own).tokens
            if whole > sum(_usual_prompts(usual.activity, whole_s)):
                hold = None
        return More(tokens - expected, hold)

    def more_generated(self, period: Period, tokens: float) -> More:
        """Of tokens generated in a period, those beyond the usual; 0 if they may be chance.

        A slow engine has more requests in each step, and generates no more.
        """
        usual = self.usual_load
        if usual is None:
            return More(tokens)
        seconds = period.seconds
        if tokens <= usual.most_generated_per_s * seconds:
            return _NO_MORE
        expected, chance = _usual_generated(usual.activity, seconds)
        if tokens <= expected + _DEVIATIONS * chance:
            return _NO_MORE
        hold = self.hold(period)
        if hold is not None:
            whole = self.timeline.period(hold.since, period.end).activity
            if whole.decode_tokens > sum(_usual_generated(usual.activity, whole.seconds)):
                hold = None
        return More(tokens - expected, hold)

    def hold(self, period: Period) -> Hold | None:
        """What held requests before a period; None if nothing did."""
        for stall in self.timeline.stalled(period.start - STALL_BEFORE_S, period.start):
            return Hold(stall.since, Cause.STALL, "a step that took long")
        since = period.start - _HELD_BEFORE_S
        before = self.timeline.period(since, period.start)
        held_s, kind, cause, text = max(
            (getattr(before.activity, kind[0]), *kind) for kind in _HELD
        )
        if held_s >= _HELD_SHARE * _HELD_BEFORE_S:
            lately = self.timeline.period(period.start - _HELD_UNTIL_S, period.start)
            if getattr(lately.activity, kind):
                return Hold(since, cause, text)
        return self._slow_before(before)

    def _slow_before(self, before: Period) -> Hold | None:
        worked = self._all_worked(before)
        if worked is None or worked.slow_s < _SLOW_BEFORE_SHARE * worked.work.seconds:
            return None
        timeline = self.timeline
        lost = (
            (timeline.processor_waits.lost_s(before.start, before.end) or 0.0, Cause.CPU_STARVED),
            (timeline.gpu_slowness.lost_s(before.start, before.end) or 0.0, Cause.GPU_THROTTLED),
        )
        lost_s, cause = max(lost)
        if lost_s < worked.slow_s / 2:
            cold = Sign.STARTED in self.signs
            cause = Cause.COLD_START if cold else Cause.UNEXPLAINED
        return Hold(before.start, cause, "slow steps")

    def prompts(self, period: Period) -> Prompts:
        """The other requests' prompts that were prefilled in a period."""
        known = self._prompts.get(period.start)
        if known is None:
            own = self.record.span_id, self.first_at
            known = self.timeline.prompts.within(period.start, period.end, own)
            self._prompts[period.start] = known
        return known

    def missed_hits(self, period: Period) -> MissedHits | None:
        """How much less the prefix cache had than usual in a period; None if not much less.

        Also None if most computed tokens are of longer prompts than usual: no cache has prompts
        that are new, and samples do not say of which prompts the cache had tokens.
        """
        if period.start not in self._missed_hits:
            missed = self.timeline.sampled.missed_hits(period.start, period.end)
            if missed is not None and self._of_long_prompts(period):
                missed = None
            self._missed_hits[period.start] = missed
        return self._missed_hits[period.start]

    def _of_long_prompts(self, period: Period) -> bool:
        """Whether most computed tokens of a period are of prompts longer than usual."""
        usual = self.usual.prompt_tokens
        if usual is None:
            return False
        prompts = self.prompts(period)
        sizes = [*map(int, prompts.sizes), self.record.input_tokens or 0]
        if prompts.own:
            sizes.remove(prompts.own)
        longer = sum(size for size in sizes if size > usual)
        return longer > _MOST * sum(sizes)

    def phases(self, excess: Excess) -> list[PhaseTime]:
        """The phases that a limit is about; their seconds add up to the limited value."""
        value_s = excess.value_s or 0.0
        if excess.limit == TPOT:
            return self._decoding(value_s)
        if excess.limit == E2E:
            return self._whole(value_s)
        return self._first_token(value_s)

    def _first_token(self, ttft_s: float) -> list[PhaseTime]:
        record, usual = self.record, self.usual
        if not self.split:
            return [PhaseTime(Phase.UNSPLIT, ttft_s, 0.0)]
        engine_s = min(ttft_s, engine_ttft_of(record) or ttft_s)
        # Rounding may make the phases a little longer than the whole.
        queue_s = min(record.queue_s or 0.0, engine_s)
        prefill_s = min(record.prefill_s or 0.0, engine_s - queue_s)
        return [
            PhaseTime(Phase.OUTSIDE, ttft_s - engine_s, usual.outside_s or 0.0),
            PhaseTime(Phase.FRONT, engine_s - queue_s - prefill_s, usual.front_s or 0.0),
            PhaseTime(Phase.QUEUE, queue_s, 0.0),
            PhaseTime(Phase.PREFILL, prefill_s, self._usual_prefill_s() or 0.0),
        ]

    def _decoding(self, decode_s: float) -> list[PhaseTime]:
        engine_s = self.record.decode_s
        engine_s = decode_s if engine_s is None else min(engine_s, decode_s)
        token_s = min(self.usual.tpot_s or 0.0, self._alone_s())
        needed_s = min(engine_s, token_s * later_tokens(self.record))
        return [
            PhaseTime(Phase.STREAM, decode_s - engine_s, 0.0),
            PhaseTime(Phase.DECODE, engine_s, needed_s),
        ]

    def most_standing_s(self, phase: PhaseTime) -> float:
        """The most that what always stands delays the decoding: twice what it usually does."""
        usual_s = self.usual.median_tpot_s
        if usual_s is None:
            return float("inf")
        # A limit may be about a part of the decoding.
        usual_s *= later_tokens(self.record) * min(
            1.0, phase.seconds / (self.decode.seconds or 1.0)
        )
        return max(0.0, 2 * (usual_s - phase.needed_s))

    def _alone_s(self) -> float:
        """Seconds of a step for one request; infinity if that is unknown."""
        costs = self.timeline.costs(self.decode.source)
        return float("inf") if costs is None else costs.step_s + costs.token_s

    def _whole(self, e2e_s: float) -> list[PhaseTime]:
        engine_s, ttft_s = engine_e2e_of(self.record), engine_ttft_of(self.record)
        if engine_s is None or ttft_s is None:
            ttft_s = min(e2e_s, self.record.ttft_s or e2e_s)
            return self._first_token(ttft_s) + self._decoding(e2e_s - ttft_s)[1:]
        engine_s = min(engine_s, e2e_s)
        ttft_s = min(ttft_s, engine_s)
        outside_s = min(outside_of(self.record) or 0.0, e2e_s - engine_s)
        stream_s = e2e_s - engine_s - outside_s
        first = self._first_token(ttft_s + outside_s)
        decode = self._decoding(engine_s - ttft_s)
        return [*first, PhaseTime(Phase.STREAM, stream_s, 0.0), *decode]
