"""What the API serves from: the store's queries, the clock, and the other outputs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from agent.analysis.contrast import BoxCounts
from agent.analysis.conversations import TurnRequest
from agent.analysis.phase_means import RequestPhases
from agent.analysis.tally import CauseSums, Tally
from agent.outputs.web.documents import Documents
from agent.records.engine import EngineStatus
from agent.records.engine_counts import CountsRow
from agent.records.gpu import Facts, GpuUse
from agent.records.minute import MinuteRow
from agent.records.queries import (
    Box,
    Cursor,
    DataSource,
    Dimension,
    Dots,
    GroupCache,
    GroupCost,
    Latency,
    LengthVerdicts,
    PageOf,
    RequestFilter,
    RequestOrder,
    Selection,
    VerdictsByMinute,
    Window,
)
from agent.settings.access import AccessPolicy

Row = Mapping[str, Any]
Answer = TypeVar("Answer")


class ApiQueries(Protocol):
    """The store's queries that the API needs."""

    def grid_s(self, age_s: float) -> int:
        """The grid, in seconds, of windows that began so long ago."""

    def kept_s(self, grid_s: int) -> float:
        """How long ago a window on this grid may begin at most."""

    def data_from(self, window: Window, source: DataSource) -> float | None:
        """When the data begins, of one agent, engine or of all, in Unix seconds."""

    def tally(self, window: Window, selection: Selection) -> Tally:
        """The counts of a window."""

    def tallies_by_step(
        self, window: Window, step_s: int, selection: Selection
    ) -> dict[int, Tally]:
        """The counts of each step of a window."""

    def verdicts_by_minute(self, window: Window) -> VerdictsByMinute:
        """Requests that met and missed, by objective and model, and by the minute they ended in."""

    def tallies_by(
        self, dimension: Dimension, window: Window, selection: Selection
    ) -> Mapping[str | None, Tally]:
        """The counts of a window by engine, model and so on."""

    def names(self) -> Mapping[str, list[str]]:
        """The agents, engines, models and tenants of stored requests, sorted."""

    def causes(self, window: Window, selection: Selection) -> CauseSums:
        """The sums of the causes of misses in a window."""

    def causes_by_step(
        self, window: Window, step_s: int, selection: Selection
    ) -> Mapping[int, CauseSums]:
        """The sums of the causes of each step that has any."""

    def causes_by(
        self, dimension: Dimension, window: Window, selection: Selection
    ) -> Mapping[str | None, CauseSums]:
        """The sums of the causes of misses in a window by engine, model and so on."""

    def costs_by(
        self, dimension: Dimension, window: Window, selection: Selection
    ) -> Mapping[str | None, GroupCost]:
        """The cost of the requests of a window by engine, model and so on."""

    def caches_by(
        self, dimension: Dimension, window: Window, selection: Selection
    ) -> Mapping[str | None, GroupCache]:
        """The cached tokens of the requests of a window by tenant and so on."""

    def verdicts_by_length(
        self, window: Window, selection: Selection, total: int
    ) -> tuple[int, Sequence[LengthVerdicts]]:
        """One in how many of `total` requests was counted, and their verdicts by length."""

    def objectives_in_force(self) -> Sequence[Row]:
        """The objectives of all agents."""

    def requests(
        self, wanted: RequestFilter, after: Cursor | None, limit: int, order: RequestOrder
    ) -> PageOf[Row]:
        """Requests in this order."""

    def dots(self, wanted: RequestFilter, by: Latency) -> Dots:
        """The requests with a latency as dots, or a sample of them."""

    def box_counts(self, wanted: RequestFilter, box: Box) -> BoxCounts:
        """The requests that match, in a box and outside of it, by their names."""

    def session_turns(
        self, chosen: Selection, from_s: float, until: float, session: str | None = None
    ) -> Sequence[TurnRequest]:
        """The requests of one session, or of all, that began between two Unix times."""

    def requests_on(self, of: DataSource, from_s: float, until: float) -> Sequence[Row]:
        """The requests that ran on an engine between two Unix times, the oldest first."""

    def samples_of(
        self, of: DataSource, from_s: float, until: float
    ) -> Sequence[tuple[float, Facts]]:
        """The samples of an engine between two Unix times, and the one before."""

    def request(self, request_id: str, span_id: str | None = None) -> Sequence[Row]:
        """Every span with a request id of any kind, the one with this id first."""

    def events(
        self,
        after: Cursor | None,
        limit: int,
        *,
        since: float | None,
        until: float | None,
        agent: str | None,
        engine: str | None,
        gpu: str | None,
        kind: str | None,
        confidence: str | None,
    ) -> PageOf[Row]:
        """Events between Unix times, or of all time, the newest first."""

    def newest_gpu_samples(self, now: float) -> Sequence[Row]:
        """The newest sample of each GPU at a Unix time."""

    def gpu_samples(
        self, gpu: str, since: float, until: float, after: Cursor | None, limit: int
    ) -> PageOf[Row]:
        """The samples of a GPU between Unix times, the newest first."""

    def knows_gpu(self, gpu: str) -> bool:
        """Whether any sample of this GPU is stored."""

    def agents(self) -> Sequence[Row]:
        """Every agent by name."""

    def minutes(
        self, over: Window, chosen: Selection, step_s: int | None = None
    ) -> Sequence[MinuteRow]:
        """The minutes of a window; alike ones are summed.

        With a step in seconds, no sum has minutes of two steps; steps begin with the window.
        """

    def engine_counts(
        self, over: Window, chosen: Selection, step_s: int | None = None
    ) -> Sequence[CountsRow]:
        """What engines counted themselves in the minutes of a window, for steps like `minutes`."""

    def phases(
        self, window: Window, selection: Selection, total: int
    ) -> tuple[int, Sequence[RequestPhases | None]]:
        """One in how many of `total` requests was read, and their phases; None if unknown."""

    def gpu_use(self, since: float, until: float, agent: str | None) -> Sequence[GpuUse]:
        """Samples of all GPUs, the newest first; those beyond a limit are left out."""


class ReadStore(Protocol):
    """Calls a function with the queries of one database, so that all its answers are of that one.

    The function may be called a second time, with the queries of another database.
    """

    def __call__(self, work: Callable[[ApiQueries], Answer]) -> Answer:
        """What the function returned. Raises StoreUnavailable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiContext:
    """What the API serves from: the store, the clock, and the other outputs.

    Windows may be up to `longest_window_s` long, and rows are kept for
    `rows_kept_s`. The store ends a query after `query_limit_s`. `states` has the state of each
    engine that this agent polls, and never waits.
    """

    read: ReadStore
    now: Callable[[], float]
    longest_window_s: float
    rows_kept_s: float
    query_limit_s: float
    metrics: Callable[[str], tuple[bytes, str]]
    engines: Callable[[], Sequence[Row]]
    gpus: Callable[[], Sequence[Row]] = tuple
    setups: Callable[[], Sequence[Row]] = tuple
    states: Callable[[], Mapping[str, EngineStatus]] = dict
    problems: Callable[[], Sequence[str]]
    parts: Callable[[], Mapping[str, str]]
    access: AccessPolicy
    documents: Documents
    # Dollars of 30 days, by tenant.
    tenant_budgets: Mapping[str, float] = field(default_factory=dict)
    version: str
    simulated: bool
    trace_url: str | None = None

    @property
    def longest_row_window_s(self) -> float:
        """How long windows may be whose rows are read."""
        return min(self.rows_kept_s, self.longest_window_s)
