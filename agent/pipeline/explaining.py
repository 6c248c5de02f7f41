"""Explains missed requests, once all evidence about them has come."""

import heapq
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import count
from typing import NamedTuple, TypeVar

from agent.analysis.causes import EngineTimeline, explain
from agent.catalog.causes import Cause
from agent.catalog.definitions import Verdict
from agent.errors import StoreUnavailable
from agent.records.engine import EndedRequest, EngineSample, EngineStep, HostSample, ServedRequest
from agent.records.event import Event, EventKind
from agent.records.gpu import GpuSample
from agent.records.objective import ExplainedRequest, Explanation, JudgedRequest, Objective
from agent.store.explanations import ExplanationStore

_LOG = logging.getLogger(__name__)

# Engines export their spans every five seconds: the prompts of others come with them.
ALL_CAME_S = 6.0
# A request waits this long at most for a sample after its end: a dead engine has no more samples.
LONGEST_WAIT_S = 30.0
# One run explains this many at most: other threads of the agent wait meanwhile.
MOST_AT_ONCE = 2_000
REQUESTS_PER_SLICE = 100
# Between slices the writer of requests comes first.
REQUESTS_PER_TURN = 10
# Half a minute of a million missed requests an hour. Further ones are read from the store later.
MOST_WAITING = 8_192
_LEFT_OVER_EVERY_S = 60.0
_LEFT_OVER_FOR_S = 900.0
# Steps of half a minute of the fastest engine; a job that is later loses the oldest.
_MOST_STEPS = 65_536
_MOST_OTHERS = 4_096
_MOST_ENDED = 16_384

_Item = TypeVar("_Item")

_DEADLY = frozenset(
    {
        EventKind.HOST_OOM,
        EventKind.CUDA_OOM,
        EventKind.GPU_FAULT,
        EventKind.ENGINE_DEAD,
        EventKind.HANG,
        EventKind.RESTART,
        EventKind.UNREACHABLE,
    }
)


class _EngineInbox:
    """The timeline of one engine, and what came for it since the last run of the job.

    Any thread may append to the queues; only the job calls `take_in`.
    """

    def __init__(self) -> None:
        self.timeline = EngineTimeline()
        self.steps: deque[EngineStep] = deque(maxlen=_MOST_STEPS)
        self.ended: deque[EndedRequest] = deque(maxlen=_MOST_STEPS)
        self.samples: deque[EngineSample] = deque(maxlen=_MOST_OTHERS)
        self.hosts: deque[HostSample] = deque(maxlen=_MOST_OTHERS)
        self.events: deque[Event] = deque(maxlen=_MOST_OTHERS)
        self.by_request_id: OrderedDict[str, EndedRequest] = OrderedDict()

    def take_in(self, gpus: Sequence[GpuSample]) -> None:
        """Add everything to the timeline."""
        timeline = self.timeline
        # Samples of the machine first: the timeline must not learn from steps of a slow machine.
        _each(self.hosts, timeline.host)
        for sample in gpus:
            timeline.gpu(sample.at, [sample])
        _each(self.samples, timeline.sample)
        _each(self.steps, timeline.step)
        _each(self.events, lambda event: timeline.died(event.at, event.kind.value))
        _each(self.ended, self._keep)

    def _keep(self, ended: EndedRequest) -> None:
        self.by_request_id[ended.request_id] = ended
        if len(self.by_request_id) > _MOST_ENDED:
            self.by_request_id.popitem(last=False)


def _each(items: deque[_Item], take: Callable[[_Item], None]) -> None:
    while items:
        take(items.popleft())


class _Waiting(NamedTuple):
    """A missed request, and the time by which all evidence about it should have come."""

    due_at: float
    number: int
    judged: JudgedRequest


