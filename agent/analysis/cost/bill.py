"""The bill of some time of an engine: its GPUs and, where it is measured, their electricity."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import fsum

from agent.analysis.efficiency.time_range import TimeRange
from agent.catalog.time_units import HOUR_S
from agent.records.prices import Electricity, PriceList

_KWH_J = 3.6e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """Dollars. `electricity_usd` is None where it has no price or was not measured."""

    gpus_usd: float
    electricity_usd: float | None = None

    @property
    def usd(self) -> float:
        """All that is known of it."""
        return self.gpus_usd + (self.electricity_usd or 0.0)


def bill(
    prices: PriceList,
    time: TimeRange,
    *,
    engine: str,
    gpus: Sequence[str | None],
    joules: float | None = None,
) -> Bill | None:
    """Price x time x GPUs, and electricity; None where any GPU has no price at some moment.

    `gpus` holds the product name of each GPU of the engine, None where it is unknown.
    """
    parts = [_gpus_usd(prices, part, engine, gpus) for part in _between_changes(prices, time)]
    known = [usd for usd in parts if usd is not None]
    if not gpus or len(known) < len(parts):
        return None
    return Bill(gpus_usd=fsum(known), electricity_usd=electricity_usd(prices.electricity, joules))


def electricity_usd(electricity: Electricity | None, joules: float | None) -> float | None:
    """Dollars for the energy, times the building's PUE; None where price or energy is unknown."""
    if electricity is None or joules is None:
        return None
    return joules / _KWH_J * electricity.pue * electricity.usd_per_kwh


def gpu_hours(gpus: int, time: TimeRange) -> float:
    """GPU-hours of some time: a bill that needs no price."""
    return gpus * time.length_s / HOUR_S


def _between_changes(prices: PriceList, time: TimeRange) -> list[TimeRange]:
    changes = prices.changes_between(time.from_at, time.until)
    return [TimeRange(*ends) for ends in pairwise([time.from_at, *changes, time.until])]


def _gpus_usd(
    prices: PriceList, part: TimeRange, engine: str, gpus: Sequence[str | None]
) -> float | None:
    """Dollars for a time in which no price changes."""
    hourly = [prices.gpu_hour_usd(engine, gpu, part.from_at) for gpu in gpus]
    known = [usd for usd in hourly if usd is not None]
    if len(known) < len(hourly):
        return None
    return fsum(known) * part.length_s / HOUR_S
