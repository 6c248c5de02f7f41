"""The push of metrics to endpoints over HTTP: retries, drops, and what is counted of them."""

import gzip
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsPartialSuccess,
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AGGREGATION_TEMPORALITY_CUMULATIVE,
    DataPointFlags,
    Metric,
)
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.metrics.view import ExponentialBucketHistogramAggregation, View
from prometheus_client.parser import text_string_to_metric_families

from agent.analysis.quantiles import RELATIVE_ERROR, SCALE, relative_error
from agent.app.pushing import conventional_families
from agent.catalog import engine_facts as facts
from agent.catalog import metrics as m
from agent.catalog.reasons import PUSHES_DROPPED
from agent.outputs.otlp_metrics import (
    MAX_WAITING,
    ExportRequests,
    MetricsPush,
    MetricsSnapshot,
)
from agent.outputs.prometheus.agent_exposition import AgentExposition, HostBoard
from agent.outputs.prometheus.meter import FORGOTTEN_AFTER_S, MAX_UNCONFIGURED, Meter
from agent.records.request import ProxyView
from agent.settings import Settings
from agent.settings.settings_model import OtlpMetricsSettings
from tests.outputs.otlp_destinations import (
    WITHIN_S,
    Destination,
    ForwardCounts,
    HttpResponse,
    http_destination,
)
from tests.outputs.prometheus.filled import (
    FULL_SAMPLE,
    HOST_SAMPLE,
    INFO,
    JOINED,
    count,
    exposition_of,
    filled_meter,
)
from tests.records.making import NOON, objective, record

STARTED_AT = NOON - 3600.0
RESOURCE = {"service.name": "goodput-agent", "service.instance.id": "agent-0"}


@dataclass(frozen=True, slots=True)
class Pushed:
    """One point, its metric and its kind."""

    metric: Metric
    kind: str
    labels: Mapping[str, str]
    point: Any


def request_of(
    meter: Meter,
    requests: ExportRequests | None = None,
    *,
    at: float = NOON,
    engines_started_at: Mapping[str, float] | None = None,
    max_buckets: int = 160,
) -> ExportMetricsServiceRequest:
    """The export of a meter, of a new agent where `requests` is None; serialised and parsed."""
    hosts = HostBoard()
    hosts.sample("chat-0", HOST_SAMPLE)
    snapshot = meter.snapshot()
    given = MetricsSnapshot(
        at=at,
        families=AgentExposition(meter, INFO, hosts=hosts).families(snapshot),
        bins={
            (metric.name, labels): values.bins
            for (metric, labels), values in snapshot.histograms.items()
            if values.bins is not None
        },
        engines_started_at=engines_started_at or {},
        conventional=conventional_families(snapshot.histograms, {}),
    )
    made = requests or requests_of_agent(max_buckets)
    return ExportMetricsServiceRequest.FromString(made.request(given).SerializeToString())


def requests_of_agent(max_buckets: int = 160) -> ExportRequests:
    return ExportRequests(RESOURCE, "1.2.3", STARTED_AT, max_buckets)


def points_of(request: ExportMetricsServiceRequest) -> Sequence[Pushed]:
    return list(_points(request))


def _points(request: ExportMetricsServiceRequest) -> Iterator[Pushed]:
    (resource,) = request.resource_metrics
    (scope,) = resource.scope_metrics
    for metric in scope.metrics:
        kind = metric.WhichOneof("data")
        assert kind is not None
        for point in getattr(metric, kind).data_points:
            labels = {pair.key: pair.value.string_value for pair in point.attributes}
            yield Pushed(metric, kind, labels, point)


def point(request: ExportMetricsServiceRequest, name: str, **labels: str) -> Pushed:
    (found,) = [
        pushed
        for pushed in points_of(request)
        if pushed.metric.name == name and labels.items() <= pushed.labels.items()
    ]
    return found


ENDED = DataPointFlags.DATA_POINT_FLAGS_NO_RECORDED_VALUE_MASK
TTFT = m.TTFT.name


def meter_with(*ttfts_s: float) -> Meter:
    meter = Meter((), ["chat-0"], with_bins=True)
    count(meter, *(record(number, ttft_s=ttft_s) for number, ttft_s in enumerate(ttfts_s)))
    return meter


