"""Prices of GPUs and electricity, with the time in which each applies."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from math import inf

from agent.catalog.hardware import find_gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The price of a GPU hour, for one engine or one kind of GPU, never both.

    It applies from `from_at` until before `until`, in Unix seconds. `setting` is its path in the
    settings.
    """

    setting: str
    gpu_hour_usd: float
    engine: str | None = None
    gpu: str | None = None
    from_at: float = -inf
    until: float = inf

    @property
    def key(self) -> tuple[str, str]:
        """The priced engine or product; one product has one key under all its names."""
        if self.engine is not None:
            return "engine", self.engine
        return "gpu", gpu_key(self.gpu or "")

    def applies_at(self, at: float) -> bool:
        """Return whether it applies at a time."""
        return self.from_at <= at < self.until


@dataclass(frozen=True, slots=True, kw_only=True)
class Electricity:
    """The price of electricity. `pue` is the building's power per watt of its GPUs."""

    usd_per_kwh: float
    pue: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceList:
    """All prices; raises ValueError if two with one key overlap in time."""

    prices: tuple[Price, ...] = ()
    electricity: Electricity | None = None

    def __post_init__(self) -> None:
        if problems := tuple(overlaps(self.prices)):
            raise ValueError("; ".join(problems))

    def gpu_hour_usd(self, engine: str, gpu: str | None, at: float) -> float | None:
        """Return the price of an engine's GPU at a time: the engine's own, else the product's.

        None without a price, never 0.
        """
        keys = [("engine", engine)] if gpu is None else [("engine", engine), ("gpu", gpu_key(gpu))]
        for key in keys:
            for price in self.prices:
                if price.key == key and price.applies_at(at):
                    return price.gpu_hour_usd
        return None

    def has_prices(self, engine: str, gpus: Iterable[str], at: float) -> bool:
        """Whether each of the engine's GPUs has a price; without a GPU, whether the engine has."""
        of: list[str | None] = [*gpus] or [None]
        return None not in [self.gpu_hour_usd(engine, gpu, at) for gpu in of]

    def changes_between(self, from_at: float, until: float) -> list[float]:
        """Return the times inside at which a price begins or ends, sorted."""
        edges = {edge for price in self.prices for edge in (price.from_at, price.until)}
        return sorted(edge for edge in edges if from_at < edge < until)


def gpu_key(name: str) -> str:
    """Return one name for a product, from NVML's name or the one in our table."""
    known = find_gpu(name)
    return name.strip().casefold().removeprefix("nvidia ") if known is None else known.name


def overlaps(prices: Iterable[Price]) -> Iterator[str]:
    """Yield a sentence for each two prices with one key that overlap in time."""
    for one, other in combinations(prices, 2):
        shared = max(one.from_at, other.from_at) < min(one.until, other.until)
        if one.key == other.key and shared:
            kind, name = one.key
            yield (
                f"{one.setting} and {other.setting} both price {kind} {name!r} at the same time; "
                "end one where the other begins, or remove it"
            )
