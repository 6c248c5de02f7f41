"""The push of metrics to endpoints over HTTP: retries, drops, and what is counted of them."""

import gzip
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsPartialSuccess,
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)

from agent.catalog.reasons import PUSHES_DROPPED
from agent.outputs import otlp_forwarder
from agent.outputs.otlp_metrics.export_requests import MetricsSnapshot
from agent.outputs.otlp_metrics.metrics_push import MAX_WAITING, MetricsPush
from agent.outputs.prometheus.agent_exposition import AgentExposition
from agent.outputs.prometheus.meter import Meter
from agent.settings import Settings
from agent.settings.push_settings import OtlpMetricsSettings
from tests.outputs.otlp_destinations import (
    WITHIN_S,
    Destination,
    HttpResponse,
    http_destination,
)
from tests.outputs.otlp_metrics.pushed import requests_of_agent
from tests.outputs.prometheus.filled import INFO
from tests.real_parts.ports import free_port
from tests.records.making import NOON


@dataclass(slots=True)
class PushCounts:
    """Counts exports; tests wait for them."""

    sent: int = 0
    rejected: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def forwarded(self) -> None:
        with self._changed:
            self.sent += 1
            self._changed.notify_all()

    def forward_dropped(self, reason: str) -> None:
        assert reason in PUSHES_DROPPED
        with self._changed:
            self.dropped[reason] += 1
            self._changed.notify_all()

    def points_rejected(self, points: int) -> None:
        self.rejected += points

    def wait_for(self, exports: int) -> None:
        """Return when this many exports were sent or dropped."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: self.sent + self.dropped.total() >= exports, WITHIN_S
            ), self


@contextmanager
def pushing(url: str, **settings: Any) -> Iterator[tuple[MetricsPush, PushCounts]]:
    """A push of a new meter's metrics."""
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
    """Push so often, each export after the one before it."""
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


def test_an_export_is_plain_where_the_settings_say_so_and_goes_to_the_path_of_the_url() -> None:
    with http_destination() as to:
        to.url += "/opentelemetry/v1/metrics"
        push_to(to, compression="none")
    (received,) = to.received
    assert received.path == "/opentelemetry/v1/metrics"
    assert "Content-Encoding" not in received.headers
    assert ExportMetricsServiceRequest.FromString(received.content).resource_metrics


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_an_export_is_sent_again_after_the_statuses_and_the_delay_of_otlp(status: int) -> None:
    again = HttpResponse(status, {"Retry-After": "0"})
    with http_destination(again, again, HttpResponse(200)) as to:
        counts = push_to(to)
    assert len(set(to.contents)) == 1
    assert (len(to.received), counts.sent, counts.dropped) == (3, 1, {})


@pytest.mark.parametrize("status", [400, 401, 413, 500])
def test_a_refused_export_is_dropped_and_counted_and_the_next_one_is_sent(status: int) -> None:
    with http_destination(HttpResponse(status), HttpResponse(200)) as to:
        counts = push_to(to, times=2)
    assert (len(to.received), counts.sent, counts.dropped) == (2, 1, {f"http_{status}": 1})


def test_an_endpoint_that_is_not_there_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp_forwarder, "MAX_TRIES", 1)
    with pushing(f"http://127.0.0.1:{free_port()}") as (push, counts):
        push.push(NOON)
        counts.wait_for(1)
    assert counts.dropped == {"unreachable": 1}


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


def _headers(headers: Mapping[str, Any]) -> dict[str, str]:
    given = OtlpMetricsSettings(headers=dict(headers))
    return {name: value.get_secret_value() for name, value in given.headers.items()}


def test_a_tenant_that_yaml_reads_as_a_number_is_a_text() -> None:
    assert _headers({"X-Scope-OrgID": 42}) == {"X-Scope-OrgID": "42"}


@pytest.mark.parametrize(
    "headers", [{"a b": "c"}, {"": "c"}, {"a": "b\r\nc: d"}, {"a": ""}, {"a": " b"}, {"a": "é"}]
)
def test_a_header_that_http_cannot_carry_is_refused(headers: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="headers"):
        _headers(headers)


def test_a_header_is_not_shown() -> None:
    settings = Settings.model_validate({"otlp_metrics": {"headers": {"Authorization": "t0ken"}}})
    assert "t0ken" not in f"{settings.shown()} {settings}"
    assert "Authorization" in settings.shown()["otlp_metrics"]["headers"]
