"""What GPUs and electricity cost, and from when to when."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from math import inf

from agent.catalog.hardware import find_gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What one GPU costs an hour, for one engine or one kind of GPU, never both.

    It holds from `from_at` to `until`, which is not in it, in Unix seconds. `said_in` is where an
    operator wrote it.
    """

    said_in: str
    gpu_hour_usd: float
    engine: str | None = None
    gpu: str | None = None
    from_at: float = -inf
    until: float = inf

    @property
    def key(self) -> tuple[str, str]:
        """What it is a price of; one product has one key, however it was named."""
        if self.engine is not None:
            return "engine", self.engine
        return "gpu", gpu_key(self.gpu or "")

    def holds_at(self, at: float) -> bool:
        """Whether it is the price at that moment."""
        return self.from_at <= at < self.until


@dataclass(frozen=True, slots=True, kw_only=True)
class Electricity:
    """What a kilowatt-hour costs. `pue` is what the building draws for each watt of its GPUs."""

    usd_per_kwh: float
    pue: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceList:
    """All prices; raises ValueError where two of one key hold at once."""

    prices: tuple[Price, ...] = ()
    electricity: Electricity | None = None

    def __post_init__(self) -> None:
        if problems := tuple(overlaps(self.prices)):
            raise ValueError("; ".join(problems))

    def gpu_hour_usd(self, engine: str, gpu: str | None, at: float) -> float | None:
        """The price of one GPU of an engine at a moment: the engine's own, else the GPU's by name.

        None where there is none, which is not 0.
        """
        keys = [("engine", engine)] if gpu is None else [("engine", engine), ("gpu", gpu_key(gpu))]
        for key in keys:
            for price in self.prices:
                if price.key == key and price.holds_at(at):
                    return price.gpu_hour_usd
        return None

    def changes_between(self, from_at: float, until: float) -> list[float]:
        """The moments inside, in order, at which some price begins or ends."""
        edges = {edge for price in self.prices for edge in (price.from_at, price.until)}
        return sorted(edge for edge in edges if from_at < edge < until)


def gpu_key(name: str) -> str:
    """One name for a product, from the name that NVML tells or the one of our own table."""
    known = find_gpu(name)
    return name.strip().casefold().removeprefix("nvidia ") if known is None else known.name


def overlaps(prices: Iterable[Price]) -> Iterator[str]:
    """A sentence for each two prices of one key that hold at once."""
    for one, other in combinations(prices, 2):
        shared = max(one.from_at, other.from_at) < min(one.until, other.until)
        if one.key == other.key and shared:
            kind, name = one.key
            yield (
                f"{one.said_in} and {other.said_in} both price {kind} {name!r} at the same time; "
                "end one where the other begins, or remove it"
            )
