"""Which engines get new requests, as the agent and the proxy's workers report to each other."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from agent.analysis.failures.progress import computes, progress_of
from agent.catalog import metrics as m
from agent.catalog.engine_facts import OUTPUT_TOKENS
from agent.catalog.reasons import EjectionReason
from agent.outputs.prometheus.meter import Meter
from agent.records.engine import EngineSample
from agent.records.event import Confidence, Event, EventKind
from agent.settings import EngineSettings
from agent.settings.settings_model import ProxySettings
from agent.sources.engines.engine_source import ScrapeResult
from agent.sources.proxy.handover.messages import EjectedEngine, EngineState, Rotation
from agent.sources.proxy.load_balancer import LoadBalancer
from agent.sources.proxy.outlier_detection import OutlierDetection, OutlierLimits

# Events of these kinds take an engine out of the rotation.
_FAILED = frozenset(
    {
        EventKind.HOST_OOM,
        EventKind.CUDA_OOM,
        EventKind.SIZING_ERROR,
        EventKind.GPU_FAULT,
        EventKind.ENGINE_DEAD,
        EventKind.HANG,
    }
)
# A worker that starts later must not act on an event that is over.
_NEWS_FOR_S = 30.0
_SERVER_ERROR = 500
# An engine that answered so lately does not hang, whatever its metrics say.
_AWAKE_S = 10.0


class EngineNews:
    """What polls found that the proxy needs to know of each engine. Safe to use from threads."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._unhealthy: set[str] = set()
        self._events: dict[str, tuple[str, float]] = {}
        self._samples: dict[str, EngineSample] = {}
        self._computed_at: dict[str, float] = {}

    def reading_health(
        self, engine: str, read: Callable[[], int | None]
    ) -> Callable[[], int | None]:
        """Return a `read` of the health check's HTTP status that lets this learn it."""

        def learn() -> int | None:
            status = read()
            failed = status is not None and status >= _SERVER_ERROR
            with self._lock:
                (self._unhealthy.add if failed else self._unhealthy.discard)(engine)
            return status

        return learn

    def scraped(self, engine: str, result: ScrapeResult) -> None:
        """Learn whether an engine computed since its last sample."""
        sample = result.sample
        if sample is None:
            return
        with self._lock:
            if _computed(self._samples.get(engine), sample):
                self._computed_at[engine] = sample.at
            self._samples[engine] = sample

    def also_to(self, on_event: Callable[[Event], None]) -> Callable[[Event], None]:
        """Return an `on_event` that lets this learn the event, too."""

        def learn(event: Event) -> None:
            on_event(event)
            self._learn(event)

        return learn

    def _learn(self, event: Event) -> None:
        sure = event.confidence is not Confidence.SUSPECTED
        if event.engine is None or not sure:
            return
        if event.kind in _FAILED or event.kind is EventKind.RESTART:
            with self._lock:
                self._events[event.engine] = str(event.kind), event.at

    def state(self, engine: str, *, up: bool, models: frozenset[str] | None) -> EngineState:
        """Return what the workers get; `up` is whether the engine sends metrics."""
        with self._lock:
            event = self._events.get(engine)
            if event is not None and self._now() - event[1] > _NEWS_FOR_S:
                event = None
            healthy = up and engine not in self._unhealthy
            return EngineState(healthy, models, event, self._computed_at.get(engine))


def _computed(before: EngineSample | None, after: EngineSample) -> bool:
    if progress_of(after) is not None:
        return computes(before, after)
    then = None if before is None else before.fact(OUTPUT_TOKENS.name)
    now = after.fact(OUTPUT_TOKENS.name)
    return then is not None and now is not None and now > then


def outlier_detection(
    settings: ProxySettings, engines: Sequence[EngineSettings]
) -> OutlierDetection:
    """Return the outlier detection of the engines behind the proxy; None for a single one."""
    of, usual = settings.outlier_detection, OutlierLimits()
    # The agent shows only at each scrape that an engine computes.
    scrapes_s = 3 * max((engine.scrape_interval for engine in engines), default=0.0)
    limits = replace(
        usual,
        failures=of.failures,
        base_s=of.ejection,
        max_s=max(of.ejection, of.max_ejection),
        silent_s=max(usual.silent_s, scrapes_s),
    )
    judged = [engine.name for engine in engines] if of.enabled and len(engines) > 1 else []
    return OutlierDetection(judged, limits)


