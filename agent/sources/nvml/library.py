"""NVIDIA's binding, its return codes, and the calls of one GPU. Nothing else imports `pynvml`."""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from agent.catalog.gpu_problems import INIT_FAILED
from agent.errors import AgentError

try:
    import pynvml as _pynvml  # type: ignore[import-untyped]
except ImportError:
    _pynvml = None

# The newest names that are used. The abandoned distribution `pynvml` installed a module of that
# name too, which lacks them.
_NEWEST_NAMES = (
    "nvmlDeviceGetTemperatureV",
    "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION",
    "NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN",
)


class NvmlUnavailable(AgentError):
    """No GPU can be read now; `reason` is a short word for counting."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class GpuLost(AgentError):
    """One GPU cannot be read any more; `reason` is a short word for counting."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Meaning(Enum):
    """The meaning of a return code for the call that returned it."""

    UNSUPPORTED = auto()
    FORBIDDEN = auto()
    NOTHING_NOW = auto()
    GPU_GONE = auto()
    DRIVER_GONE = auto()
    FAILED = auto()


# Numbers of nvmlReturn_t (nvml.h), which are part of the library's binary interface.
UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
LIB_RM_VERSION_MISMATCH = 18
NO_DATA = 21
ARGUMENT_VERSION_MISMATCH = 25
DEPRECATED = 26
NOT_READY = 27
GPU_NOT_FOUND = 28
UNKNOWN = 999

_MEANINGS = {
    NOT_SUPPORTED: Meaning.UNSUPPORTED,
    FUNCTION_NOT_FOUND: Meaning.UNSUPPORTED,
    ARGUMENT_VERSION_MISMATCH: Meaning.UNSUPPORTED,
    DEPRECATED: Meaning.UNSUPPORTED,
    NO_PERMISSION: Meaning.FORBIDDEN,
    NOT_FOUND: Meaning.NOTHING_NOW,
    NO_DATA: Meaning.NOTHING_NOW,
    NOT_READY: Meaning.NOTHING_NOW,
    GPU_IS_LOST: Meaning.GPU_GONE,
    RESET_REQUIRED: Meaning.GPU_GONE,
    GPU_NOT_FOUND: Meaning.GPU_GONE,
    UNINITIALIZED: Meaning.DRIVER_GONE,
    DRIVER_NOT_LOADED: Meaning.DRIVER_GONE,
    LIBRARY_NOT_FOUND: Meaning.DRIVER_GONE,
    LIB_RM_VERSION_MISMATCH: Meaning.DRIVER_GONE,
}

REASONS = {
    NO_PERMISSION: "no_permission",
    DRIVER_NOT_LOADED: "no_driver",
    UNINITIALIZED: "driver_lost",
    LIBRARY_NOT_FOUND: "no_library",
    LIB_RM_VERSION_MISMATCH: "driver_mismatch",
    GPU_IS_LOST: "gpu_lost",
    RESET_REQUIRED: "gpu_reset_required",
    GPU_NOT_FOUND: "gpu_not_found",
    UNKNOWN: "nvml_unknown_error",
}

# The words for codes by which a GPU itself reports its loss.
OWN_LOSSES = frozenset(
    REASONS[code] for code, meaning in _MEANINGS.items() if meaning is Meaning.GPU_GONE
)

_HINTS = {
    LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 comes with NVIDIA's driver; in a container, its runtime "
    "brings it in when NVIDIA_DRIVER_CAPABILITIES contains `utility`",
    DRIVER_NOT_LOADED: "the kernel has no NVIDIA driver loaded",
    LIB_RM_VERSION_MISMATCH: "the driver was replaced; start the container or machine again",
    NO_PERMISSION: "this user may not open /dev/nvidiactl",
    UNKNOWN: "a container that lost its devices, as after `systemctl daemon-reload`, must be "
    "created again",
}


def binding() -> Any:
    """The module of NVIDIA's binding. Raises NvmlUnavailable without one, or with a wrong one."""
    if _pynvml is None:
        raise NvmlUnavailable(
            "no_package", "the Python package nvidia-ml-py is not installed; install it"
        )
    missing = [name for name in _NEWEST_NAMES if not hasattr(_pynvml, name)]
    if missing:
        raise NvmlUnavailable(
            "wrong_package",
            f"the module pynvml at {_pynvml.__file__} has no {missing[0]}; remove the package "
            "`pynvml` and install nvidia-ml-py 13.615.71 or newer",
        )
    return _pynvml


