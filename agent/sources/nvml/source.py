"""The source of GPU samples that reads NVML, in sessions with the library.

A session lasts from initialisation to shutdown; after a loss a new one begins.
"""

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from agent.catalog.gpu_problems import GPU_MISSING, GPU_UNOPENED, INIT_FAILED, NO_GPU, NOT_ANSWERING
from agent.catalog.reasons import INTERNAL
from agent.errors import AgentError
from agent.records.gpu import GpuSample, GpuSamples
from agent.sources.nvml.library import (
    INVALID_ARGUMENT,
    NO_PERMISSION,
    OWN_LOSSES,
    REASONS,
    GpuLost,
    Meaning,
    Nvml,
    NvmlUnavailable,
    Rights,
    binding,
    meaning_of,
    unavailable,
)
from agent.sources.nvml.nvml_gpu import Gpu, Identity
from agent.sources.nvml.xid_events import XidErrors, XidListener

_LOG = logging.getLogger(__name__)


class Session:
    """An initialised library and the GPUs that it shows. A fault of one GPU affects no other.

    `problems` has the reasons why GPUs are not read, by UUID: those that were lost since.
    `unopened` has the reasons why GPUs could not be opened at all, by index.
    """

    def __init__(self, nvml: Nvml, xids: XidErrors, wait_ms: int) -> None:
        """Initialise it and find the GPUs. Raises NvmlUnavailable, also if there is no GPU."""
        self._nvml = nvml
        self._xids = xids
        self.problems: dict[str, str] = {}
        self.unopened: dict[int, str] = {}
        self._refusals: set[int] = set()
        self._listener: XidListener | None = None
        self._no_listener = False
        self._gpus: list[Gpu] = []
        try:
            nvml.binding.nvmlInit()
        except nvml.binding.NVMLError as error:
            raise unavailable(error, "NVML cannot be initialised") from error
        try:
            self._find()
            self._listen(wait_ms)
        except BaseException:
            self.close()
            raise

    @property
    def events_failed(self) -> bool:
        """Whether Xid errors get lost that the driver could report."""
        return self._no_listener or (self._listener is not None and self._listener.failed)

    def _find(self) -> None:
        binding = self._nvml.binding
        try:
            count = binding.nvmlDeviceGetCount()
        except binding.NVMLError as error:
            raise unavailable(error, "the GPUs cannot be counted") from error
        for index in range(count):
            self._open(index)
        if not self._gpus:
            seen = f"none of {count} GPUs answers" if count else "no GPU is visible"
            raise NvmlUnavailable(
                self._reason_for_none(),
                f"NVML works, but {seen}; in a container, set NVIDIA_VISIBLE_DEVICES",
            )

    def _reason_for_none(self) -> str:
        """Why no GPU is there: a code that all GPUs return alike is about the driver."""
        if INTERNAL in self.unopened.values():
            return INTERNAL
        # The code of a GPU that belongs to another container says nothing about the driver.
        codes = self._refusals - {NO_PERMISSION} or self._refusals
        if len(codes) != 1 or self.problems:
            return NO_GPU
        (code,) = codes
        return NO_GPU if meaning_of(code) is Meaning.GPU_GONE else REASONS.get(code, INIT_FAILED)

    def _open(self, index: int) -> None:
        binding = self._nvml.binding
        try:
            handle = binding.nvmlDeviceGetHandleByIndex(index)
            uuid = binding.nvmlDeviceGetUUID(handle)
            name = binding.nvmlDeviceGetName(handle)
            self._prepare(Identity(uuid=uuid, index=index, name=name), handle)
        except binding.NVMLError as error:
            if meaning_of(error.value) is Meaning.DRIVER_GONE:
                raise unavailable(error, f"GPU {index} cannot be opened") from error
            self._leave_out(index, error.value)
        except NvmlUnavailable:
            raise
        except Exception:
            _LOG.exception("GPU %d could not be opened for a reason inside the agent", index)
            self.unopened[index] = INTERNAL

    def _prepare(self, identity: Identity, handle: Any) -> None:
        try:
            self._gpus.append(Gpu(self._nvml, identity, handle, self._xids.facts))
        except GpuLost as lost:
            self.problems[identity.uuid] = lost.reason

    def _leave_out(self, index: int, code: int) -> None:
        self._refusals.add(code)
        match meaning_of(code):
            case Meaning.FORBIDDEN:
                # A GPU of another container: no failure.
                self._nvml.rights.missing(f"with index {index}", "nvmlDeviceGetHandleByIndex")
            case Meaning.GPU_GONE:
                self.unopened[index] = REASONS[code]
            case _:
                # Others can be opened, so this is the GPU's fault, whatever the code means.
                self.unopened[index] = GPU_UNOPENED

    def _listen(self, wait_ms: int) -> None:
        try:
            self._listener = XidListener(self._nvml.binding, self._xids, wait_ms)
        except self._nvml.binding.NVMLError as error:
            _LOG.warning("Xid errors are not reported: NVML gives no events (%s)", error)
            lasting = (Meaning.UNSUPPORTED, Meaning.FORBIDDEN)
            lasts = meaning_of(error.value) in lasting or error.value == INVALID_ARGUMENT
            self._no_listener = not lasts
            return
        self._listener.start(self._gpus)

    def samples(self, now: float) -> Iterator[GpuSample]:
        """A sample of each GPU that can be read. Raises NvmlUnavailable without a driver."""
        for gpu in list(self._gpus):
            sample = self._read(gpu, now)
            if sample is not None:
                yield sample

    def _read(self, gpu: Gpu, now: float) -> GpuSample | None:
        uuid = gpu.identity.uuid
        try:
            sample = gpu.read(now)
        except GpuLost as lost:
            self.problems[uuid] = lost.reason
            self._gpus.remove(gpu)
            self._quietly(gpu.close)
        except NvmlUnavailable:
            raise
        except Exception:
            if self.problems.get(uuid) != INTERNAL:
                _LOG.exception("GPU %s could not be read for a reason inside the agent", uuid)
            self.problems[uuid] = INTERNAL
        else:
            self.problems.pop(uuid, None)
            return sample
        return None

    def close(self) -> None:
        """Free everything and shut the library down, as far as it still answers."""
        for gpu in self._gpus:
            self._quietly(gpu.close)
        if self._listener is not None and self._quietly(self._listener.stop) is False:
            # A shutdown under a running call could end this process.
            _LOG.warning("the driver does not end its wait for events; NVML is not shut down")
            return
        self._quietly(self._nvml.binding.nvmlShutdown)

    def _quietly(self, step: Callable[[], Any]) -> Any:
        """The value of the step, or None if it failed, as it may after a loss."""
        try:
            return step()
        except (self._nvml.binding.NVMLError, AgentError) as error:
            _LOG.debug("a step of the shutdown failed: %s", error)
            return None


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


