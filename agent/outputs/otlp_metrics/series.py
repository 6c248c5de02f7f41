"""The series of a metric family, with the buckets of a histogram put together."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isinf

from prometheus_client.core import Metric as Family
from prometheus_client.samples import Exemplar, Sample

from agent.analysis.quantiles import Bins
from agent.catalog.metric import Kind

Labels = tuple[tuple[str, str], ...]
# By the name of a histogram and the values of its labels, in their order.
BinsOf = Mapping[tuple[str, tuple[str, ...]], Bins]

_BOUND = "le"


@dataclass(slots=True)
class Buckets:
    """The values of a histogram by explicit upper bounds, the highest of which is infinite."""

    bounds: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    sum: float | None = None
    exemplars: list[Exemplar] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PushedSeries:
    """One series of a family: a number, or buckets."""

    labels: Labels
    value: float = 0.0
    buckets: Buckets | None = None


@dataclass(frozen=True, slots=True)
class SeriesFamily:
    """All series of one name; the exposition has the same name."""

    name: str
    kind: Kind
    help: str
    series: Iterable[PushedSeries]


def series_of(family: Family) -> SeriesFamily:
    """The series of a family; a counter has the ending `_total`, as on the exposition."""
    kind = Kind(family.type)
    name = f"{family.name}_total" if kind is Kind.COUNTER else family.name
    series = _histograms(family.samples) if kind is Kind.HISTOGRAM else _numbers(family.samples)
    return SeriesFamily(name, kind, family.documentation, series)


def _numbers(samples: Iterable[Sample]) -> Iterator[PushedSeries]:
    for sample in samples:
        yield PushedSeries(tuple(sample.labels.items()), sample.value)


def _histograms(samples: Iterable[Sample]) -> Iterator[PushedSeries]:
    found: dict[Labels, Buckets] = {}
    for sample in samples:
        labels = tuple(pair for pair in sample.labels.items() if pair[0] != _BOUND)
        buckets = found.setdefault(labels, Buckets())
        if _BOUND in sample.labels:
            _add_bucket(buckets, sample)
        elif sample.name.endswith("_sum"):
            buckets.sum = sample.value
    for labels, buckets in found.items():
        yield PushedSeries(labels, buckets=buckets)


def _add_bucket(buckets: Buckets, sample: Sample) -> None:
    bound = float(sample.labels[_BOUND])
    if not isinf(bound):
        buckets.bounds.append(bound)
    # Prometheus counts up to each bound, OTLP within each bucket. An engine may count while its
    # exposition is made, so a difference may be below 0.
    buckets.counts.append(max(int(sample.value) - sum(buckets.counts), 0))
    if sample.exemplar is not None:
        buckets.exemplars.append(sample.exemplar)
