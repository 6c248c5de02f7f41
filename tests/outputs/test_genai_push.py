"""The push of latencies by OpenTelemetry's conventions for GenAI."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import create_autospec

import pytest
from opentelemetry.metrics import Meter as SdkMeter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics as genai_metrics

from agent.app.jobs import Jobs
from agent.app.pushing import Pushing
from agent.outputs.prometheus.agent_exposition import AgentExposition
from agent.outputs.prometheus.meter import Meter
from agent.records.request import EngineView, ProxyView, RequestRecord, Status, Vantage
from agent.settings import Settings
from tests.outputs.otlp_destinations import WITHIN_S, http_destination
from tests.outputs.prometheus.filled import FULL_SAMPLE, INFO, count
from tests.outputs.test_otlp_metrics import STARTED_AT, points_of, request_of
from tests.records.making import NOON, record

CONVENTIONAL = {
    "gen_ai.server.request.duration": genai_metrics.create_gen_ai_server_request_duration,
    "gen_ai.server.time_to_first_token": genai_metrics.create_gen_ai_server_time_to_first_token,
    "gen_ai.server.time_per_output_token": (
        genai_metrics.create_gen_ai_server_time_per_output_token
    ),
    "gen_ai.client.operation.duration": genai_metrics.create_gen_ai_client_operation_duration,
    "gen_ai.client.operation.time_to_first_chunk": (
        genai_metrics.create_gen_ai_client_operation_time_to_first_chunk
    ),
}
CHAT = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "llama"}
STREAM = {"route": "/v1/chat/completions", "proxied": ProxyView(streamed=True)}
ENGINES = EngineView(status=Status.OK, ttft_s=0.09, tpot_s=0.019, e2e_s=0.45)
# A request, and what the conventions say of it: of each metric its error.type and its value.
BY_CONVENTION: dict[str, tuple[RequestRecord, dict[str, tuple[str, float]]]] = {
    "of an engine": (
        record(1, route="/v1/chat/completions"),
        {
            "gen_ai.server.request.duration": ("", 0.5),
            "gen_ai.server.time_to_first_token": ("", 0.1),
            "gen_ai.server.time_per_output_token": ("", 0.02),
        },
    ),
    "that failed in an engine": (
        record(1, route="/v1/chat/completions", status=Status.ERROR),
        {"gen_ai.server.request.duration": ("error", 0.5)},
    ),
    "with both views": (
        record(1, vantage=Vantage.JOINED, engine_view=ENGINES, **STREAM),
        {
            "gen_ai.server.request.duration": ("", 0.45),
            "gen_ai.server.time_to_first_token": ("", 0.09),
            "gen_ai.server.time_per_output_token": ("", 0.019),
            "gen_ai.client.operation.duration": ("", 0.5),
            "gen_ai.client.operation.time_to_first_chunk": ("", 0.1),
        },
    ),
    "whose response was no stream": (
        record(1, vantage=Vantage.PROXY, route="/v1/chat/completions"),
        {"gen_ai.client.operation.duration": ("", 0.5)},
    ),
    "whose client was refused": (
        record(
            1,
            vantage=Vantage.PROXY,
            status=Status.INVALID,
            http_status=404,
            route="/v1/chat/completions",
        ),
        {"gen_ai.client.operation.duration": ("404", 0.5)},
    ),
    "that the engine answered with 503": (
        record(
            1,
            vantage=Vantage.PROXY,
            status=Status.ERROR,
            http_status=503,
            route="/v1/chat/completions",
        ),
        {"gen_ai.client.operation.duration": ("503", 0.5)},
    ),
}


@pytest.mark.parametrize("which", BY_CONVENTION)
def test_a_request_is_measured_as_by_the_sdk_with_the_instruments_of_the_conventions(
    which: str,
) -> None:
    request, measured = BY_CONVENTION[which]
    with sdk_meter() as (meter, read):
        for name, (error, value_s) in measured.items():
            attributes = {
                **CHAT,
                "gen_ai.provider.name": "vllm",
                **({"error.type": error} if error else {}),
            }
            CONVENTIONAL[name](meter).record(value_s, attributes)
        theirs = read()
    ours = conventional_points(request)
    assert ours == theirs


Measured = dict[str, tuple[str, dict[str, str], int, float]]


@contextmanager
def sdk_meter() -> Iterator[tuple[SdkMeter, Callable[[], Measured]]]:
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader], shutdown_on_exit=False)

    def read() -> Measured:
        data: Any = reader.get_metrics_data()
        return {
            metric.name: (metric.unit, dict(one.attributes), one.count, round(one.sum, 9))
            for metric in data.resource_metrics[0].scope_metrics[0].metrics
            for one in metric.data.data_points
        }

    yield provider.get_meter("test"), read
    provider.shutdown()


def conventional_points(*records: RequestRecord) -> Measured:
    """What a push has of the conventions' metrics, less what names our engine."""
    meter = Meter((), ["chat-0"], with_bins=True, with_genai=True)
    count(meter, *records)
    return {
        pushed.metric.name: (
            pushed.metric.unit,
            {key: value for key, value in pushed.labels.items() if key != "goodput.engine"},
            pushed.point.count,
            round(pushed.point.sum, 9),
        )
        for pushed in points_of(request_of(meter))
        if pushed.metric.name in CONVENTIONAL
    }