def test_every_sample_of_the_exposition_is_pushed_under_its_name_with_its_labels_and_value() -> (
    None
):
    meter = filled_meter()
    meter.sample(FULL_SAMPLE)
    pushed = {
        (one.metric.name, frozenset(one.labels.items())): one
        for one in points_of(request_of(meter))
    }
    found = set()
    for family in text_string_to_metric_families(exposition_of(meter)):
        for sample in family.samples:
            if family.type == "histogram":
                labels = {key: value for key, value in sample.labels.items() if key != "le"}
                key = (family.name, frozenset(labels.items()))
                histogram = pushed[key].point
                if sample.name.endswith("_count"):
                    assert histogram.count == sample.value
                elif sample.name.endswith("_sum"):
                    assert histogram.sum == sample.value
                else:
                    below = sum(float(sample.labels["le"]) > b for b in histogram.explicit_bounds)
                    assert sum(histogram.bucket_counts[: below + 1]) == sample.value
            else:
                key = (sample.name, frozenset(sample.labels.items()))
                assert pushed[key].point.as_double == sample.value
                assert pushed[key].kind == {"counter": "sum", "gauge": "gauge"}[family.type]
            assert pushed[key].metric.description == family.documentation
            found.add(key)
    assert found == set(pushed)


def test_a_counter_is_cumulative_and_monotonic_since_the_agent_began() -> None:
    request = request_of(filled_meter())
    of = {"engine": "chat-0", "model": "llama"}
    one = point(request, "llm_requests_total", status="error", **of)
    assert one.metric.sum.is_monotonic
    assert one.metric.sum.aggregation_temporality == AGGREGATION_TEMPORALITY_CUMULATIVE
    assert one.point.start_time_unix_nano == STARTED_AT * 1_000_000_000
    assert one.point.time_unix_nano == NOON * 1_000_000_000
    # Those of UCUM.
    assert {each.metric.unit for each in points_of(request)} == {"s", "By", "1", ""}


@pytest.mark.parametrize(
    ("engine_started_at", "start"),
    [(NOON - 60.0, NOON - 60), (None, 0), (NOON + 5.0, 0)],
    ids=["known", "unknown", "by a clock ahead"],
)
def test_a_counter_of_an_engine_began_with_its_process(
    engine_started_at: float | None, start: int
) -> None:
    meter = filled_meter()
    started = {} if engine_started_at is None else {"chat-0": engine_started_at}
    request = request_of(meter, engines_started_at=started)
    one = point(request, f"{facts.REQUESTS_FINISHED.name}_total", finish_reason="stop")
    assert one.point.start_time_unix_nano == start * 1_000_000_000
    of_host = point(request, "llm_engine_oom_kills_total", engine="chat-0")
    assert of_host.point.start_time_unix_nano == 0


def by_sdk(values_s: list[float], max_buckets: int) -> Any:
    """The point that OpenTelemetry's SDK makes of these values, from our scale down."""
    aggregation = ExponentialBucketHistogramAggregation(max_size=max_buckets, max_scale=SCALE)
    reader = InMemoryMetricReader()
    provider = MeterProvider(
        metric_readers=[reader], views=[View(instrument_name="t", aggregation=aggregation)]
    )
    instrument = provider.get_meter("test").create_histogram("t")
    for value_s in values_s:
        instrument.record(value_s)
    data = reader.get_metrics_data()
    provider.shutdown()
    assert data is not None
    (one,) = data.resource_metrics[0].scope_metrics[0].metrics[0].data.data_points
    return one


@pytest.mark.parametrize("spread", [0.01, 1.0, 3.0])
@pytest.mark.parametrize("max_buckets", [40, 160, 2400])
def test_a_histogram_has_the_buckets_that_the_sdk_makes_of_the_same_values(
    spread: float, max_buckets: int
) -> None:
    seeded = Random(7)
    values_s = [seeded.lognormvariate(-1.6, spread) for _ in range(500)]
    ours = point(request_of(meter_with(*values_s), max_buckets=max_buckets), TTFT).point
    theirs = by_sdk(values_s, max_buckets)
    assert len(ours.positive.bucket_counts) <= max_buckets
    assert (ours.scale, ours.count, ours.zero_count) == (theirs.scale, 500, 0)
    assert _counts(ours.positive) == _counts(theirs.positive)
    assert ours.sum == pytest.approx(theirs.sum)


