"""The push of the agent's metrics over OTLP: what is read, how often, and what is counted of it."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from math import isinf

from opentelemetry.sdk.resources import OTELResourceDetector
from prometheus_client.core import Metric as Family

import agent
from agent.app.jobs import Jobs
from agent.catalog import metrics as m
from agent.catalog import own_health as own
from agent.catalog.engine_facts import PROCESS_START_TIME
from agent.catalog.genai import DEFAULT_PROVIDER, GENAI_METRICS
from agent.catalog.metric import Metric
from agent.catalog.reasons import PUSHES_DROPPED
from agent.outputs.otlp_forwarder import Forwarder
from agent.outputs.otlp_metrics import (
    Buckets,
    ExportRequests,
    Labels,
    MetricsPush,
    MetricsSnapshot,
    PushedSeries,
    SeriesFamily,
)
from agent.outputs.prometheus.agent_exposition import AgentExposition
from agent.outputs.prometheus.latency_histograms import CountedValues
from agent.outputs.prometheus.meter import Meter, MeterSnapshot
from agent.settings import Settings

_LOG = logging.getLogger(__name__)

SERVICE = "goodput-agent"
# A receiver that makes Prometheus' names of OpenTelemetry's would have two metrics in one.
_OTHERWISE_NAMED = frozenset(metric.name for metric in (m.TTFT, m.TPOT, m.DURATION))


def counts_by_convention(settings: Settings) -> bool:
    """Whether the meter must count latencies by OpenTelemetry's conventions."""
    push = settings.otlp_metrics
    return push.endpoint is not None and push.names == "opentelemetry"


def counts_bins(settings: Settings) -> bool:
    """Whether the meter must count in bins, from which exponential histograms are made."""
    push = settings.otlp_metrics
    return push.endpoint is not None and push.histograms == "exponential"


class Pushing:
    """Pushes what `/metrics` shows at an interval, and once more at the end."""

    def __init__(
        self,
        settings: Settings,
        endpoint: str,
        meter: Meter,
        exposition: AgentExposition,
        started_at: float,
    ) -> None:
        """`started_at` is the Unix time when the meter began to count."""
        self._interval_s = settings.otlp_metrics.interval
        self._meter = meter
        self._exposition = exposition
        self._by_convention = counts_by_convention(settings)
        # Kept while an engine is away: with another name its series would begin again.
        self._providers: dict[str, str] = {
            engine.name: engine.kind for engine in settings.engines if engine.kind != "auto"
        }
        requests = ExportRequests(
            resource_of(settings), agent.__version__, started_at, settings.otlp_metrics.max_buckets
        )
        self._push = MetricsPush(
            settings.otlp_metrics,
            endpoint,
            self._read,
            requests,
            _Counter(meter),
            proxy=settings.http_proxy,
            ca=settings.tls.ca,
        )

    @property
    def forwarder(self) -> Forwarder:
        """What sends the exports."""
        return self._push.forwarder

    def schedule(self, jobs: Jobs) -> None:
        """Push at the configured interval."""
        jobs.every(self._interval_s, "push metrics", self._push.push)

    def close(self, now: float, grace_s: float) -> None:
        """Push the last values, and wait `grace_s` at most until all is sent."""
        try:
            self._push.push(now)
        except Exception:
            _LOG.exception("the last metrics could not be pushed")
        self.forwarder.close(grace_s)

    def _read(self, now: float) -> MetricsSnapshot:
        snapshot = self._meter.snapshot()
        self._providers.update(_providers(snapshot))
        bins = {
            (metric.name, labels): values.bins
            for (metric, labels), values in snapshot.histograms.items()
            if values.bins is not None
        }
        return MetricsSnapshot(
            at=now,
            families=self._families(snapshot),
            bins=bins,
            engines_started_at=_engines_started_at(snapshot),
            conventional=conventional_families(snapshot.histograms, self._providers),
        )

    def _families(self, snapshot: MeterSnapshot) -> Iterable[Family]:
        for family in self._exposition.families(snapshot):
            if not (self._by_convention and family.name in _OTHERWISE_NAMED):
                yield family


def resource_of(settings: Settings) -> Mapping[str, str]:
    """The attributes of the resource that sends the metrics: this agent, and its only engine.

    Those of the variables of OpenTelemetry's SDKs and, above all, of the settings replace ours.
    """
    engines = settings.engines
    of_environment = OTELResourceDetector().detect().attributes
    return {
        "service.name": SERVICE,
        "service.instance.id": settings.name,
        "service.version": agent.__version__,
        **({"goodput.engine": engines[0].name} if len(engines) == 1 else {}),
        **{name: str(value) for name, value in of_environment.items()},
        **settings.otlp_metrics.resource,
    }


def _providers(snapshot: MeterSnapshot) -> Mapping[str, str]:
    samples = snapshot.samples.items()
    return {engine: sample.dialect for engine, sample in samples if sample is not None}


def _engines_started_at(snapshot: MeterSnapshot) -> Mapping[str, float]:
    key = (PROCESS_START_TIME.name, ())
    return {
        engine: sample.facts[key]
        for engine, sample in snapshot.samples.items()
        if sample is not None and key in sample.facts
    }


class _Counter:
    """Counts exports by the meter. Its series exist at zero if there is a push."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        meter.count(own.METRICS_PUSHED, by=0)
        meter.count(own.PUSH_POINTS_REJECTED, by=0)
        for reason in PUSHES_DROPPED:
            meter.count(own.PUSH_DROPPED, reason, by=0)

    def forwarded(self) -> None:
        self._meter.count(own.METRICS_PUSHED)

    def forward_dropped(self, reason: str) -> None:
        self._meter.count(own.PUSH_DROPPED, reason)

    def points_rejected(self, points: int) -> None:
        self._meter.count(own.PUSH_POINTS_REJECTED, by=points)


def conventional_families(
    histograms: Mapping[tuple[Metric, tuple[str, ...]], CountedValues],
    providers: Mapping[str, str],
) -> Iterator[SeriesFamily]:
    """The latencies by OpenTelemetry's conventions; `providers` has the software of each engine."""
    found: dict[Metric, list[PushedSeries]] = {}
    for (metric, values), counted in histograms.items():
        if metric in GENAI_METRICS:
            labels = _conventional_labels(dict(zip(metric.labels, values, strict=True)), providers)
            series = PushedSeries(labels, buckets=_buckets(counted), bins=counted.bins)
            found.setdefault(metric, []).append(series)
    for metric, all_series in found.items():
        yield SeriesFamily(metric.name, metric.kind, metric.help, all_series)


def _conventional_labels(of: Mapping[str, str], providers: Mapping[str, str]) -> Labels:
    given = {
        "gen_ai.operation.name": of["operation"],
        "gen_ai.provider.name": providers.get(of["engine"], DEFAULT_PROVIDER),
        "gen_ai.request.model": "" if of["model"] == m.UNKNOWN else of["model"],
        "error.type": of["error"],
        "goodput.engine": of["engine"],
    }
    return tuple((name, value) for name, value in given.items() if value)


def _buckets(counted: CountedValues) -> Buckets:
    buckets = Buckets(sum=counted.sum)
    before = 0.0
    for bound, cumulative, exemplar in counted.buckets:
        if not isinf(float(bound)):
            buckets.bounds.append(float(bound))
        buckets.counts.append(int(cumulative - before))
        before = cumulative
        if exemplar is not None:
            buckets.exemplars.append(exemplar)
    return buckets
