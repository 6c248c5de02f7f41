"""NVIDIA's binding, and the meaning of its return codes. Nothing else imports `pynvml`."""

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
