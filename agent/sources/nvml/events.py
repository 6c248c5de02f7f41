"""The thread that waits for Xid errors."""

import logging
import threading
from collections.abc import Callable, Sequence
from ctypes import c_void_p, cast
from typing import Any

from agent.sources.nvml.gpu import Gpu
from agent.sources.nvml.library import TIMEOUT, GpuLost, NvmlUnavailable

_LOG = logging.getLogger(__name__)

# NVML_GPU_INSTANCE_ID_ANY and its like: the event is the whole GPU's.
_ANY = 0xFFFFFFFF

_SUPPORTED = "nvmlDeviceGetSupportedEventTypes"
_REGISTER = "nvmlDeviceRegisterEvents"

# Called with GPU, Xid, and the MIG instances that it is about, from the events' own thread.
XidSink = Callable[[str, int, int | None, int | None], None]


class XidEvents:
    """Hands each Xid error of the GPUs to a sink, from a thread of its own, until `stop`."""

    def __init__(self, binding: Any, on_xid: XidSink, wait_ms: int) -> None:
        """Raises the binding's NVMLError where the library has no events."""
        self._binding = binding
        self._on_xid = on_xid
        self._wait_ms = wait_ms
        self._set = binding.nvmlEventSetCreate()
        self._gpus: dict[int | None, str] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nvml events", daemon=True)
        # Whether Xid errors of a GPU that could be heard are not heard.
        self.failed = False

    def register(self, gpus: Sequence[Gpu]) -> tuple[str, ...]:
        """Listen to these GPUs; the UUIDs of those that can tell Xid errors."""
        for gpu in gpus:
            try:
                if self._registered(gpu):
                    self._gpus[_address(gpu.handle)] = gpu.identity.uuid
            except GpuLost as lost:
                _LOG.info("no events of a GPU that the next reading will find lost: %s", lost)
            except NvmlUnavailable:
                raise
            except Exception:
                _LOG.exception("GPU %s could not be listened to", gpu.identity.uuid)
                self.failed = True
        return tuple(self._gpus.values())

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

    def start(self) -> None:
        """Begin to wait, where there is something to wait for."""
        if self._gpus:
            self._thread.start()

    def stop(self) -> bool:
        """End the thread and give the set back; False when the driver does not let go of them.

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
            self._hand_over(event)

    def _hand_over(self, event: Any) -> None:
        # By address: a GPU that has just fallen off may not tell its UUID any more.
        gpu = self._gpus.get(_address(event.device))
        if gpu is None:
            _LOG.error("Xid %d came from a GPU that was not asked for", event.eventData)
            return
        try:
            instances = (_instance(event.gpuInstanceId), _instance(event.computeInstanceId))
            self._on_xid(gpu, int(event.eventData), *instances)
        except Exception:
            _LOG.exception("Xid %d of GPU %s could not be handed on", event.eventData, gpu)


def _address(handle: Any) -> int | None:
    return cast(handle, c_void_p).value


def _instance(number: int) -> int | None:
    return None if number == _ANY else number
