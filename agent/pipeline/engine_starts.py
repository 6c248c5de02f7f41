"""Follows the starts of engines: one event for each, with its phases and its first request."""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent.analysis.engine_starts import phases_s
from agent.catalog.engine_facts import OUTPUT_TOKENS, TIME_TO_FIRST_TOKEN
from agent.catalog.time_units import HOUR_S
from agent.records.engine import EngineSample, LoadingSpan
from agent.records.event import Confidence, Event, EventKind
from agent.records.objective import JudgedRequest

# Engines export their spans every few seconds.
SPANS_COME_S = 15.0
# A start whose first request comes later is reported without it.
FIRST_REQUEST_WITHIN_S = 300.0
# Older spans are of an earlier start, or of a clock that is wrong.
_MOST_START_S = 2 * HOUR_S
# A start with 16 workers sends some 200.
_MOST_SPANS = 1000
# An engine that has served requests at its first sample, and began so long before the agent looked
# for it, did not start now: only the agent could not reach it.
_BEGAN_BEFORE_S = 60.0


@dataclass(slots=True)
class _Start:
    """A start that is not reported yet. Unix times."""

    began_at: float | None
    ready_at: float
    first_token_at: float | None = None

    def is_complete(self, now: float) -> bool:
        """Whether its spans and its first request should have come."""
        ready_s = now - self.ready_at
        waits = self.first_token_at is None and ready_s < FIRST_REQUEST_WITHIN_S
        return ready_s >= SPANS_COME_S and not waits


class StartWatch:
    """Follows the starts of one engine. Several threads may call it."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._spans: deque[LoadingSpan] = deque(maxlen=_MOST_SPANS)
        self._start: _Start | None = None
        self._first_poll_at: float | None = None
        self._sampled = False
        # The phases of the last start, without those that are unknown.
        self.last_s: Mapping[str, float] = {}

    def loading(self, span: LoadingSpan) -> None:
        """Keep a span that the engine sent while it loaded."""
        with self._lock:
            self._spans.append(span)

    def served(self, first_token_at: float) -> None:
        """Learn when a request had its first token."""
        with self._lock:
            start = self._start
            if start is not None and first_token_at >= (start.began_at or start.ready_at):
                start.first_token_at = min(first_token_at, start.first_token_at or first_token_at)

    def poll(self, sample: EngineSample | None, at: float, *, restarted: bool) -> Event | None:
        """The event of the start that is complete with this poll, which read this sample."""
        with self._lock:
            polled_before, self._first_poll_at = self._first_poll_at, self._first_poll_at or at
            if sample is None:
                return self._complete(at)
            begins = polled_before is not None and (restarted or self._is_first_start(sample))
            self._sampled = True
            ended = self._report() if begins and self._start is not None else None
            if begins:
                self._start = _Start(began_at=sample.process_started_at, ready_at=at)
            if self._start is not None and _has_served(sample):
                self._start.first_token_at = self._start.first_token_at or at
            return ended or self._complete(at)

    def _is_first_start(self, sample: EngineSample) -> bool:
        """Whether the engine started while the agent could not reach it yet."""
        if self._sampled or self._first_poll_at is None:
            return False
        began_at = sample.process_started_at
        late = began_at is not None and began_at >= self._first_poll_at - _BEGAN_BEFORE_S
        return late or not _has_served(sample)

    def _complete(self, at: float) -> Event | None:
        return self._report() if self._start is not None and self._start.is_complete(at) else None

    def _report(self) -> Event:
        start, self._start = self._start, None
        assert start is not None, "only a start is reported"
        oldest_at = start.ready_at - _MOST_START_S
        spans = [span for span in self._spans if span.began_at >= oldest_at]
        phases = self.last_s = phases_s(spans, start.began_at, start.ready_at)
        self._spans.clear()
        began_at = start.began_at
        if began_at is None and phases:
            began_at = start.ready_at - sum(phases.values())
        since = {"start_s": start.ready_at, "first_request_s": start.first_token_at}
        evidence: dict[str, float] = {} if began_at is None else {"began_at": began_at}
        for name, moment in since.items():
            if moment is not None and began_at is not None:
                evidence[name] = moment - began_at
        evidence |= {f"{phase}_s": seconds for phase, seconds in phases.items()}
        return Event(
            at=start.ready_at,
            engine=self._engine,
            kind=EventKind.STARTED,
            confidence=Confidence.CERTAIN,
            evidence=evidence,
        )


def _has_served(sample: EngineSample) -> bool:
    histogram = sample.histograms.get(TIME_TO_FIRST_TOKEN.name)
    first_tokens = 0.0 if histogram is None else histogram.counts[-1]
    return first_tokens > 0 or (sample.fact(OUTPUT_TOKENS.name) or 0) > 0


class EngineStarts:
    """Makes the watch of each engine, and gives spans and requests to it."""

    def __init__(self) -> None:
        self._watches: dict[str, StartWatch] = {}

    def of(self, engine: str) -> StartWatch:
        """Return a new watch of an engine."""
        watch = self._watches[engine] = StartWatch(engine)
        return watch

    def last_s(self, engine: str) -> Mapping[str, float]:
        """The seconds of each phase of an engine's last start; empty if none was seen."""
        return self._watches[engine].last_s

    def loading(self, spans: Sequence[LoadingSpan]) -> None:
        """Take spans of engines that load."""
        for span in spans:
            if (watch := self._watches.get(span.engine)) is not None:
                watch.loading(span)

    def counted(self, requests: Sequence[JudgedRequest]) -> None:
        """Take requests that were counted."""
        for item in requests:
            record = item.record
            if record.engine is not None and record.ttft_s is not None:
                watch = self._watches.get(record.engine)
                if watch is not None:
                    watch.served(record.started_at + record.ttft_s)
