"""Two runs, cut into cells of time, of which each figure makes the blocks that it needs.

Requests that are near in time wait in the same queue, so they are not independent evidence. Blocks
of time nearly are, if they are long enough: Kunsch, "The jackknife and the bootstrap for general
stationary observations" (1989). How long that is differs by figure (`dependence.py`).

Runs of whole days have a pattern: the same hours of the day are alike. Their cells follow the
clock, so that each is compared with that of the same hour.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from agent.analysis.comparison.run_columns import RunColumns
from agent.catalog.time_units import DAY_S, MINUTE_S
from agent.records.columns import Array, Integers

# Of the shorter run: a number that can be divided into 8 to 40 equal blocks.
_CELLS = 480
# Of the longer run: each percentile has a hundred counts for every cell.
_MOST_CELLS = 4096
_WEEK_S = 7 * DAY_S
# TimeCells that follow the clock divide a day.
_CLOCK_S = tuple(minutes * MINUTE_S for minutes in (60, 120, 180))
# A database may begin some minutes after midnight.
_UNEQUAL = 0.03


class TimeCells(NamedTuple):
    """TimeCells of equal time: how many in a run, and where each request or minute is."""

    number: int
    indices: Integers

    def sums(self, values: Array) -> Array:
        """The sum of the known values in each cell."""
        return np.bincount(self.indices, np.nan_to_num(values), self.number).astype(float)


class Pattern(NamedTuple):
    """The place of each cell in a period (a day or a week), and how many periods the run has.

    Both runs together have each place `repeated` times.
    """

    places: Integers
    number: int
    periods: float
    days: float
    repeated: float


class SortedColumn(NamedTuple):
    """The known values of a column in order, and the cell of each."""

    values: Array
    cells: Integers


@dataclass(frozen=True, slots=True, eq=False)
class SplitRun:
    """A run with the cells of its requests and of its minutes.

    The first cell begins `early_s` before the run.
    """

    run: RunColumns
    cells: TimeCells
    minutes: TimeCells
    cell_s: float
    early_s: float = 0.0
    pattern: Pattern | None = None
    _sorted: dict[str, SortedColumn] = field(default_factory=dict)

    @property
    def ends_s(self) -> Array:
        """When each cell ends, from the begin of the run."""
        ends_s: Array = self.cell_s * np.arange(1, self.cells.number + 1.0) - self.early_s
        ends_s[-1] = self.run.length_s
        return ends_s

    @property
    def seconds(self) -> Array:
        """The length of each cell."""
        return np.diff(self.ends_s, prepend=0.0)

    def events(self, at_s: Array) -> Array:
        """The number of events in each cell."""
        return cells_of(at_s, self.cells.number, self.cell_s, self.early_s).sums(np.ones(len(at_s)))

    def sorted_column(self, name: str) -> SortedColumn:
        """A column of the run; it is sorted once."""
        if name not in self._sorted:
            values = getattr(self.run, name)
            order = np.argsort(values)[: np.count_nonzero(~np.isnan(values))]
            self._sorted[name] = SortedColumn(values[order], self.cells.indices[order])
        return self._sorted[name]


def cells_of(at_s: Array, number: int, cell_s: float, early_s: float = 0.0) -> TimeCells:
    """The cell of each time; what is left over at the end of a run belongs to the last one."""
    return TimeCells(number, np.clip(((at_s + early_s) / cell_s).astype(np.intp), 0, number - 1))


def split_runs(before: RunColumns, after: RunColumns) -> tuple[SplitRun, SplitRun]:
    """Both runs in cells of one length; if both have the same hours of the day, by the clock."""
    by_clock = _by_clock((before, after))
    if by_clock is not None:
        return by_clock
    lengths_s = before.length_s, after.length_s
    cell_s = max(min(lengths_s) / _CELLS, max(lengths_s) / _MOST_CELLS)
    first, second = (
        _split(run, max(int(run.length_s / cell_s + 1e-9), 1), cell_s) for run in (before, after)
    )
    return first, second


def _split(
    run: RunColumns,
    number: int,
    cell_s: float,
    early_s: float = 0.0,
    pattern: Pattern | None = None,
) -> SplitRun:
    requests, minutes = (
        cells_of(at_s, number, cell_s, early_s) for at_s in (run.ended_s, run.minutes.at_s)
    )
    return SplitRun(run, requests, minutes, cell_s, early_s, pattern)


def _by_clock(runs: Sequence[RunColumns]) -> tuple[SplitRun, SplitRun] | None:
    """By the hour of the week if both runs have whole weeks, else of the day.

    None if a run does not have every hour equally often: then the pattern would differ.
    """
    for period_s in (_WEEK_S, DAY_S):
        if all(_is_whole(run, period_s) for run in runs):
            longest_s = max(run.length_s for run in runs)
            for cell_s in _CLOCK_S:
                if longest_s / cell_s < _MOST_CELLS:
                    repeated = max(round(sum(run.length_s for run in runs) / period_s), 2)
                    first, second = (
                        _split_by_clock(run, cell_s, period_s, repeated) for run in runs
                    )
                    return first, second
    return None


def _is_whole(run: RunColumns, period_s: float) -> bool:
    periods = run.length_s / period_s
    return run.began_at is not None and abs(periods - max(round(periods), 1)) <= _UNEQUAL


def _split_by_clock(run: RunColumns, cell_s: float, period_s: float, repeated: int) -> SplitRun:
    began_at = run.began_at or 0.0
    early_s = began_at % cell_s
    number = max(int(np.ceil((run.length_s + early_s) / cell_s - 1e-6)), 1)
    places_of_period = round(period_s / cell_s)
    first = round((began_at - early_s) / cell_s)
    places = (first + np.arange(number)) % places_of_period
    pattern = Pattern(
        places, places_of_period, run.length_s / period_s, run.length_s / DAY_S, repeated
    )
    return _split(run, number, cell_s, early_s, pattern)
