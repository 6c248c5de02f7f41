"""Keeps a session with the library, and opens a new one after a loss."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from agent.catalog.gpu_problems import GPU_MISSING
from agent.catalog.reasons import INTERNAL
from agent.records.gpu import GpuSample
from agent.sources.nvml.calls import Nvml, Rights
from agent.sources.nvml.library import OWN_LOSSES, NvmlUnavailable, binding
from agent.sources.nvml.session import Session
from agent.sources.nvml.xid_events import XidErrors

_LOG = logging.getLogger(__name__)

FIRST_WAIT_S = 1.0
# A new session interrupts the GPUs that are read, and loses their Xid errors meanwhile.
LONGEST_WAIT_S = 300.0

_EVENTS_LOST = "events_lost"


@dataclass(frozen=True, slots=True)
class SessionResult:
    """One read: samples, the reason by UUID for each known GPU without one, failures to count."""

    samples: tuple[GpuSample, ...]
    missing: Mapping[str, str]
    failures: tuple[str, ...]


class Lifecycle:
    """Keeps a session, and replaces it after a loss: at once, then after growing waits."""

    def __init__(self, xids: XidErrors, monotonic: Callable[[], float], wait_ms: int) -> None:
        self._xids = xids
        self._monotonic = monotonic
        self._event_wait_ms = wait_ms
        self._rights = Rights()
        self._session: Session | None = None
        self._trouble: NvmlUnavailable | None = None
        self._known: set[str] = set()
        # The losses that GPUs reported themselves, until they are read again.
        self._losses: dict[str, str] = {}
        # The reasons met since this session was tried, and those of the session before.
        self._met: set[str] = set()
        self._met_before: set[str] = set()
        self._unopened: Mapping[int, str] = {}
        self._failures: list[str] = []
        self._renew_at = -math.inf
        self._wait_s = FIRST_WAIT_S

    def read(self, now: float) -> SessionResult:
        """Read every GPU; `now` is Unix time."""
        at = self._monotonic()
        self._failures = []
        if at >= self._renew_at:
            self._renew()
        samples: list[GpuSample] = []
        try:
            if self._session is not None:
                # One by one: samples that were read before the driver went are good.
                for sample in self._session.samples(now):
                    samples.append(sample)  # noqa: PERF402
        except NvmlUnavailable as gone:
            self._lose(gone)
        missing = self._missing(samples)
        reasons = self._reasons(missing)
        self._plan(at, reasons)
        return SessionResult(tuple(samples), missing, (*reasons, *self._failures))

    def _count(self, reason: str) -> None:
        self._failures.append(reason)

    def _renew(self) -> None:
        self._renew_at = math.inf
        self._met, self._met_before = set(), self._met
        try:
            self.close()
            nvml = Nvml(binding(), self._rights, self._monotonic, self._count)
            self._session = Session(nvml, self._xids, self._event_wait_ms)
        except NvmlUnavailable as trouble:
            self._lose(trouble)
        except Exception as error:
            _LOG.exception("NVML could not be initialised for a reason inside the agent")
            self._lose(NvmlUnavailable(INTERNAL, repr(error)))
        else:
            if self._trouble is not None:
                _LOG.info("NVML works again")
            self._trouble = None
            if self._session.unopened != self._unopened:
                self._unopened = self._session.unopened
                _LOG.warning("GPUs that cannot be opened, by index: %s", self._unopened or "none")

    def _lose(self, trouble: NvmlUnavailable) -> None:
        if self._trouble is None or trouble.reason != self._trouble.reason:
            _LOG.warning("no GPU is read, and the agent goes on without: %s", trouble)
        self._trouble = trouble
        self.close()

    def _missing(self, samples: list[GpuSample]) -> dict[str, str]:
        read = {sample.gpu for sample in samples}
        self._known |= read
        problems = self._session.problems if self._session is not None else {}
        self._losses |= {gpu: word for gpu, word in problems.items() if word in OWN_LOSSES}
        self._losses = {gpu: loss for gpu, loss in self._losses.items() if gpu not in read}
        words = {**self._losses, **problems}
        reason = self._reason_for_the_rest()
        return {gpu: words.get(gpu, reason) for gpu in (self._known | problems.keys()) - read}

    def _reason_for_the_rest(self) -> str:
        if self._trouble is not None:
            return self._trouble.reason
        # A GPU that could not be opened has no UUID yet.
        unopened = self._session.unopened.values() if self._session is not None else ()
        return next(iter(unopened), GPU_MISSING)

    def _plan(self, at: float, reasons: tuple[str, ...]) -> None:
        """Set when to try a new session: later each time, and soon again after a new reason."""
        if not reasons or set(reasons) - self._met - self._met_before:
            self._renew_at, self._wait_s = math.inf, FIRST_WAIT_S
        self._met.update(reasons)
        if reasons and self._renew_at == math.inf:
            self._renew_at = at + self._wait_s
            self._wait_s = min(2 * self._wait_s, LONGEST_WAIT_S)

    def _reasons(self, missing: Mapping[str, str]) -> tuple[str, ...]:
        """Why a GPU or its Xid errors are missing, each reason once."""
        reasons = {*missing.values()}
        if self._trouble is not None:
            reasons.add(self._trouble.reason)
        if self._session is not None:
            reasons.update(self._session.unopened.values())
            if self._session.events_failed:
                reasons.add(_EVENTS_LOST)
        return tuple(sorted(reasons))

    def close(self) -> None:
        """End the session."""
        session, self._session = self._session, None
        if session is not None:
            session.close()
