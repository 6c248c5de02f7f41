"""What can be asked of stored requests."""

from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

Item = TypeVar("Item")

# What figures can be told apart by.
Dimension = Literal["engine", "model", "tenant", "input_length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A stretch of time in Unix seconds, from a whole second to a moment that is not in it.

    Nothing ended after one that `ends_now`, so whole rollups that reach beyond its end are of it.
    """

    from_s: int
    until: float
    ends_now: bool = False

    @property
    def length_s(self) -> float:
        """Seconds in the window, never zero."""
        return max(self.until - self.from_s, 1e-3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which requests are meant; None means any."""

    engine: str | None = None
    model: str | None = None
    tenant: str | None = None
    objective: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCost:
    """What a group of requests cost, and took of the hours of GPUs; `requests` are those that tell.

    None where none of them does.
    """

    requests: int
    cost_usd: float | None
    gpu_hours: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFilter:
    """Which requests a list holds, beyond a selection; moments in Unix seconds."""

    selection: Selection = Selection()
    verdict: str | None = None
    status: str | None = None
    started_from: float | None = None
    started_until: float | None = None
    min_ttft_s: float | None = None
    min_tpot_s: float | None = None
    min_e2e_s: float | None = None


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in a list that is sorted by moment and row number, newest first."""

    at: float
    row: int


@dataclass(frozen=True, slots=True)
class PageOf(Generic[Item]):
    """Items of a list, and where the next page starts; None at the end."""

    items: tuple[Item, ...]
    next: Cursor | None