def _counts(buckets: Any) -> dict[int, int]:
    return {
        index: count for index, count in enumerate(buckets.bucket_counts, buckets.offset) if count
    }


def test_the_error_at_a_scale_doubles_with_each_lower_one() -> None:
    assert relative_error(SCALE) == pytest.approx(RELATIVE_ERROR)
    bounds = [round(100 * relative_error(scale), 2) for scale in range(6, 1, -1)]
    # docs/metrics-push.md has them.
    assert bounds == [0.54, 1.08, 2.17, 4.33, 8.64]


def test_gaps_between_chunks_are_pushed_by_their_bins() -> None:
    meter = Meter((), ["chat-0"], with_bins=True)
    count(meter, JOINED)
    gaps = point(request_of(meter, max_buckets=2400), m.CHUNK_GAP.name).point
    assert JOINED.proxied is not None
    # A bin's number is that of its bucket's upper bound.
    pushed = {index + 1: times for index, times in _counts(gaps.positive).items()}
    assert pushed == JOINED.proxied.gaps


def test_an_exemplar_names_its_trace() -> None:
    (exemplar,) = point(request_of(meter_with(0.1)), TTFT).point.exemplars
    assert (exemplar.trace_id.hex(), exemplar.as_double) == (record(0).trace_id, 0.1)


def test_a_series_that_is_gone_is_ended_once() -> None:
    meter, requests = filled_meter(), requests_of_agent()
    meter.sample(FULL_SAMPLE)
    before = {_key(one) for one in points_of(request_of(meter, requests))}
    meter.scrape_failed("chat-0", "connection")
    during = points_of(request_of(meter, requests))
    ended = {_key(one) for one in during if one.point.flags & ENDED}
    alive = {_key(one) for one in during if not one.point.flags & ENDED}
    assert before - alive == ended
    assert {name for name, _, _ in ended} >= {
        facts.REQUESTS_RUNNING.name,
        f"{facts.OUTPUT_TOKENS.name}_total",
        facts.QUEUE_TIME.name,
    }
    after = points_of(request_of(meter, requests))
    assert not any(one.point.flags & ENDED for one in after)


def test_the_histograms_of_a_forgotten_model_are_ended() -> None:
    clock = [0.0]
    meter = Meter((), ["chat-0"], with_bins=True, monotonic=lambda: clock[0])
    count(meter, record(0, ttft_s=0.1))
    requests = requests_of_agent()
    request_of(meter, requests)
    clock[0] += FORGOTTEN_AFTER_S
    ended = [one for one in points_of(request_of(meter, requests)) if one.point.flags & ENDED]
    assert (TTFT, "exponential_histogram") in {(one.metric.name, one.kind) for one in ended}
    assert {one.labels["model"] for one in ended} == {"llama"}


def _key(one: Any) -> tuple[str, str, frozenset[tuple[str, str]]]:
    return one.metric.name, one.kind, frozenset(one.labels.items())


def test_many_models_tenants_and_users_give_no_more_points_than_the_exposition_has_series() -> None:
    meter, seeded = Meter((objective("chat"),), ["chat-0"], with_bins=True), Random(1)
    count(
        meter,
        *(
            record(
                number,
                model=f"made-up-{number}",
                tenant=f"tenant-{number}",
                proxied=ProxyView(end_user=f"user-{number}"),
                engine=("chat-0", f"engine-{number}")[number % 2],
                ttft_s=seeded.lognormvariate(-1.6, 3.0),
            )
            for number in range(2 * MAX_UNCONFIGURED)
        ),
    )
    points = points_of(request_of(meter))
    for one in points:
        assert not {"tenant", "end_user"} & one.labels.keys()
        if one.kind == "exponential_histogram":
            assert len(one.point.positive.bucket_counts) <= 160
    series = {
        (family.name, *sorted((k, v) for k, v in sample.labels.items() if k != "le"))
        for family in text_string_to_metric_families(exposition_of(meter))
        for sample in family.samples
    }
    assert len(points) == len(series)
    assert sum(one.metric.name == TTFT for one in points) <= MAX_UNCONFIGURED + 3