class WorkerRotation:
    """A worker's side: acts on what the agent knows, and reports what the worker found."""

    def __init__(
        self,
        outliers: OutlierDetection,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._outliers = outliers
        self._now = now
        self._monotonic = monotonic
        self._states: Mapping[str, EngineState] = {}

    def models(self, engine: str) -> frozenset[str] | None:
        """Return the models of an engine; None while they are unknown."""
        state = self._states.get(engine)
        return None if state is None else state.models

    def healthy(self, engine: str) -> bool:
        """Return whether an engine is healthy; it is until the agent says otherwise."""
        state = self._states.get(engine)
        return state is None or state.healthy

    def learn(self, states: Mapping[str, EngineState]) -> None:
        """Take what the agent knows now."""
        now_s = self._monotonic()
        for name, state in states.items():
            before = self._states.get(name)
            if state.healthy and before is not None and not before.healthy:
                self._outliers.recovered(name, now_s)
            if state.event is not None and (before is None or before.event != state.event):
                self._act_on(name, state.event[0], now_s)
            if state.computed_at != (before and before.computed_at):
                self._outliers.progressed(name, now_s)
        self._states = states

    def _act_on(self, engine: str, event: str, now_s: float) -> None:
        if event == EventKind.RESTART:
            self._outliers.recovered(engine, now_s)
        elif event != EventKind.HANG or not self._outliers.answered(engine, now_s - _AWAKE_S):
            self._outliers.eject(engine, EjectionReason.EVENT, now_s, event)

    def report(self, balancer: LoadBalancer) -> Rotation:
        """Return the engines that are out, and the counts since the last report."""
        now_s = self._monotonic()
        behind_s = self._now() - now_s
        out = {
            name: EjectedEngine(
                reason=each.reason,
                detail=each.detail,
                since=each.since_s + behind_s,
                for_s=each.until_s - each.at_s,
                over=each.until_s <= now_s,
            )
            for name, each in self._outliers.ejections.items()
        }
        ejections: dict[str, dict[str, int]] = {}
        for (name, reason), count in self._outliers.ejected.items():
            ejections.setdefault(name, {})[reason] = count
        responses = [(*of, count) for of, count in balancer.responses.items()]
        retried = dict(balancer.retried)
        report = Rotation(out, ejections, retried, balancer.forced, responses)
        balancer.responses.clear()
        self._outliers.ejected.clear()
        balancer.retried.clear()
        balancer.forced = 0
        return report


@dataclass(frozen=True, slots=True)
class _Out:
    """An engine that at least one worker sends no new requests, since a Unix time."""

    reason: str
    detail: str | None
    since: float
    for_s: float | None


class ProxyRotation:
    """The agent's side: publishes what its workers report, and events when it changes."""

    def __init__(
        self,
        engines: Sequence[str],
        meter: Meter,
        *,
        rotations: Callable[[], Sequence[Rotation]],
        healthy: Callable[[str], bool],
        on_event: Callable[[Event], None],
    ) -> None:
        """`rotations` are those of the workers that are connected."""
        self._engines = engines
        self._meter = meter
        self._rotations = rotations
        self._healthy = healthy
        self._on_event = on_event
        self._out: dict[str, _Out] = {}
        # An engine that starts together with the agent did not leave the rotation.
        self._was_in: set[str] = set()
        self._reported: set[str] = set()
        meter.count(m.PROXY_FORCED, by=0)
        for engine in engines:
            meter.gauge(m.PROXY_IN_ROTATION, partial(self._share, engine), engine)
            meter.count(m.PROXY_RETRIED, engine, by=0)
            for reason in EjectionReason:
                meter.count(m.PROXY_EJECTIONS, engine, reason, by=0)

    def why_out(self, engine: str) -> str | None:
        """Return why an engine gets no new requests, such as `error 500`; None if it gets them."""
        out = self._out.get(engine)
        return None if out is None else " ".join(filter(None, (out.reason, out.detail)))

    def count(self, rotation: Rotation) -> None:
        """Count what a worker counted."""
        for engine, by_reason in rotation.ejections.items():
            for reason, count in by_reason.items():
                self._meter.count(m.PROXY_EJECTIONS, engine, reason, by=count)
        for engine, count in rotation.retried.items():
            self._meter.count(m.PROXY_RETRIED, engine, by=count)
        self._meter.count(m.PROXY_FORCED, by=rotation.forced)

    def watch(self, now: float) -> None:
        """Report the engines that left the rotation or came back; `now` is Unix time."""
        rotations = self._rotations()
        for engine in self._engines if rotations else ():
            before, out = self._out.get(engine), self._now_out(engine, rotations, now)
            if out is not None:
                self._out[engine] = out
                if before is None:
                    self._left(engine, out)
                continue
            self._was_in.add(engine)
            if before is not None:
                del self._out[engine]
                self._returned(engine, before, now)

    def _now_out(self, engine: str, rotations: Sequence[Rotation], now: float) -> _Out | None:
        found = next((r.out[engine] for r in rotations if engine in r.out), None)
        if found is not None:
            return _Out(found.reason, found.detail, found.since, found.for_s)
        if self._healthy(engine):
            return None
        before = self._out.get(engine)
        return _Out(EjectionReason.UNHEALTHY, None, before.since if before else now, None)

    def _left(self, engine: str, out: _Out) -> None:
        if out.reason == EjectionReason.UNHEALTHY:
            if engine not in self._was_in:
                return
            self._meter.count(m.PROXY_EJECTIONS, engine, out.reason)
        self._reported.add(engine)
        evidence = {"reason": out.reason, "detail": out.detail, "for_s": out.for_s}
        self._report(EventKind.ENGINE_EJECTED, engine, out.since, evidence)

    def _returned(self, engine: str, before: _Out, now: float) -> None:
        if engine in self._reported:
            self._reported.discard(engine)
            out_s = now - before.since
            evidence = {"reason": before.reason, "detail": before.detail, "out_s": out_s}
            self._report(EventKind.ENGINE_RETURNED, engine, now, evidence)

    def _report(
        self, kind: EventKind, engine: str, at: float, evidence: Mapping[str, str | float | None]
    ) -> None:
        self._on_event(
            Event(
                at=at,
                engine=engine,
                kind=kind,
                confidence=Confidence.CERTAIN,
                evidence={name: value for name, value in evidence.items() if value is not None},
            )
        )

    def _share(self, engine: str) -> float | None:
        """The share of workers that send an engine new requests, if only as probes."""
        rotations = self._rotations()
        if not rotations:
            return None
        if not self._healthy(engine):
            return 0.0
        inside = [r for r in rotations if engine not in r.out or r.out[engine].over]
        return len(inside) / len(rotations)
