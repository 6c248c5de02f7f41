"""The numbers of NVML's fields, three of which depend on the driver.

Most fields have had one number since they came, and the binding knows it. The times for which heat
and the power brake held the clocks down were renumbered. The bindings that NVIDIA publishes with
its drivers (nvidia-ml-py) number them

    12.570.172 and older            not at all
    12.575.51, 13.580.65            251 to 253
    13.580.82 up to 13.615.71       269 to 271

and a trace of the nvidia-smi of driver 580.65.06 has 251 to 253 (NVIDIA/k8s-test-infra, mock NVML).
What is a time for one driver is power smoothing for the other. A driver between 580.65 and 580.82
is in doubt, and is not asked.
"""

from typing import Any

_RENUMBERED = (
    "NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN",
    "NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN",
    "NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN",
)
# The first of them by the first driver that has it so, the newest driver first.
_FIRST: tuple[tuple[tuple[int, ...], int | None], ...] = (
    ((580, 82), 269),
    ((580, 66), None),
    ((575, 51), 251),
)


def field_number(name: str, binding: Any, driver: str | None) -> int | None:
    """The number under which a driver of this version tells a field, None where that is in doubt.

    Raises AttributeError for a name that the binding does not know.
    """
    number: int = getattr(binding, name)
    if name not in _RENUMBERED:
        return number
    first = _first_renumbered(_parts(driver))
    return None if first is None else first + _RENUMBERED.index(name)


def _parts(driver: str | None) -> tuple[int, ...]:
    parts = (driver or "").split(".")
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else ()


def _first_renumbered(driver: tuple[int, ...]) -> int | None:
    return next((number for since, number in _FIRST if driver >= since), None)