def meaning_of(code: int) -> Meaning:
    """The meaning of a code; FAILED for a passing problem."""
    return _MEANINGS.get(code, Meaning.FAILED)


def unavailable(error: Any, doing: str) -> NvmlUnavailable:
    """An NVMLError that came while `doing`, as the reason why no GPU can be read."""
    reason = REASONS.get(error.value, INIT_FAILED)
    hint = _HINTS.get(error.value)
    return NvmlUnavailable(reason, f"{doing}: {error}" + (f" ({hint})" if hint else ""))


_LOG = logging.getLogger(__name__)

_PROFILING = (
    "GPU profiling (CAP_SYS_ADMIN, or the driver's option NVreg_RestrictProfilingToAdminUsers=0)"
)
_WHOLE_GPU = (
    "monitoring of a whole GPU (under MIG NVIDIA_MIG_MONITOR_DEVICES=all and CAP_SYS_ADMIN)"
)
_RIGHTS = {
    "nvmlDeviceGetHandleByIndex": "access to the GPU's device files",
    "nvmlGpmQueryDeviceSupport": _PROFILING,
    "nvmlGpmSampleGet": _PROFILING,
    "nvmlGpmMetricsGet": _PROFILING,
    "nvmlDeviceGetMemoryInfo": _WHOLE_GPU,
    "nvmlDeviceGetComputeRunningProcesses_v3": _WHOLE_GPU,
    "nvmlDeviceGetMPSComputeRunningProcesses_v3": _WHOLE_GPU,
}
_ADMINISTRATION = "administration (CAP_SYS_ADMIN)"

# NVML calls take microseconds to a few milliseconds. One that takes this long delays the others.
SLOW_S = 0.1
# A slow call rests for 20 times its own length, but at most 30 s: it takes under 5 % of the time.
_REST_FACTOR = 20
_LONGEST_REST_S = 30.0
# After a failure without a lasting reason.
_REST_AFTER_FAILURE_S = 10.0

# An argument may be wrong for a while, as after a change of MIG. A call that never succeeded and
# refused its argument so often in a row does not support it. Calls that always get the same
# argument are believed at once.
_REFUSALS_TO_BELIEVE = 5
_SAME_ALWAYS = frozenset({"nvmlDeviceGetSupportedEventTypes", "nvmlDeviceRegisterEvents"})


def rest_s(took_s: float) -> float:
    """How long a slow call rests."""
    return min(took_s * _REST_FACTOR, _LONGEST_REST_S)


@dataclass(slots=True)
class Rights:
    """Logs each missing right once, however many GPUs and calls miss it."""

    _logged: set[str] = field(default_factory=set)

    def missing(self, gpu: str, function: str) -> None:
        """Log that a call was refused, unless its right was logged before."""
        right = _RIGHTS.get(function, _ADMINISTRATION)
        if right not in self._logged:
            self._logged.add(right)
            _LOG.warning(
                "GPU %s: %s is forbidden without the right of %s; its values stay unknown",
                gpu,
                function,
                right,
            )


@dataclass(frozen=True, slots=True)
class Nvml:
    """The binding, with what every call needs beside it. `on_failure` counts a reason."""

    binding: Any
    rights: Rights
    monotonic: Callable[[], float]
    on_failure: Callable[[str], None]