class MissedRequests:
    """Explains the missed requests of all engines. A job calls `run`; any thread the other methods.

    Requests, samples and steps wait in memory until the next run. Requests that do not fit, or that
    were counted before the agent started, are read from the store.
    """

    def __init__(
        self,
        objectives: Iterable[Objective],
        engines: Collection[str],
        store: ExplanationStore,
        *,
        gpus: Callable[[str], Sequence[GpuSample]],
        on_explained: Callable[[Sequence[ExplainedRequest]], None] | None = None,
        all_came_s: float = ALL_CAME_S,
        give_way: Callable[[], None] | None = None,
    ) -> None:
        """`gpus` returns the newest samples of an engine's GPUs.

        `on_explained` gets the requests that had no explanation before. `all_came_s` after its end,
        a request is due: spans of other requests of that time have come. `give_way` is called
        before each run, before each REQUESTS_PER_TURN requests and before each write.
        """
        self._objectives = {objective.name: objective for objective in objectives}
        self._inboxes = {engine: _EngineInbox() for engine in engines}
        self._store = store
        self._gpus = gpus
        self._on_explained = on_explained
        self._all_came_s = all_came_s
        self._before_work = give_way
        self._counted: deque[JudgedRequest] = deque(maxlen=MOST_WAITING)
        self._waiting: list[_Waiting] = []
        self._numbers = count()
        self._left_over_at = 0.0
        # The timeline of engines that are not configured: it stays empty.
        self._unknown = EngineTimeline()

    def _give_way(self) -> None:
        if self._before_work is not None:
            self._before_work()

    @property
    def fill(self) -> float:
        """How full the queue of waiting requests is, from 0 to 1."""
        return max(len(self._counted), len(self._waiting)) / MOST_WAITING

    def lag_s(self, now: float) -> float:
        """Seconds for which the oldest request has waited after it was due; 0 without any."""
        ended = [waiting.judged.record.ended_at for waiting in list(self._waiting)]
        return max(now - min(ended, default=now) - self._all_came_s, 0.0)

    def counted(self, requests: Sequence[JudgedRequest]) -> None:
        """Queue counted requests: met ones teach what is usual, missed ones are explained."""
        self._counted.extend(requests)

    def on_sample(self, sample: EngineSample) -> None:
        """Queue a sample of an engine."""
        self._inboxes[sample.engine].samples.append(sample)

    def on_host(self, engine: str, sample: HostSample) -> None:
        """Queue a sample of an engine's machine."""
        self._inboxes[engine].hosts.append(sample)

    def on_event(self, event: Event) -> None:
        """Queue an event, if its kind ends requests."""
        if event.kind in _DEADLY and event.engine in self._inboxes:
            self._inboxes[event.engine].events.append(event)

    def on_step(self, step: EngineStep) -> None:
        """Queue a step of an engine's plugin."""
        self._inboxes[step.engine].steps.append(step)

    def on_ended(self, ended: EndedRequest) -> None:
        """Queue an ended request of an engine's plugin."""
        self._inboxes[ended.engine].ended.append(ended)

    def on_served(self, served: ServedRequest) -> None:
        """Queue the engine's figures of a request that a middleware saw."""
        for ended in served.choices:
            self.on_ended(ended)

    def run(self, now: float) -> None:
        """Explain and store requests that are due at a Unix time, MOST_AT_ONCE at most."""
        self._give_way()
        for engine, inbox in self._inboxes.items():
            inbox.take_in(self._gpus(engine))
        self._take_counted()
        due = self._due(now)
        if len(due) < MOST_AT_ONCE:
            due += self._left_over(now, MOST_AT_ONCE - len(due))
        for first in range(0, len(due), REQUESTS_PER_SLICE):
            self._explain(due[first : first + REQUESTS_PER_SLICE], now)

    def _take_counted(self) -> None:
        while self._counted:
            judged = self._counted.popleft()
            record, verdict = judged.record, judged.judgement.verdict
            inbox = self._inboxes.get(record.engine or "")
            if inbox is not None:
                inbox.timeline.request(record)
            if verdict is Verdict.MISSED and len(self._waiting) < MOST_WAITING:
                due_at = record.ended_at + self._all_came_s
                heapq.heappush(self._waiting, _Waiting(due_at, next(self._numbers), judged))

    def _due(self, now: float) -> list[JudgedRequest]:
        due: list[JudgedRequest] = []
        later: list[_Waiting] = []
        while self._waiting and self._waiting[0].due_at <= now and len(due) < MOST_AT_ONCE:
            waiting = heapq.heappop(self._waiting)
            record = waiting.judged.record
            came = self._timeline(record.engine).sampled.until >= record.ended_at
            if came or now >= record.ended_at + LONGEST_WAIT_S or record.engine is None:
                due.append(waiting.judged)
            else:
                later.append(waiting._replace(due_at=now + 1.0))
        for waiting in later:
            heapq.heappush(self._waiting, waiting)
        return due

    def _left_over(self, now: float, limit: int) -> list[JudgedRequest]:
        """Requests that wait in the store only: they ended too long ago to wait in memory."""
        if now < self._left_over_at:
            return []
        self._left_over_at = now + _LEFT_OVER_EVERY_S
        try:
            until = now - 2 * LONGEST_WAIT_S
            found = self._store.unexplained(now - _LEFT_OVER_FOR_S, until, limit)
        except StoreUnavailable as error:
            _LOG.warning("missed requests are explained later: %s", error)
            return []
        if len(found) == limit:
            self._left_over_at = now
        return found

    def _explain(self, due: Sequence[JudgedRequest], now: float) -> None:
        explained = []
        for number, judged in enumerate(due):
            if number % REQUESTS_PER_TURN == 0:
                self._give_way()
            explained.append(ExplainedRequest(judged, self._explained(judged)))
        self._give_way()
        try:
            first = self._store.explain(explained, now)
        except StoreUnavailable as error:
            _LOG.warning("%d explanations are made anew later: %s", len(explained), error)
        else:
            if self._on_explained is not None:
                self._on_explained(first)

    def _explained(self, judged: JudgedRequest) -> Explanation:
        record = judged.record
        try:
            return self._explain_one(judged)
        except Exception:
            # The other requests must still be explained.
            _LOG.exception("span %s of trace %s is unexplained", record.span_id, record.trace_id)
            return Explanation(record.trace_id, record.span_id, Cause.UNEXPLAINED, (), ())

    def _explain_one(self, judged: JudgedRequest) -> Explanation:
        record = judged.record
        missed = [
            self._objectives[name]
            for name, verdict in judged.judgement.by_objective
            if verdict is Verdict.MISSED and name in self._objectives
        ]
        return explain(record, missed, self._timeline(record.engine), self._ended(judged))

    def _timeline(self, engine: str | None) -> EngineTimeline:
        inbox = self._inboxes.get(engine or "")
        return self._unknown if inbox is None else inbox.timeline

    def _ended(self, judged: JudgedRequest) -> EndedRequest | None:
        record = judged.record
        inbox = self._inboxes.get(record.engine or "")
        if inbox is None:
            return None
        view = record.engine_view
        request_id = record.request_id if view is None else view.request_id
        return inbox.by_request_id.get(request_id or "")
