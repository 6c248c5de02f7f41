"""The GPUs from one initialisation of the library to its shutdown."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

from agent.catalog.gpu_problems import GPU_UNOPENED, INIT_FAILED, NO_GPU
from agent.catalog.reasons import INTERNAL
from agent.errors import AgentError
from agent.records.gpu import GpuSample
from agent.sources.nvml.calls import Nvml
from agent.sources.nvml.library import (
    INVALID_ARGUMENT,
    NO_PERMISSION,
    REASONS,
    GpuLost,
    Meaning,
    NvmlUnavailable,
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
