"""The agent's own exposition, made anew from the meter's values at every scrape."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import ALLOWUTF8, UNDERSCORES
from prometheus_client.registry import Collector, CollectorRegistry

from agent.catalog import metrics as m
from agent.catalog.engine_facts import ENGINE_FACTS
from agent.catalog.metric import Kind, Metric
from agent.catalog.metrics import UNKNOWN
from agent.outputs.prometheus.boards import (
    EfficiencyBoard,
    Family,
    HostBoard,
    family_of,
    gpu_families,
)
from agent.outputs.prometheus.latency_histograms import bound_text
from agent.outputs.prometheus.meter import Meter, MeterSnapshot
from agent.records.engine import EngineSample, HistogramSnapshot
from agent.records.gpu import GpuSample

_NAMES_LOOKED_THROUGH = f"escaping={UNDERSCORES}"
_LIMITS = (("ttft", "ttft_s"), ("tpot", "tpot_s"), ("e2e", "e2e_s"))


class AgentExposition(Collector):
    """Collects the families of a meter and encodes them in the format that a scraper accepts."""

    def __init__(
        self,
        meter: Meter,
        info: tuple[str, str, str],
        gpus: Callable[[], Iterable[GpuSample]] = tuple,
        hosts: HostBoard | None = None,
        efficiency: EfficiencyBoard | None = None,
    ) -> None:
        self._meter = meter
        self._gpus = gpus
        self._hosts = hosts or HostBoard()
        self._efficiency = efficiency or EfficiencyBoard()
        self._info = info
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def describe(self) -> Iterable[Family]:
        """No families: registering must not collect."""
        return ()

    def render(self, accept: str) -> tuple[bytes, str]:
        """The exposition and its content type; OpenMetrics with exemplars if it is accepted."""
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):
            # prometheus_client 0.26 fails on a version that is not a number.
            encode, content_type = choose_encoder("")
        if content_type.endswith(_NAMES_LOOKED_THROUGH):
            # All names here are plain, and looking at each of their letters took most of the time.
            encode = partial(encode, escaping=ALLOWUTF8)  # type: ignore[call-arg]
        return encode(self._registry), content_type

    def collect(self) -> Iterator[Family]:
        """Every family that has a value now."""
        return self.families(self._meter.snapshot())

    def families(self, snapshot: MeterSnapshot) -> Iterator[Family]:
        """Every family that has a value, those of the meter at the time of its snapshot."""
        yield from self._own(snapshot)
        yield from self._efficiency.families()
        samples = [sample for sample in snapshot.samples.values() if sample is not None]
        for fact in ENGINE_FACTS:
            yield from _engine_family(fact, samples)
        yield from self._hosts.families()
        yield from gpu_families(self._gpus())

    def _own(self, snapshot: MeterSnapshot) -> Iterator[Family]:
        values = dict(snapshot.counters)
        values[m.AGENT_INFO] = {self._info: 1.0}
        values[m.ENGINE_UP] = {
            (engine,): float(sample is not None) for engine, sample in snapshot.samples.items()
        }
        values[m.SLO_TARGET] = {
            (objective.name,): objective.target for objective in self._meter.objectives
        }
        values[m.SLO_LIMIT] = {
            (objective.name, measure): getattr(objective, field)
            for objective in self._meter.objectives
            for measure, field in _LIMITS
            if getattr(objective, field) is not None
        }
        values |= snapshot.gauges
        for metric in m.AGENT_METRICS:
            if metric.kind is Kind.HISTOGRAM:
                yield from _histogram_family(metric, snapshot)
            elif values.get(metric):
                yield family_of(metric, metric.labels, values[metric].items())


def _histogram_family(metric: Metric, snapshot: MeterSnapshot) -> Iterator[Family]:
    family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
    for (counted, labels), values in snapshot.histograms.items():
        if counted is metric:
            family.add_metric(labels, values.buckets, values.sum)  # type: ignore[arg-type]
    if family.samples:
        yield family


def _engine_family(fact: Metric, samples: Iterable[EngineSample]) -> Iterator[Family]:
    labels = ("engine", "model", *fact.labels)
    family: Family
    if fact.kind is Kind.HISTOGRAM:
        histogram_family = HistogramMetricFamily(fact.name, fact.help, labels=labels)
        for sample in samples:
            histogram = sample.histograms.get(fact.name)
            if histogram is not None:
                of = (sample.engine, sample.model or UNKNOWN)
                histogram_family.add_metric(of, _buckets(histogram), histogram.sum)
        family = histogram_family
    else:
        family = family_of(
            fact,
            labels,
            (
                ((sample.engine, sample.model or UNKNOWN, *own), value)
                for sample in samples
                for (name, own), value in sample.facts.items()
                if name == fact.name
            ),
        )
    if family.samples:
        yield family


def _buckets(histogram: HistogramSnapshot) -> list[tuple[str, float]]:
    return [
        (bound_text(bound), count)
        for bound, count in zip(histogram.bounds, histogram.counts, strict=True)
    ]
