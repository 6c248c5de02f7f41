"""Takes failing engines out of the rotation and back in, as Envoy's outlier detection does.

A state machine without I/O. All times are seconds on one monotonic clock.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from agent.catalog.reasons import EjectionReason

# Of so many requests that ended last, half failed: the engine fails, though not in a row.
_RECENT = 20
_MAX_DOUBLINGS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlierLimits:
    """When an engine is ejected, and for how long.

    `failures` is the number of failed requests in a row, of pauses in a row, and of requests that
    a silent engine left unanswered while others answered as many later ones. The first ejection
    lasts `base_s`, each further one twice as long, up to `max_s`. A silent engine gets no new
    requests after `hold_s`, and is ejected after `silent_s`.
    """

    failures: int = 3
    base_s: float = 10.0
    max_s: float = 120.0
    pause_s: float = 1.0
    max_pause_s: float = 60.0
    hold_s: float = 2.0
    silent_s: float = 15.0


@dataclass(frozen=True, slots=True)
class Ejection:
    """An engine's time out of the rotation. It gets no request until `until_s`, then a probe.

    It left the rotation at `since_s`; `at_s` is when the current time-out began. `detail` names the
    HTTP status or the event.
    """

    reason: EjectionReason
    detail: str | None
    since_s: float
    at_s: float
    until_s: float


@dataclass(slots=True)
class _Engine:
    """What is known of one engine. `sent_since_s` is when the first request after its last byte
    was sent; `unanswered` counts these requests, `overtaken` later ones that others answered."""

    failures: int = 0
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=_RECENT))
    pauses: int = 0
    paused_until_s: float = -math.inf
    ejection: Ejection | None = None
    ejections: int = 0
    returned_s: float = -math.inf
    good_s: float = -math.inf
    probing: bool = False
    sent_since_s: float | None = None
    unanswered: int = 0
    overtaken: int = 0

    def forget(self) -> None:
        """Begin to judge it anew."""
        self.failures = self.pauses = 0
        self.recent.clear()
        self.probing = False
        self.answer()

    def answer(self) -> None:
        """Note that it is not silent."""
        self.sent_since_s, self.unanswered, self.overtaken = None, 0, 0

    def silent(self, for_s: float, limits: OutlierLimits, now_s: float) -> bool:
        """Whether it has sent nothing for this time, while others answered later requests."""
        return (
            self.sent_since_s is not None
            and now_s - self.sent_since_s >= for_s
            and min(self.unanswered, self.overtaken) >= limits.failures
        )


class OutlierDetection:
    """Judges engines by how their requests end. Engines that it does not know are always in.

    `ejected` counts ejections by engine and reason; its owner may clear it.
    """

    def __init__(self, engines: Iterable[str], limits: OutlierLimits) -> None:
        self._limits = limits
        self._engines = {name: _Engine() for name in engines}
        self.ejected: Counter[tuple[str, EjectionReason]] = Counter()

    @property
    def ejections(self) -> Mapping[str, Ejection]:
        """The engines that are out of the rotation, also those that await a probe."""
        return {name: e.ejection for name, e in self._engines.items() if e.ejection is not None}

    # What the load balancer needs

    def is_in(self, name: str, now_s: float) -> bool:
        """Whether an engine gets new requests: not ejected, not paused, not silent."""
        engine = self._engines.get(name)
        return engine is None or (
            engine.ejection is None
            and engine.paused_until_s <= now_s
            and not engine.silent(self._limits.hold_s, self._limits, now_s)
        )

    def is_due(self, name: str, now_s: float) -> bool:
        """Whether an ejected engine may get a probe: its time is over, and no probe is open."""
        engine = self._engines.get(name)
        return (
            engine is not None
            and engine.ejection is not None
            and not engine.probing
            and max(engine.ejection.until_s, engine.paused_until_s) <= now_s
        )

    def begin(self, name: str, now_s: float) -> bool:
        """Note that a request goes to an engine; returns whether it is the probe."""
        if not self.is_due(name, now_s):
            return False
        self._engines[name].probing = True
        return True

    # How requests go on and end

    def sent(self, name: str, now_s: float) -> None:
        """Note that an engine got a request."""
        engine = self._engines.get(name)
        if engine is None:
            return
        if engine.sent_since_s is None:
            engine.sent_since_s = now_s
        engine.unanswered += 1

    def progressed(self, name: str, at_s: float) -> None:
        """Note that an engine sent a byte of a response, or computed, at this time."""
        engine = self._engines.get(name)
        if engine is None:
            return
        ejection = engine.ejection
        if ejection is not None and ejection.reason is EjectionReason.SILENT:
            if at_s >= ejection.at_s:
                self._return(engine, at_s)
        elif engine.sent_since_s is not None and at_s >= engine.sent_since_s:
            engine.answer()

    def refused(self, name: str) -> None:
        """Note that a request got an error at once, which does not show that the model runs."""
        engine = self._engines.get(name)
        if engine is not None and engine.unanswered:
            engine.unanswered -= 1
            if not engine.unanswered:
                engine.answer()

    def succeeded(self, name: str, sent_s: float, now_s: float) -> None:
        """Note a good response to a request of `sent_s`. It ends an ejection before that time."""
        engine = self._engines.get(name)
        if engine is None:
            return
        for other in self._engines.values():
            if other.sent_since_s is not None and sent_s >= other.sent_since_s:
                other.overtaken += 1
        self.progressed(name, now_s)
        if engine.ejection is not None:
            if sent_s < engine.ejection.at_s:
                return
            self._return(engine, now_s)
        engine.failures = engine.pauses = 0
        engine.good_s = now_s
        engine.recent.append(True)

    def failed(
        self,
        name: str,
        reason: EjectionReason,
        now_s: float,
        *,
        probe: bool = False,
        detail: str | None = None,
    ) -> None:
        """Note a failed request. Of an ejected engine, the probe's failure alone counts."""
        engine = self._engines.get(name)
        if engine is None:
            return
        if engine.ejection is not None:
            if probe:
                self._eject(name, engine, reason, now_s, detail)
            return
        engine.failures += 1
        engine.recent.append(False)
        often = len(engine.recent) == _RECENT and 2 * sum(engine.recent) <= _RECENT
        if often or engine.failures >= self._limits.failures:
            self._eject(name, engine, reason, now_s, detail)

    def throttled(
        self, name: str, for_s: float | None, now_s: float, *, probe: bool = False, busy: bool
    ) -> None:
        """Note a 429 or, if `busy`, a 503: the engine gets no request for a time.

        A 429 without a time is not a pause. An engine that answers each pause's end with another
        503 is ejected.
        """
        engine = self._engines.get(name)
        if engine is None:
            return
        again = engine.paused_until_s <= now_s
        if for_s is not None or busy:
            asked_s = self._limits.pause_s if for_s is None else for_s
            until_s = now_s + min(max(asked_s, 0.0), self._limits.max_pause_s)
            engine.paused_until_s = max(engine.paused_until_s, until_s)
        if engine.ejection is not None:
            if probe:
                self._eject(name, engine, EjectionReason.UNAVAILABLE, now_s, None)
        elif busy and again:
            engine.pauses += 1
            if engine.pauses >= self._limits.failures:
                self._eject(name, engine, EjectionReason.UNAVAILABLE, now_s, "503")

    def abandoned(self, name: str, now_s: float) -> None:
        """Note a probe that ended undecided, as its client left: another one follows later."""
        engine = self._engines.get(name)
        if engine is not None and engine.ejection is not None and engine.probing:
            engine.probing = False
            until_s = now_s + self._limits.base_s
            engine.ejection = replace(engine.ejection, at_s=now_s, until_s=until_s)

    def check(self, now_s: float) -> None:
        """Eject the engines that are silent for too long."""
        for name, engine in self._engines.items():
            if engine.ejection is None and engine.silent(
                self._limits.silent_s, self._limits, now_s
            ):
                self._eject(name, engine, EjectionReason.SILENT, now_s, None)

    def hangs(self, sent_s: float, now_s: float) -> bool:
        """Whether a probe of `sent_s` without a byte of its response has failed."""
        return now_s - sent_s >= self._limits.silent_s

    # What the agent knows

    def eject(self, name: str, reason: EjectionReason, now_s: float, detail: str) -> None:
        """Eject an engine, unless it is out."""
        engine = self._engines.get(name)
        if engine is not None and engine.ejection is None:
            self._eject(name, engine, reason, now_s, detail)

    def recovered(self, name: str, now_s: float) -> None:
        """Let an engine get a probe now: it restarted, or its health check is good again."""
        engine = self._engines.get(name)
        if engine is not None and engine.ejection is not None:
            until_s = min(engine.ejection.until_s, now_s)
            engine.ejection = replace(engine.ejection, until_s=until_s)

    def answered(self, name: str, since_s: float) -> bool:
        """Whether an engine gave a good response since this time."""
        engine = self._engines.get(name)
        return engine is not None and engine.good_s >= since_s

    def _eject(
        self,
        name: str,
        engine: _Engine,
        reason: EjectionReason,
        now_s: float,
        detail: str | None,
    ) -> None:
        limits, before = self._limits, engine.ejection
        if before is None and now_s - engine.returned_s > limits.max_s:
            engine.ejections = 0
        for_s = min(limits.base_s * 2.0 ** min(engine.ejections, _MAX_DOUBLINGS), limits.max_s)
        engine.ejections += 1
        since_s = now_s if before is None else before.since_s
        engine.ejection = Ejection(reason, detail, since_s, now_s, now_s + for_s)
        engine.forget()
        self.ejected[name, reason] += 1

    def _return(self, engine: _Engine, now_s: float) -> None:
        engine.ejection, engine.returned_s = None, now_s
        engine.forget()
