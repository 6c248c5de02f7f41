"""What a window of an engine costs in all."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import fsum

from agent.analysis.efficiency.time_range import TimeRange
from agent.records.prices import Electricity, PriceList

_HOUR_S = 3600.0
_KWH_J = 3.6e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """Dollars for a window. `electricity_usd` is None where it has no price or was not measured."""

    gpus_usd: float
    electricity_usd: float | None = None

    @property
    def usd(self) -> float:
        """All that is known of it."""
        return self.gpus_usd + (self.electricity_usd or 0.0)


def bill(
    prices: PriceList,
    window: TimeRange,
    *,
    engine: str,
    gpus: Sequence[str | None],
    joules: float | None = None,
) -> Bill | None:
    """Price x time x GPUs, and electricity; None where a GPU has no price at some moment of it.

    `gpus` holds for each GPU of the engine the name that NVML tells, None where it is not known.
    """
    hourly = [_gpus_usd(prices, part, engine, gpus) for part in _between_changes(prices, window)]
    known = [usd for usd in hourly if usd is not None]
    if not gpus or len(known) < len(hourly):
        return None
    return Bill(gpus_usd=fsum(known), electricity_usd=electricity_usd(prices.electricity, joules))


def electricity_usd(electricity: Electricity | None, joules: float | None) -> float | None:
    """What the energy costs with what the building adds; None where price or energy is unknown."""
    if electricity is None or joules is None:
        return None
    return joules / _KWH_J * electricity.pue * electricity.usd_per_kwh


def gpu_hours(gpus: int, window: TimeRange) -> float:
    """GPU-hours of a window: a bill that needs no price."""
    return gpus * window.length_s / _HOUR_S


def _between_changes(prices: PriceList, window: TimeRange) -> list[TimeRange]:
    changes = prices.changes_between(window.from_at, window.until)
    return [TimeRange(*edges) for edges in pairwise([window.from_at, *changes, window.until])]


def _gpus_usd(
    prices: PriceList, part: TimeRange, engine: str, gpus: Sequence[str | None]
) -> float | None:
    """Dollars for a time in which no price changes."""
    hourly = [prices.gpu_hour_usd(engine, gpu, part.from_at) for gpu in gpus]
    known = [usd for usd in hourly if usd is not None]
    if len(known) < len(hourly):
        return None
    return fsum(known) * part.length_s / _HOUR_S
