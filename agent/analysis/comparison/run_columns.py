"""One run as columns: what each request took, and what each minute used."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from agent.records.columns import Array


def _none() -> Array:
    return np.empty(0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MinuteColumns:
    """Booked minutes. Unknown is NaN.

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunColumns:
    """The requests of a run, one value each in every column. Unknown is NaN.

    Times are in seconds; `ended_s` counts from the begin of the run, which lasts `length_s`.
    `met` is 1 for a request that met its objectives and 0 for one that missed. `failed` is 1 for a
    failure of the service, and NaN for what the client cancelled or spoilt. `events` are the times
    of failures of engines by kind, `causes` counts missed requests by their first cause; both are
    None where the source of the run has no events. `configured_load` holds the settings of a load
    generator.
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

    @property
    def requests(self) -> int:
        """How many there are."""
        return len(self.ended_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """A run of which only figures are known, by the names of measures, and no single request."""

    name: str
    requests: int
    length_s: float
    figures: Mapping[str, float]
    configured_load: Mapping[str, str] = field(default_factory=dict)
