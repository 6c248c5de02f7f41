"""A histogram that counts a batch of values at once and keeps an exemplar in each bucket.

It can also count in the bins of `agent/analysis/quantiles.py`, for metrics that are pushed.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from prometheus_client import utils
from prometheus_client.samples import Exemplar

from agent.analysis.quantiles import Bins, bin_of, bins_of

Bucket = tuple[str, float, Exemplar | None]
# The id of a request's trace, and the Unix time of the request.
Trace = tuple[str, float]

# Prometheus refuses an exemplar that is older than the one before it in the series, or has the same
# millisecond and a lower value. It cuts milliseconds off a float, so that one of them may vanish.
_APART_S = 0.002


def bound_text(bound: float) -> str:
    """A bucket's bound as every Prometheus client writes it: `0.5`, `1.0`, `+Inf`."""
    return str(utils.floatToGoString(bound))  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class CountedValues:
    """What a histogram holds: cumulative buckets, the sum, and the bins where it has them."""

    buckets: list[Bucket]
    sum: float
    bins: Bins | None = None


class BucketHistogram:
    """Counts by inclusive upper bounds; a value over the last bound counts in `+Inf`."""

    def __init__(self, bounds: Sequence[float], *, with_bins: bool = False) -> None:
        self._bins: Counter[int] | None = Counter() if with_bins else None
        self._bounds = tuple(bounds)
        self._texts = tuple(bound_text(bound) for bound in (*bounds, inf))
        self._counts = [0] * len(self._texts)
        self._sum = 0.0
        self._exemplars: dict[int, tuple[float, Trace]] = {}

    def observe(self, values: Sequence[float], traces: Sequence[Trace]) -> None:
        """Count values, each with its trace; the newest is the last."""
        bounds = self._bounds
        places = [bisect_left(bounds, value) for value in values]
        for place, count in Counter(places).items():
            self._counts[place] += count
        self._sum += sum(values)
        if self._bins is not None:
            self._bins.update(bins_of(values))
        # The newest of each bucket; no Python code runs per value.
        newest = dict(zip(places, zip(values, traces, strict=True), strict=True))
        for place, (value, trace) in newest.items():
            held = self._exemplars.get(place)
            if held is None or trace[1] >= held[1][1] + _APART_S:
                self._exemplars[place] = value, trace

    def add(self, counts: Mapping[float, int]) -> None:
        """Count values by how often they occurred, without exemplars."""
        for value, count in counts.items():
            self._counts[bisect_left(self._bounds, value)] += count
            self._sum += value * count
            if self._bins is not None:
                self._bins[bin_of(value)] += count

    def buckets(self) -> list[Bucket]:
        """Cumulative buckets as prometheus_client takes them, `+Inf` last."""
        seen = 0
        buckets: list[Bucket] = []
        for place, text in enumerate(self._texts):
            seen += self._counts[place]
            buckets.append((text, float(seen), self._exemplar(place)))
        return buckets

    def _exemplar(self, place: int) -> Exemplar | None:
        found = self._exemplars.get(place)
        if found is None:
            return None
        value, (trace_id, at) = found
        return Exemplar({"trace_id": trace_id}, value, at)

    def counted(self) -> CountedValues:
        """Everything it holds now."""
        bins = None if self._bins is None else dict(self._bins)
        return CountedValues(self.buckets(), self._sum, bins)

    @property
    def sum(self) -> float:
        """The sum of all values."""
        return self._sum
