"""Bodies that are no exports, or not the exports they seem."""

from collections.abc import Callable

import pytest
from google.protobuf.message import Message
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.sources.otlp.doors import INVALID_ARGUMENT, PROTOBUF_DOORS, Door
from tests.sources.otlp.exports import export, pairs, part, vllm_span
from tests.sources.otlp.serving import Serving

at_protobuf_doors = pytest.mark.parametrize("door", PROTOBUF_DOORS, ids=lambda door: door.name)

GOOD = export(vllm_span()).SerializeToString()


def too_deep() -> bytes:
    """An export whose only span has an attribute that is a list of a list, a hundred times."""
    value = b""
    for _ in range(100):
        value = part(5, part(1, value))
    return part(1, part(2, part(2, part(9, part(2, value)))))


@at_protobuf_doors
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(GOOD[:-1], id="cut by one byte"),
        pytest.param(GOOD[: len(GOOD) // 2], id="cut in the middle"),
        pytest.param(GOOD[:1], id="cut to one byte"),
        pytest.param(GOOD + b"\x0a\x7f", id="a length beyond the end"),
        pytest.param(b"\xff" * 100, id="a number without end"),
        pytest.param(b"\x00", id="field zero"),
        pytest.param(too_deep(), id="too deep"),
        pytest.param(b'{"resourceSpans": []}', id="JSON"),
        pytest.param(b"\x1f\x8b\x08\x00 not really", id="not even gzip"),
        pytest.param(
            GOOD.replace(b"llm_request", b"\xff\xfe_request"), id="a name that is no text"
        ),
    ],
)
def test_a_body_that_is_no_protobuf_is_bad_data(served: Serving, door: Door, body: bytes) -> None:
    reply = door.send_bytes(served, body)
    assert reply.code == INVALID_ARGUMENT
    assert reply.message.startswith("the body is no ExportTraceServiceRequest")
    assert served.counts.refused_bodies == {"invalid": 1}
    assert door.send(served, export(vllm_span())).is_full_success


def logs_export() -> ExportLogsServiceRequest:
    """An export of logs; its fields have the numbers of those of an export of spans."""
    request = ExportLogsServiceRequest()
    records = request.resource_logs.add().scope_logs.add().log_records
    records.add(time_unix_nano=1, severity_text="INFO")
    records.add(attributes=pairs({"gen_ai.latency.e2e": 1.0}))
    return request


def metrics_export() -> ExportMetricsServiceRequest:
    """An export of metrics; its names stand where a span has its trace id."""
    request = ExportMetricsServiceRequest()
    metric = request.resource_metrics.add().scope_metrics.add().metrics.add(name="x" * 17)
    metric.sum.data_points.add(as_int=1)
    return request


@at_protobuf_doors
@pytest.mark.parametrize("make", [logs_export, metrics_export])
def test_logs_and_metrics_are_no_spans(
    served: Serving, door: Door, make: Callable[[], Message]
) -> None:
    body = make().SerializeToString()
    assert ExportTraceServiceRequest.FromString(body).resource_spans
    reply = door.send_bytes(served, body)
    assert reply.code == INVALID_ARGUMENT
    assert "by id_length" in reply.message
    assert served.accepted.records == []
