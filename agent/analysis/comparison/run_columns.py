"""One run as columns, made of single requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

import numpy as np

from agent.analysis.histogram_bounds import Bounds
from agent.analysis.verdicts import judge
from agent.catalog.definitions import Verdict
from agent.records.columns import Array
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
    NOBODY = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """A run of which only figures are known, by the names of measures, and no single request.

    Between `bounds` lie those of an engine's own histograms. `source` says who knows the figures,
    `hint` how single requests get into such a file.
    `events`, `objectives` and `began_at` are as in RunColumns.
    """

    name: str
    requests: int
    length_s: float
    figures: Mapping[str, float]
    bounds: Mapping[str, Bounds] = field(default_factory=dict)
    source: FiguresSource = FiguresSource.RESULT_FILE
    hint: str | None = None
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
