"""Queries of stored requests: window, selection, filter, cursor and page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

Item = TypeVar("Item")

# Latencies by which the worst requests can be found.
Latency = Literal["ttft", "tpot", "e2e"]

# What a list of requests can be sorted by.
SortKey = Literal[
    "started", "ttft", "tpot", "e2e", "queue", "input_tokens", "output_tokens", "cost"
]

# What figures can be grouped by. Of the last four only rows know, no rollup.
Dimension = Literal[
    "agent", "engine", "model", "tenant", "input_length", "user", "workload", "session", "priority"
]
OF_ROWS: frozenset[Dimension] = frozenset(("user", "workload", "session", "priority"))

# Of more rows, the latencies of groups that only rows know are of a sample.
MOST_TIMED_ROWS = 100_000


def times_one_in(requests: int) -> int:
    """One in how many of these requests has its latencies read, of groups that only rows know."""
    return -(-requests // MOST_TIMED_ROWS) or 1


# How many requests met and missed, by objective and model and by the Unix second of the minute.
VerdictsByMinute = Mapping[tuple[str, str | None], Mapping[int, tuple[int, int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A span of time in Unix seconds, from a whole second until before `until`.

    A window that `ends_now` includes rollups that extend beyond it, unless requests ended later.
    """

    from_s: int
    until: float
    ends_now: bool = False

    @property
    def length_s(self) -> float:
        """Length in seconds, never zero."""
        return max(self.until - self.from_s, 1e-3)

    def covered_s(self, data_from: float | None) -> float:
        """Seconds of the window from `data_from` on; 0 if no data begins before its end."""
        if data_from is None:
            return 0.0
        return min(max(self.until - data_from, 0.0), self.length_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The requests of a query; None matches any."""

    engine: str | None = None
    model: str | None = None
    tenant: str | None = None
    objective: str | None = None
    agent: str | None = None

    @property
    def source(self) -> "DataSource":
        """The agent and the engine."""
        return DataSource(agent=self.agent, engine=self.engine)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """Where data comes from; None is any."""

    agent: str | None = None
    engine: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCost:
    """The cost of a group's requests that ended in the window: their part of busy time.

    It is summed from rows that are kept and priced. Idle time belongs to no request.
    """

    requests: int
    """rows with a known cost"""
    cost_usd: float | None
    """null without a price"""
    gpu_hours: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCache:
    """Prompt tokens that a cache served, of a group's requests that ended in the window."""

    requests: int
    """rows whose engine gave the cached tokens"""
    input_tokens: int
    """of these rows"""
    cached_tokens: int
    cached_ratio: float | None
    """cached over input tokens; null without any"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFilter:
    """A selection with further conditions on single requests; times in Unix seconds."""

    selection: Selection = Selection()
    verdict: str | None = None
    status: str | None = None
    cause: str | None = None
    min_input_tokens: int | None = None
    max_input_tokens: int | None = None
    started_from: float | None = None
    started_until: float | None = None
    min_ttft_s: float | None = None
    min_tpot_s: float | None = None
    min_e2e_s: float | None = None
    max_ttft_s: float | None = None
    max_tpot_s: float | None = None
    max_e2e_s: float | None = None
    end_user: str | None = None
    workload: str | None = None
    session: str | None = None
    priority: int | None = None
    any_id: str | None = None
    """the client's id, the engine's, the one in the response, or the trace's"""


@dataclass(frozen=True, slots=True)
class RequestOrder:
    """The order of a list of requests, which leaves out those without the value of the key."""

    key: SortKey = "started"
    ascending: bool = False


NEWEST_FIRST = RequestOrder()


@dataclass(frozen=True, slots=True)
class Dots:
    """Requests as (begin in Unix seconds, seconds of a latency, verdict): one in `every`."""

    every: int
    rows: Sequence[tuple[float, float, str]]


@dataclass(frozen=True, slots=True)
class Box:
    """Requests that began between two Unix times, with a latency between two values."""

    by: Latency
    from_s: float
    until_s: float
    min_s: float
    max_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthVerdicts:
    """How many requests of these lengths met and missed."""

    input_length: str
    output_length: str
    met: int
    missed: int


@dataclass(frozen=True, slots=True)
class Cursor:
    """A position in a list sorted by a value, mostly a time, and by row number."""

    at: float
    row: int


@dataclass(frozen=True, slots=True)
class PageOf(Generic[Item]):
    """Items of a list, and the begin of the next page; None at the end."""

    items: tuple[Item, ...]
    next: Cursor | None