@dataclass(slots=True)
class PushCounts(ForwardCounts):
    """Counts exports; tests wait for them."""

    reasons: Container[str] = PUSHES_DROPPED
    rejected: int = 0

    def points_rejected(self, points: int) -> None:
        self.rejected += points


@contextmanager
def pushing(url: str, **settings: Any) -> Iterator[tuple[MetricsPush, PushCounts]]:
    meter, counts = Meter((), ["chat-0"]), PushCounts()
    exposition = AgentExposition(meter, INFO)

    def read(now: float) -> MetricsSnapshot:
        families = exposition.families(meter.snapshot())
        return MetricsSnapshot(at=now, families=families, bins={}, engines_started_at={})

    given = OtlpMetricsSettings(endpoint=url, **settings)
    push = MetricsPush(given, url, read, requests_of_agent(), counts)
    try:
        yield push, counts
    finally:
        push.forwarder.close(WITHIN_S)


def push_to(to: Destination, times: int = 1, **settings: Any) -> PushCounts:
    with pushing(to.url, **settings) as (push, counts):
        for number in range(times):
            push.push(NOON + number)
            counts.wait_for(number + 1)
    return counts


def test_an_export_arrives_compressed_with_the_configured_headers() -> None:
    with http_destination() as to:
        counts = push_to(to, headers={"X-Scope-OrgID": "fleet", "Authorization": "Bearer t0ken"})
    (received,) = to.received
    assert (received.path, received.headers["Content-Type"]) == (
        "/v1/metrics",
        "application/x-protobuf",
    )
    assert received.headers["X-Scope-OrgID"] == "fleet"
    assert received.headers["Authorization"] == "Bearer t0ken"
    assert received.headers["Content-Encoding"] == "gzip"
    request = ExportMetricsServiceRequest.FromString(gzip.decompress(received.content))
    (resource,) = request.resource_metrics
    attributes = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
    assert attributes["service.instance.id"] == "agent-0"
    assert resource.scope_metrics[0].scope.name == "goodput-agent"
    assert (counts.sent, counts.dropped) == (1, {})


def test_a_push_never_waits_for_the_endpoint_and_few_exports_wait() -> None:
    with http_destination() as to:
        to.open_gate.clear()
        with pushing(to.url) as (push, counts):
            for number in range(MAX_WAITING + 5):
                push.push(NOON + number)
            assert counts.dropped == {"queue_full": 5}
            assert push.forwarder.fill == 1.0
            to.open_gate.set()
            counts.wait_for(MAX_WAITING + 5)
            assert counts.sent == MAX_WAITING


@pytest.mark.parametrize(
    ("response", "rejected"),
    [
        (
            ExportMetricsServiceResponse(
                partial_success=ExportMetricsPartialSuccess(
                    rejected_data_points=7, error_message="out of order"
                )
            ).SerializeToString(),
            7,
        ),
        (ExportMetricsServiceResponse().SerializeToString(), 0),
        (b"<html>ok</html>", 0),
    ],
    ids=["partial", "whole", "no OTLP"],
)
def test_points_that_the_endpoint_left_out_are_counted_and_not_sent_again(
    response: bytes, rejected: int
) -> None:
    with http_destination(HttpResponse(200, content=response)) as to:
        counts = push_to(to)
    assert (len(to.received), counts.sent, counts.rejected) == (1, 1, rejected)


@pytest.mark.parametrize("text", ["b\r\nc: d", "", " b", "é"])
def test_a_header_that_http_cannot_carry_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="headers"):
        OtlpMetricsSettings.model_validate({"headers": {"a": text}})
    with pytest.raises(ValueError, match="headers"):
        OtlpMetricsSettings.model_validate({"headers": {"a b": "c"}})


def test_a_header_may_be_a_number_of_yaml_and_is_not_shown() -> None:
    headers = {"Authorization": "t0ken", "X-Scope-OrgID": 42}
    settings = Settings.model_validate({"otlp_metrics": {"headers": headers}})
    given = settings.otlp_metrics.headers
    assert given["X-Scope-OrgID"].get_secret_value() == "42"
    assert "t0ken" not in f"{settings.shown()} {settings}"
    assert "Authorization" in settings.shown()["otlp_metrics"]["headers"]