Result = TypeVar("Result")


class NvmlSource:
    """Reads all GPUs that NVML shows. `read` raises nothing; it must not run twice at once.

    NVML is called on a thread of its own. A read waits `timeout_s` for it. A result that comes
    later is returned by the next read. Xid errors arrive on a third thread and wait for the next
    read, also while the driver does not answer.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        timeout_s: float = 2.0,
        event_wait_ms: int = 500,
    ) -> None:
        self._timeout_s = timeout_s
        self._xids = XidErrors(clock)
        self._lifecycle = Lifecycle(self._xids, monotonic, event_wait_ms)
        self._worker = Worker("nvml")
        self._pending: Future[SessionResult] | None = None
        self._known: dict[str, GpuSample] = {}
        self._closed = False

    def read(self, now: float) -> GpuSamples:
        """Read every GPU once; `now` is Unix time."""
        if self._closed:
            return GpuSamples()
        try:
            result = self._result(now)
        except Exception:
            # A driver can answer in ways that no code here expects; the other reads must go on.
            _LOG.exception("the read of the GPUs failed inside the agent")
            result = self._all_missing(INTERNAL)
        samples = [*result.samples]
        for sample in samples:
            before = self._known.get(sample.gpu)
            if before is not None and before.problem is not None:
                _LOG.info("GPU %s (index %d) is read again", sample.gpu, sample.index)
        samples += [
            self._unread(self._known[gpu], reason, now)
            for gpu, reason in result.missing.items()
            if gpu in self._known
        ]
        self._known |= {sample.gpu: sample for sample in samples}
        return GpuSamples(tuple(samples), self._xids.take(), result.failures)

    def _result(self, now: float) -> SessionResult:
        late = self._pending is not None
        if self._pending is None:
            self._pending = self._worker.submit(partial(self._lifecycle.read, now))
        try:
            result = self._pending.result(0 if late else self._timeout_s)
        except TimeoutError:
            if not late:
                _LOG.warning(
                    "NVML has not answered for %.1f s; the GPUs are unknown until it does",
                    self._timeout_s,
                )
            return self._all_missing(NOT_ANSWERING)
        except BaseException:
            self._pending = None
            raise
        self._pending = None
        if late:
            _LOG.info("NVML answers again")
        return result

    def _all_missing(self, reason: str) -> SessionResult:
        return SessionResult((), dict.fromkeys(self._known, reason), (reason,))

    def _unread(self, before: GpuSample, reason: str, now: float) -> GpuSample:
        if before.problem != reason:
            _LOG.warning("GPU %s (index %d) cannot be read: %s", before.gpu, before.index, reason)
        return before.unread(now, reason, self._xids.facts(before.gpu))

    def close(self) -> None:
        """Shut NVML down, waiting no longer than a read does."""
        if self._closed:
            return
        self._closed = True
        ended = self._worker.submit(self._lifecycle.close)
        self._worker.close()
        try:
            ended.result(self._timeout_s)
        except TimeoutError:
            _LOG.warning("NVML does not answer and is not shut down")


class Worker:
    """Runs tasks one by one on a thread. A task that hangs blocks neither its caller nor exit."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        # Not an executor: its threads are joined at exit, and a hanging driver would block that.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], Result]) -> Future[Result]:
        """The task's result or error, once it is done."""
        future: Future[Result] = Future()
        self._tasks.put((future, task))
        return future

    def close(self) -> None:
        """End after the tasks that were submitted."""
        self._tasks.put(None)

    def _run(self) -> None:
        while (item := self._tasks.get()) is not None:
            future, task = item
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)
