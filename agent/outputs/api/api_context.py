"""What the API serves from: the store's queries, the clock, and the other outputs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agent.analysis.cause_sums import CauseSums
from agent.analysis.tally import Tally
from agent.outputs.api.agent_routes import AgentQueries
from agent.outputs.api.breakdown_routes import BreakdownQueries
from agent.outputs.api.efficiency_response import ReadMinutes
from agent.outputs.api.gpu_routes import GpuQueries
from agent.outputs.api.length_routes import LengthQueries
from agent.outputs.api.objective_routes import ObjectiveQueries
from agent.outputs.api.request_routes import RequestQueries
from agent.records.queries import Cursor, PageOf, Selection, Window
from agent.settings.access import Door

Row = Mapping[str, Any]


class ApiQueries(
    RequestQueries,
    GpuQueries,
    BreakdownQueries,
    LengthQueries,
    ObjectiveQueries,
    AgentQueries,
    Protocol,
):
    """The store's queries that the API needs."""

    def tallies_by_step(
        self, window: Window, step_s: int, selection: Selection
    ) -> dict[int, Tally]:
        """The counts of each step of a window."""

    def causes(self, window: Window, selection: Selection) -> CauseSums:
        """The sums of the causes of misses in a window."""

    def causes_by_step(
        self, window: Window, step_s: int, selection: Selection
    ) -> Mapping[int, CauseSums]:
        """The sums of the causes of each step that has any."""

    def events(
        self,
        after: Cursor | None,
        limit: int,
        *,
        since: float | None,
        agent: str | None,
        engine: str | None,
        gpu: str | None,
        kind: str | None,
        confidence: str | None,
    ) -> PageOf[Row]:
        """Events since a Unix time, or of all time, the newest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiContext:
    """What the API serves from: the store's queries, the clock, and the other outputs.

    Windows may be up to `longest_window_s` long, and rows are kept for
    `rows_kept_s`. The store ends a query after `query_limit_s`.
    """

    queries: ApiQueries
    minutes: ReadMinutes
    now: Callable[[], float]
    longest_window_s: float
    rows_kept_s: float
    query_limit_s: float
    metrics: Callable[[str], tuple[bytes, str]]
    engines: Callable[[], Sequence[Row]]
    problems: Callable[[], Sequence[str]]
    parts: Callable[[], Mapping[str, str]]
    door: Door
    documentation: str
    runbooks: Mapping[str, str]
    version: str
    simulated: bool
