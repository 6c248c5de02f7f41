"""What an engine counted itself in some time: increases of its counters and of its histograms."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from agent.records.engine import HistogramSnapshot
from agent.records.gpu import FactKey, Facts


class GaugeSum(NamedTuple):
    """A gauge over some time: its integral over the seconds in which it was known; its maximum."""

    value_s: float
    known_s: float
    maximum: float

    @property
    def mean(self) -> float:
        """The mean over the known seconds."""
        return self.value_s / self.known_s


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounts:
    """What an engine counted between samples. What it does not count is absent.

    `counters` are increases. A histogram has the increases of its cumulative counts and of its sum.
    `covered_s` are the seconds between the samples, in which every increase is seen.
    """

    covered_s: float
    counters: Facts = field(default_factory=dict)
    gauges: Mapping[FactKey, GaugeSum] = field(default_factory=dict)
    histograms: Mapping[str, HistogramSnapshot] = field(default_factory=dict)


class CountsRow(NamedTuple):
    """The counts of an engine in a stored minute, hour or day; times in Unix seconds.

    `until` is the time of the newest sample in it.
    """

    agent: str
    engine: str
    model: str | None
    width_s: int
    starts_at: int
    until: float
    counts: EngineCounts