class GpuCalls:
    """The calls of one GPU. A value that cannot be had is None; only a loss is raised."""

    def __init__(self, nvml: Nvml, gpu: str) -> None:
        self.nvml = nvml
        self.gpu = gpu
        self._off: set[str] = set()
        self._rest_until: dict[str, float] = {}
        self._failing: set[str] = set()
        self._ever_answered: set[str] = set()
        self._refusals: Counter[str] = Counter()
        self.begin()

    def begin(self) -> None:
        """Start a new read: count the calls of `silent` from zero."""
        self._answered = self._unanswered = self._resting = 0

    @property
    def silent(self) -> bool:
        """Whether calls failed since `begin` and none succeeded: the GPU may be gone.

        A call that rests because it was slow did succeed, not long ago.
        """
        return self._unanswered > 0 and self._answered == self._resting == 0

    def in_doubt(self, function: str, variant: str = "") -> bool:
        """Whether None from this call means that it failed or rests, not that it is off."""
        call = function + variant
        if call in self._off:
            return False
        return call in self._failing or self._rests(call, self.nvml.monotonic())

    def ever_answered(self, function: str) -> bool:
        """Whether this call has succeeded since the library was initialised."""
        return function in self._ever_answered

    def ask(self, function: str, *arguments: Any, variant: str = "") -> Any | None:
        """The value that the binding's function returns, or None.

        `variant` names calls of one function that are off or at rest independently. Raises GpuLost
        and NvmlUnavailable.
        """
        answered, value = self._attempt(function, arguments, variant)
        return value if answered else None

    def done(self, function: str, *arguments: Any) -> bool:
        """Whether the binding's function, which returns nothing, succeeded."""
        return self._attempt(function, arguments, "")[0]

    def _attempt(self, function: str, arguments: tuple[Any, ...], variant: str) -> tuple[bool, Any]:
        call = function + variant
        began = self.nvml.monotonic()
        if call in self._off:
            return False, None
        if self._rests(call, began):
            self._resting += call not in self._failing
            return False, None
        bound = getattr(self.nvml.binding, function, None)
        if bound is None:
            # A newer binding has dropped this call.
            self._off.add(call)
            return False, None
        try:
            value = bound(*arguments)
        except self.nvml.binding.NVMLError as error:
            self._refused(function, call, error.value)
            return False, None
        self._answered += 1
        self._ever_answered.add(call)
        self._failing.discard(call)
        took_s = self.nvml.monotonic() - began
        if took_s > SLOW_S:
            self._slow(call, took_s)
        return True, value

    def _rests(self, call: str, at: float) -> bool:
        return self._rest_until.get(call, at) > at

    def entry_is_off(self, function: str, entry: str, code: int) -> bool:
        """Handle the code of one entry of a batch; whether to leave the entry out from now on."""
        if code == INVALID_ARGUMENT:
            # A driver that is older than the entry returns this.
            return True
        meaning = meaning_of(code)
        if meaning is Meaning.FAILED:
            self.nvml.on_failure("call_failed")
            return False
        self._refused(function, function + entry, code)
        return meaning is not Meaning.NOTHING_NOW

    def _refused(self, function: str, call: str, code: int) -> None:
        meaning = meaning_of(code)
        if meaning is not Meaning.FAILED:
            self._failing.discard(call)
        match meaning:
            case Meaning.UNSUPPORTED:
                self._off.add(call)
            case Meaning.FORBIDDEN:
                self._off.add(call)
                self.nvml.rights.missing(self.gpu, function)
            case Meaning.GPU_GONE:
                raise GpuLost(REASONS[code], f"GPU {self.gpu}: {function} returned {REASONS[code]}")
            case Meaning.DRIVER_GONE:
                raise NvmlUnavailable(REASONS[code], f"{function} returned {REASONS[code]}")
            case Meaning.FAILED:
                self._failed(call, code)
                self._count_refusal(function, call, code)

    def _count_refusal(self, function: str, call: str, code: int) -> None:
        if code != INVALID_ARGUMENT:
            self._refusals.pop(call, None)
            return
        self._refusals[call] += 1
        often = function in _SAME_ALWAYS or self._refusals[call] >= _REFUSALS_TO_BELIEVE
        if often and call not in self._ever_answered:
            self._failing.discard(call)
            self._off.add(call)

    def _failed(self, call: str, code: int) -> None:
        if call not in self._failing:
            _LOG.warning("GPU %s: %s failed with code %d; it is tried again", self.gpu, call, code)
        self._failing.add(call)
        self._unanswered += 1
        self._rest_until[call] = self.nvml.monotonic() + _REST_AFTER_FAILURE_S
        self.nvml.on_failure("call_failed")

    def _slow(self, call: str, took_s: float) -> None:
        if call not in self._rest_until:
            _LOG.warning(
                "GPU %s: %s took %.2f s; it is called less often while it is so slow",
                self.gpu,
                call,
                took_s,
            )
        self._rest_until[call] = self.nvml.monotonic() + rest_s(took_s)
        self.nvml.on_failure("call_slow")
