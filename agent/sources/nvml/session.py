"""The GPUs from one initialisation of the library to its shutdown."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

from agent.errors import AgentError
from agent.records.gpu import GpuSample
from agent.sources.nvml.calls import Nvml
from agent.sources.nvml.events import XidEvents, XidSink
from agent.sources.nvml.gpu import Gpu, Identity
from agent.sources.nvml.library import (
    REASONS,
    GpuLost,
    Meaning,
    NvmlUnavailable,
    meaning_of,
    unavailable,
)
from agent.sources.nvml.xid_tally import XidTally

_LOG = logging.getLogger(__name__)


class Session:
    """An initialised library.

    `problems` tells the GPUs that were lost since, and why; `unopened` why GPUs of an index could
    not be opened at all.
    """

    def __init__(self, nvml: Nvml, tally: XidTally, on_xid: XidSink, wait_ms: int) -> None:
        """Initialise it and find the GPUs. Raises NvmlUnavailable, also where there is no GPU."""
        self._nvml = nvml
        self._tally = tally
        self.problems: dict[str, str] = {}
        self.unopened: dict[int, str] = {}
        self._events: XidEvents | None = None
        self._gpus: list[Gpu] = []
        try:
            nvml.binding.nvmlInit()
        except nvml.binding.NVMLError as error:
            raise unavailable(error, "NVML cannot be initialised") from error
        try:
            self._find()
            self._listen(on_xid, wait_ms)
        except BaseException:
            self.close()
            raise

    @property
    def events_failed(self) -> bool:
        """Whether Xid errors are not heard any more."""
        return self._events is not None and self._events.failed

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
                "no_gpu",
                f"NVML works, but {seen}; in a container, set NVIDIA_VISIBLE_DEVICES",
            )

    def _open(self, index: int) -> None:
        binding = self._nvml.binding
        try:
            handle = binding.nvmlDeviceGetHandleByIndex(index)
            uuid = binding.nvmlDeviceGetUUID(handle)
            name = binding.nvmlDeviceGetName(handle)
        except binding.NVMLError as error:
            if meaning_of(error.value) is Meaning.DRIVER_GONE:
                raise unavailable(error, f"GPU {index} cannot be opened") from error
            self._leave_out(index, error.value)
            return
        identity = Identity(uuid=uuid, index=index, name=name)
        try:
            self._gpus.append(Gpu(self._nvml, identity, handle, self._tally))
        except GpuLost as lost:
            self.problems[uuid] = lost.reason

    def _leave_out(self, index: int, code: int) -> None:
        if meaning_of(code) is Meaning.FORBIDDEN:
            # Another container's, and no trouble.
            self._nvml.rights.missing(f"with index {index}", "nvmlDeviceGetHandleByIndex")
        else:
            self.unopened[index] = REASONS.get(code, "gpu_unopened")

    def _listen(self, on_xid: XidSink, wait_ms: int) -> None:
        try:
            self._events = XidEvents(self._nvml.binding, on_xid, wait_ms)
        except self._nvml.binding.NVMLError as error:
            _LOG.warning("Xid errors are not heard: NVML has no events here (%s)", error)
            return
        self._tally.watch(self._events.register(self._gpus))
        self._events.start()

    def samples(self, now: float) -> Iterator[GpuSample]:
        """Each GPU that answers. Raises NvmlUnavailable where the driver is gone."""
        for gpu in list(self._gpus):
            try:
                yield gpu.read(now)
            except GpuLost as lost:
                self.problems[gpu.identity.uuid] = lost.reason
                self._gpus.remove(gpu)
                self._quietly(gpu.close)

    def close(self) -> None:
        """Give everything back and shut the library down, as far as it still answers."""
        for gpu in self._gpus:
            self._quietly(gpu.close)
        if self._events is not None and self._quietly(self._events.stop) is False:
            # To shut down what the driver still works on could end this process.
            _LOG.warning("the driver does not end its wait for events; NVML is not shut down")
            return
        self._quietly(self._nvml.binding.nvmlShutdown)

    def _quietly(self, step: Callable[[], Any]) -> Any:
        """What the step returns, or None where it failed, as it may after a loss."""
        try:
            return step()
        except (self._nvml.binding.NVMLError, AgentError) as error:
            _LOG.debug("a step of the shutdown failed: %s", error)
            return None
