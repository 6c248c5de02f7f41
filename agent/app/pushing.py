"""The push of the agent's metrics over OTLP: what is read, how often, and what is counted of it."""

import logging
from collections.abc import Mapping

import agent
from agent.app.jobs import Jobs
from agent.catalog import own_health as own
from agent.catalog.engine_facts import PROCESS_START_TIME
from agent.catalog.reasons import PUSHES_DROPPED
from agent.outputs.otlp_forwarder import Forwarder
from agent.outputs.otlp_metrics import ExportRequests, MetricsPush, MetricsSnapshot
from agent.outputs.prometheus.agent_exposition import AgentExposition
from agent.outputs.prometheus.meter import Meter, MeterSnapshot
from agent.settings import Settings

_LOG = logging.getLogger(__name__)

SERVICE = "goodput-agent"


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
        bins = {
            (metric.name, labels): values.bins
            for (metric, labels), values in snapshot.histograms.items()
            if values.bins is not None
        }
        return MetricsSnapshot(
            at=now,
            families=self._exposition.families(snapshot),
            bins=bins,
            engines_started_at=_engines_started_at(snapshot),
        )


def resource_of(settings: Settings) -> Mapping[str, str]:
    """The attributes of the resource that sends the metrics: this agent, and its only engine."""
    engines = settings.engines
    return {
        "service.name": SERVICE,
        "service.instance.id": settings.name,
        "service.version": agent.__version__,
        **({"goodput.engine": engines[0].name} if len(engines) == 1 else {}),
        **settings.otlp_metrics.resource,
    }


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
