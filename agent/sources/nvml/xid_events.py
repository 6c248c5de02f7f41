"""Xid errors: the thread that waits for them, and their counts."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import c_void_p, cast
from typing import Any

from agent.catalog import gpu_facts as f
from agent.catalog.gpu_problems import COUNTED_XIDS
from agent.records.gpu import FactKey, Facts, WaitingXids, XidError
from agent.sources.nvml.library import TIMEOUT, GpuLost, NvmlUnavailable
from agent.sources.nvml.nvml_gpu import Gpu

_LOG = logging.getLogger(__name__)

# NVML_GPU_INSTANCE_ID_ANY and NVML_COMPUTE_INSTANCE_ID_ANY: the event concerns the whole GPU.
_ANY = 0xFFFFFFFF

_SUPPORTED = "nvmlDeviceGetSupportedEventTypes"
_REGISTER = "nvmlDeviceRegisterEvents"


class XidErrors:
    """The Xid errors of each GPU since the agent started. Safe on every thread.

    The thread of the events adds errors; the next read of the source takes them. A GPU without
    events has no counts.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives Unix time."""
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: dict[str, Counter[int]] = {}
        self._facts: dict[str, Facts] = {}
        self._waiting = WaitingXids()

    def count(self, gpus: Iterable[str]) -> None:
        """Count the errors of these GPUs from now on, beginning with zeros."""
        with self._lock:
            for gpu in gpus:
                self._counts.setdefault(gpu, Counter(dict.fromkeys(COUNTED_XIDS, 0)))
                self._publish(gpu, {})

    def add(self, gpu: str, xid: int, gpu_instance: int | None, instance: int | None) -> None:
        """Count one error that the driver reports now."""
        with self._lock:
            at = self._clock()
            self._counts.setdefault(gpu, Counter())[xid] += 1
            self._publish(gpu, {(f.XID_LAST_SEEN.name, (str(xid),)): at})
            error = XidError(
                gpu=gpu,
                xid=xid,
                at=at,
                count=self._counts[gpu][xid],
                gpu_instance=gpu_instance,
                compute_instance=instance,
            )
            self._waiting.add(error)

    def take(self) -> tuple[XidError, ...]:
        """The errors since the last call."""
        with self._lock:
            return self._waiting.take()

    def facts(self, gpu: str) -> Facts:
        """The counts as facts."""
        return self._facts.get(gpu, {})

    def _publish(self, gpu: str, last_seen: Mapping[FactKey, float]) -> None:
        # A new mapping each time, so that readers need no lock.
        counts: dict[FactKey, float] = {
            (f.XID_ERRORS.name, (str(xid),)): float(count)
            for xid, count in self._counts[gpu].items()
        }
        self._facts[gpu] = {**self._facts.get(gpu, {}), **counts, **last_seen}


class XidListener:
    """Waits for Xid errors of the GPUs of one session, on a thread of its own, until `stop`."""

    def __init__(self, binding: Any, errors: XidErrors, wait_ms: int) -> None:
        """Raises the binding's NVMLError if the library has no events."""
        self._binding = binding
        self._errors = errors
        self._wait_ms = wait_ms
        self._set = binding.nvmlEventSetCreate()
        self._gpus: dict[int | None, str] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nvml events", daemon=True)
        # Whether Xid errors get lost that the driver could report.
        self.failed = False

    def start(self, gpus: Sequence[Gpu]) -> None:
        """Listen to those of the GPUs that report Xid errors, if there are any."""
        for gpu in gpus:
            try:
                if self._registered(gpu):
                    self._gpus[_address(gpu.handle)] = gpu.identity.uuid
            except GpuLost as lost:
                _LOG.info("no events of a GPU that the next read will find lost: %s", lost)
            except NvmlUnavailable:
                raise
            except Exception:
                _LOG.exception("events of GPU %s could not be registered", gpu.identity.uuid)
                self.failed = True
        self._errors.count(self._gpus.values())
        if self._gpus:
            self._thread.start()

    def _registered(self, gpu: Gpu) -> bool:
        xid = self._binding.nvmlEventTypeXidCriticalError
        supported = gpu.calls.ask(_SUPPORTED, gpu.handle)
        if supported is None:
            self.failed |= gpu.calls.in_doubt(_SUPPORTED)
            return False
        if not supported & xid:
            return False
        done = gpu.calls.done(_REGISTER, gpu.handle, xid, self._set)
        self.failed |= not done and gpu.calls.in_doubt(_REGISTER)
        return done

    def stop(self) -> bool:
        """End the thread and free the event set; False when the driver does not end the wait.

        Raises the binding's NVMLError.
        """
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(2 * self._wait_ms / 1000 + 1)
        if self._thread.is_alive():
            return False
        self._binding.nvmlEventSetFree(self._set)
        return True

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._wait()
        except Exception as error:
            # With a GPU lost, every further wait fails at once.
            _LOG.warning("the wait for Xid errors failed: %r", error)
            self.failed = True

    def _wait(self) -> None:
        try:
            event = self._binding.nvmlEventSetWait_v2(self._set, self._wait_ms)
        except self._binding.NVMLError as error:
            if error.value != TIMEOUT:
                raise
        else:
            self._add(event)

    def _add(self, event: Any) -> None:
        # By address: a GPU that has just fallen off the bus may not return its UUID any more.
        gpu = self._gpus.get(_address(event.device))
        if gpu is None:
            _LOG.error("Xid %d came from a GPU that was not registered", event.eventData)
            return
        try:
            instances = (_instance(event.gpuInstanceId), _instance(event.computeInstanceId))
            self._errors.add(gpu, int(event.eventData), *instances)
        except Exception:
            _LOG.exception("Xid %d of GPU %s could not be counted", event.eventData, gpu)


def _address(handle: Any) -> int | None:
    return cast(handle, c_void_p).value


def _instance(number: int) -> int | None:
    return None if number == _ANY else number
