"""One run as columns, made of single requests, and cut into blocks of equal time.

Requests that are near in time wait in the same queue, so they are not independent evidence. Blocks
of time nearly are, if they are long enough: Kunsch, "The jackknife and the bootstrap for general
stationary observations" (1989).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

import numpy as np

from agent.analysis.histogram_bounds import Bounds
from agent.analysis.verdicts import judge
from agent.catalog.definitions import Verdict
from agent.records.columns import Array, Integers
from agent.records.objective import Objective
from agent.records.request import BY_CLIENT, FAILED, RequestRecord, Status


def _none() -> Array:
    return np.empty(0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MinuteColumns:
    """Stored minutes. Unknown is NaN.

    `at_s` are seconds from the begin of the run. FLOPs and bytes are those that were needed, and
    those that the GPUs could have done in the known time.
    """

    at_s: Array = field(default_factory=_none)
    flops: Array = field(default_factory=_none)
    possible_flops: Array = field(default_factory=_none)
    moved_bytes: Array = field(default_factory=_none)
    possible_bytes: Array = field(default_factory=_none)
    bill_usd: Array = field(default_factory=_none)
    output_tokens: Array = field(default_factory=_none)
    good_tokens: Array = field(default_factory=_none)


class ObjectiveColumn(NamedTuple):
    """The target of an objective, and `met` as in RunColumns; NaN if it does not apply."""

    target: float
    met: Array


class ObjectiveBounds(NamedTuple):
    """The target of an objective, and the bounds of its attainment."""

    target: float
    attainment: Bounds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunColumns:
    """The requests of a run, one value each in every column. Unknown is NaN.

    Times are in seconds; `ended_s` counts from the begin of the run, which lasts `length_s`.
    `met` is 1 for a request that met its objectives and 0 for one that missed. `failed` is 1 for a
    failure of the service, and NaN for what the client cancelled or spoilt. `events` are the times
    of failures of engines by kind, `causes` counts missed requests by their first cause; both are
    None if the source of the run has no events. `configured_load` holds the settings of a load
    generator, `objectives` the objectives that have a target. `began_at` is a Unix time.
    """

    name: str
    length_s: float
    ended_s: Array
    ttft_s: Array
    tpot_s: Array
    e2e_s: Array
    input_tokens: Array
    output_tokens: Array
    met: Array
    failed: Array
    minutes: MinuteColumns = field(default_factory=MinuteColumns)
    events: Mapping[str, Array] | None = None
    causes: Mapping[str, int] | None = None
    configured_load: Mapping[str, str] = field(default_factory=dict)
    objectives: Mapping[str, ObjectiveColumn] = field(default_factory=dict)
    began_at: float | None = None

    @property
    def requests(self) -> int:
        """How many there are."""
        return len(self.ended_s)


class FiguresSource(Enum):
    """Where figures without single requests come from."""

    RESULT_FILE = auto()
    ENGINE = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """A run of which only figures are known, by the names of measures, and no single request.

    Between `bounds` lie those of an engine's own histograms. `source` says who knows the figures.
    `events`, `objectives` and `began_at` are as in RunColumns.
    """

    name: str
    requests: int
    length_s: float
    figures: Mapping[str, float]
    bounds: Mapping[str, Bounds] = field(default_factory=dict)
    source: FiguresSource = FiguresSource.RESULT_FILE
    configured_load: Mapping[str, str] = field(default_factory=dict)
    events: Mapping[str, Array] | None = None
    objectives: Mapping[str, ObjectiveBounds] = field(default_factory=dict)
    began_at: float | None = None


# The name of an objective that is no setting.
GIVEN_LIMITS = "the given limits"
_MET = {Verdict.MET: 1.0, Verdict.MISSED: 0.0, Verdict.UNDETERMINED: np.nan}
# How a status counts in an error ratio.
FAILURE = {status: np.nan if status in BY_CLIENT else float(status in FAILED) for status in Status}


def run_of(
    name: str,
    records: Sequence[RequestRecord],
    objective: Objective | None,
    configured_load: Mapping[str, str],
    target: float | None = None,
) -> RunColumns:
    """A run that begins with its first request and ends with its last one.

    `target` is the share of requests that must meet the objective.
    """
    began_at = min(record.started_at for record in records)

    def column(field: str) -> Array:
        # None becomes NaN.
        return np.array([getattr(record, field) for record in records], dtype=float)

    ended_s = column("ended_at") - began_at
    met = np.array(
        [np.nan if objective is None else _MET[judge(each, objective)] for each in records]
    )
    return RunColumns(
        name=name,
        length_s=max(float(ended_s.max()), 1e-3),
        ended_s=ended_s,
        ttft_s=column("ttft_s"),
        tpot_s=column("tpot_s"),
        e2e_s=column("e2e_s"),
        input_tokens=column("input_tokens"),
        output_tokens=column("output_tokens"),
        met=met,
        failed=np.array([FAILURE[record.status] for record in records]),
        configured_load=configured_load,
        objectives={} if target is None else {GIVEN_LIMITS: ObjectiveColumn(target, met)},
    )


# Fewer blocks can hardly show a difference: of 8 and 8, one order in 6,435 is as extreme.
MIN_BLOCKS = 8
_NUMBERS = (40, 32, 24, 20, 16, 12, 10, MIN_BLOCKS)
# Of the longer run: all of them are shuffled thousands of times.
_MOST_BLOCKS = 1000
_REQUESTS_PER_BLOCK = 10
# A block that is shorter than its requests shares them with the next one.
_REQUESTS_LONG = 2.0
# With this correlation of each block with the next, a mean varies 1.3 times as much as without.
_MOST_ALIKE = 0.25


class Blocks(NamedTuple):
    """Blocks of equal time: how many in a run, and where each request or minute is."""

    number: int
    indices: Integers

    def sums(self, values: Array) -> Array:
        """The sum of the known values in each block."""
        return np.bincount(self.indices, np.nan_to_num(values), self.number).astype(float)

    def groups(self, values: Array) -> Iterator[Array]:
        """The known values of each block."""
        known = np.isfinite(values)
        indices, values = self.indices[known], values[known]
        order = np.argsort(indices, kind="stable")
        ends = np.searchsorted(indices[order], np.arange(1, self.number))
        yield from np.split(values[order], ends)


@dataclass(frozen=True, slots=True, eq=False)
class SplitRun:
    """A run with the blocks of its requests and of its minutes.

    Each block is correlated with the next one at least by `likeness`.
    """

    run: RunColumns
    blocks: Blocks
    minutes: Blocks
    block_s: float
    likeness: float

    @property
    def seconds(self) -> Array:
        """The length of each block."""
        lengths = np.full(self.blocks.number, self.block_s)
        lengths[-1] = self.run.length_s - self.block_s * (self.blocks.number - 1)
        return lengths

    def events(self, at_s: Array) -> Array:
        """The number of events in each block."""
        return blocks_of(at_s, self.run.length_s, self.block_s).sums(np.ones(len(at_s)))


def split_runs(before: RunColumns, after: RunColumns) -> tuple[SplitRun, SplitRun]:
    """Both runs in blocks of one length."""
    number, likeness = _number((before, after))
    lengths_s = before.length_s, after.length_s
    block_s = max(min(lengths_s) / number, max(lengths_s) / _MOST_BLOCKS)
    first, second = (
        SplitRun(
            run,
            blocks_of(run.ended_s, run.length_s, block_s),
            blocks_of(run.minutes.at_s, run.length_s, block_s),
            block_s,
            likeness,
        )
        for run in (before, after)
    )
    return first, second


def blocks_of(at_s: Array, length_s: float, block_s: float) -> Blocks:
    """Cut a run in blocks; what is left over at its end belongs to the last one."""
    count = max(int(length_s / block_s + 1e-9), 1)
    return Blocks(count, np.clip((at_s / block_s).astype(np.intp), 0, count - 1))


def _number(runs: Sequence[RunColumns]) -> tuple[int, float]:
    """As many blocks of the shorter run as can be without each being like the next.

    Also how alike the blocks are at least: if shorter ones are alike, these still are in part.
    """
    shorter_s, likeness = min(run.length_s for run in runs), 0.0
    for number in _NUMBERS:
        block_s = shorter_s / number
        if all(_are_long(run, block_s) for run in runs):
            if all(_likeness(run, block_s) <= _MOST_ALIKE for run in runs):
                return number, likeness
            likeness = _MOST_ALIKE
    return MIN_BLOCKS, likeness


def _are_long(run: RunColumns, block_s: float) -> bool:
    times_s = run.e2e_s[run.e2e_s > 0]
    if len(times_s) and block_s < _REQUESTS_LONG * float(np.median(times_s)):
        return False
    return run.requests * block_s >= _REQUESTS_PER_BLOCK * run.length_s


def _likeness(run: RunColumns, block_s: float) -> float:
    """The correlation of the mean of a block, and of the next one; 0 if it is unknown."""
    blocks, times_s = blocks_of(run.ended_s, run.length_s, block_s), run.e2e_s
    counts = blocks.sums(np.isfinite(times_s).astype(float))
    sums = blocks.sums(times_s)
    means = sums[counts > 0] / counts[counts > 0]
    if len(means) < MIN_BLOCKS or np.ptp(means) == 0:
        return 0.0
    apart = means - means.mean()
    return float(apart[:-1] @ apart[1:] / (apart @ apart))
