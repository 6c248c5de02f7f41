"""One missed request with all that the rules look at, computed when a rule first needs it."""

from collections.abc import Callable
from enum import StrEnum
from itertools import compress
from typing import Any, Generic, TypeVar, overload

import msgspec

from agent.analysis.causes.baselines import (
    Usual,
    engine_e2e_of,
    engine_ttft_of,
    front_of,
    outside_of,
)
from agent.analysis.causes.engine_timeline import COLD_S, EngineTimeline
from agent.analysis.causes.periods import Change, MissedHits, Period, Prompts
from agent.analysis.joined_record import is_from_front
from agent.analysis.verdicts import E2E, TPOT, Excess, later_tokens
from agent.records.engine import EndedRequest
from agent.records.request import RequestRecord, Vantage

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
    decodes speculatively.
    """

    CPU_WAITS = "cpu_waits"
    GPU_THROTTLED = "gpu_throttled"
    STARTED = "started"
    DRAFTS = "drafts"


_SIGNS = tuple(Sign)


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
        self._missed_hits: dict[float, MissedHits | None] = {}
        baselines = timeline.baselines
        self.usual: Usual = baselines.usual(record)
        self._usual_prefill_s = baselines.usual_prefill_s(record, self.usual.cached_share)
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
        return self.split and self.record.vantage is not Vantage.PROXY and not self.in_front

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
    def prefill_token_s(self) -> float:
        """Seconds of one prompt token, 0 if that is unknown."""
        known = self.timeline.prefill_token_s(self.decode.source or self.prefill.source)
        return known or self.timeline.baselines.long_prompt_rate(self.record.model) or 0.0

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
            PhaseTime(Phase.PREFILL, prefill_s, self._usual_prefill_s or 0.0),
        ]

    def _decoding(self, decode_s: float) -> list[PhaseTime]:
        engine_s = self.record.decode_s
        engine_s = decode_s if engine_s is None else min(engine_s, decode_s)
        token_s = min(self.usual.tpot_s or 0.0, self.timeline.alone_s() or float("inf"))
        needed_s = min(engine_s, token_s * later_tokens(self.record))
        return [
            PhaseTime(Phase.STREAM, decode_s - engine_s, 0.0),
            PhaseTime(Phase.DECODE, engine_s, needed_s),
        ]

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