def test_errors_that_an_engine_invents_are_one_beyond_a_number() -> None:
    meter = Meter((), ["chat-0"], with_bins=True, with_genai=True)
    for number in range(100):
        view = ProxyView(error=f"error_{number}")
        count(meter, record(number, vantage=Vantage.PROXY, status=Status.ERROR, proxied=view))
    assert (len(errors_of(meter)), "_OTHER" in errors_of(meter)) == (33, True)
    timeout = record(100, vantage=Vantage.PROXY, status=Status.TIMEOUT)
    refusal = record(101, vantage=Vantage.PROXY, status=Status.ERROR, http_status=503)
    count(meter, timeout, refusal)
    assert {"timeout", "503"} < errors_of(meter)


def errors_of(meter: Meter) -> set[str]:
    return {
        pushed.labels["error.type"]
        for pushed in points_of(request_of(meter))
        if pushed.metric.name == "gen_ai.client.operation.duration"
    }


@pytest.mark.parametrize(("kind", "expected"), [("auto", "vllm"), ("sglang", "sglang")])
def test_the_software_of_an_engine_that_was_never_read_is_that_of_the_settings(
    kind: str, expected: str
) -> None:
    meter = Meter((), ["chat-0"], with_bins=True, with_genai=True)
    count(meter, record(1))
    assert providers_of(meter, kind) == [expected]


def test_an_engine_that_is_away_keeps_its_software() -> None:
    """Else its requests would be counted again in series of another name."""
    meter = Meter((), ["chat-0"], with_bins=True, with_genai=True)
    count(meter, record(1))
    meter.sample(replace(FULL_SAMPLE, dialect="sglang"))

    def away() -> None:
        meter.scrape_failed("chat-0", "connection")

    assert providers_of(meter, "auto", away) == ["sglang", "sglang"]


def providers_of(meter: Meter, kind: str, *between: Callable[[], None]) -> list[str]:
    """The software in each of several pushes."""
    jobs = create_autospec(Jobs)
    with http_destination() as to:
        given = {"endpoint": to.url, "names": "opentelemetry", "compression": "none"}
        engine = {"name": "chat-0", "url": "http://chat-0:8000", "kind": kind}
        settings = Settings.model_validate({"engines": [engine], "otlp_metrics": given})
        pushing = Pushing(settings, to.url, meter, AgentExposition(meter, INFO), STARTED_AT)
        pushing.schedule(jobs)
        (_, _, push), _ = jobs.every.call_args
        for number, change in enumerate(between):
            push(NOON + number)
            change()
        pushing.close(NOON + len(between), WITHIN_S)
    return [
        pushed.labels["gen_ai.provider.name"]
        for received in to.received
        for pushed in points_of(ExportMetricsServiceRequest.FromString(received.content))
        if pushed.metric.name == "gen_ai.server.request.duration"
    ]
