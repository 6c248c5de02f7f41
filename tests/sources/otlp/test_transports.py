"""What holds at every transport: gRPC and HTTP, protobuf and JSON, plain and compressed."""

import asyncio
import gzip
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http import Compression as HttpCompression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind

from agent.errors import StoreUnavailable
from tests.sources.otlp.exports import VLLM, export, vllm_span
from tests.sources.otlp.serving import LoopThread, Serving
from tests.sources.otlp.transports import (
    INVALID_ARGUMENT,
    JSON,
    PROTOBUF,
    PROTOBUF_TRANSPORTS,
    TRANSPORTS,
    UNAVAILABLE,
    Transport,
    post,
)

at_every_transport = pytest.mark.parametrize(
    "transport", TRANSPORTS, ids=lambda transport: transport.name
)
at_protobuf_transports = pytest.mark.parametrize(
    "transport", PROTOBUF_TRANSPORTS, ids=lambda transport: transport.name
)


@at_every_transport
def test_a_good_export_is_taken_and_nothing_more_is_said(
    served: Serving, transport: Transport
) -> None:
    span = vllm_span()
    assert transport.send(served, export(span)).is_full_success
    record = served.accepted.record
    assert (record.trace_id, record.span_id) == (span.trace_id.hex(), span.span_id.hex())
    assert (record.ttft_s, record.output_tokens, record.engine) == (0.2, 11, "chat-0")
    assert not served.counts.refused_bodies


@at_every_transport
def test_an_export_of_nothing_is_a_success(served: Serving, transport: Transport) -> None:
    assert transport.send(served, ExportTraceServiceRequest()).is_full_success
    assert transport.send(served, export()).is_full_success
    assert served.accepted.records == []


@at_every_transport
def test_bad_spans_are_reported_and_good_ones_beside_them_kept(
    served: Serving, transport: Transport
) -> None:
    bad = [vllm_span(trace_id=b"short"), vllm_span(start_time_unix_nano=0)]
    good = [vllm_span(), vllm_span()]
    reply = transport.send(served, export(good[0], *bad, good[1]))
    assert reply.rejected_spans == 2
    assert reply.message == "refused: 1 by id_length, 1 by span_times"
    assert [record.span_id for record in served.accepted.records] == [
        span.span_id.hex() for span in good
    ]
    assert served.counts.contents[0].rejected == {"id_length": 1, "span_times": 1}


@at_every_transport
def test_an_export_without_a_readable_span_is_bad_data(
    served: Serving, transport: Transport
) -> None:
    reply = transport.send(served, export(vllm_span(span_id=b"1234567"), vllm_span(trace_id=b"")))
    assert reply.code == INVALID_ARGUMENT
    assert reply.message == "none of the 2 spans can be read: 2 by id_length"
    assert reply.retry_after_s is None
    assert served.counts.refused_bodies == {"invalid": 1}


@at_every_transport
def test_without_a_store_a_sender_is_reported_to_come_back(
    served: Serving, transport: Transport
) -> None:
    served.accepted.failure = StoreUnavailable("the disk is full")
    request = export(vllm_span())
    reply = transport.send(served, request)
    assert (reply.code, reply.retry_after_s, reply.message) == (UNAVAILABLE, 1, "the disk is full")
    assert served.counts.refused_bodies == {"busy": 1}
    assert (served.counts.contents, served.forwarded) == ([], [])
    served.accepted.failure = None
    assert transport.send(served, request).is_full_success
    assert served.accepted.record.trace_id


@at_every_transport
def test_nothing_is_acknowledged_before_it_is_stored(
    loop: LoopThread, served: Serving, transport: Transport
) -> None:
    served.accepted.gate = asyncio.Event()
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(transport.send, served, export(vllm_span()))
        assert served.accepted.entered.wait(10)
        # What would be answered too early has the time of a whole other exchange to arrive.
        assert post(served, b"", path="/elsewhere").http_status == 404
        assert not answer.done()
        loop.call(served.accepted.gate.set)
        assert answer.result().is_full_success
    assert len(served.accepted.records) == 1


@at_every_transport
def test_what_is_forwarded_is_what_came(served: Serving, transport: Transport) -> None:
    request = export(vllm_span())
    transport.send(served, request)
    (body,) = served.forwarded
    assert body.content_type == (JSON if "json" in transport.name else PROTOBUF)
    # gRPC unpacks by itself, so that there is nothing to say about compression any more.
    assert body.gzipped == (transport.name in ("http-gzip", "http-json-gzip"))
    content = gzip.decompress(body.content) if body.gzipped else body.content
    assert content == transport.encode(request)


EXPORTERS: Sequence[tuple[str, Callable[[Serving], SpanExporter]]] = (
    ("grpc", lambda to: GrpcExporter(f"http://127.0.0.1:{to.grpc_port}", insecure=True)),
    (
        "grpc-gzip",
        lambda to: GrpcExporter(
            f"http://127.0.0.1:{to.grpc_port}", insecure=True, compression=grpc.Compression.Gzip
        ),
    ),
    ("http", lambda to: HttpExporter(to.traces_url)),
    ("http-gzip", lambda to: HttpExporter(to.traces_url, compression=HttpCompression.Gzip)),
    ("http-deflate", lambda to: HttpExporter(to.traces_url, compression=HttpCompression.Deflate)),
)


@contextmanager
def exporting(
    served: Serving, make: Callable[[Serving], SpanExporter]
) -> Iterator[Callable[[], SpanExportResult]]:
    """A function that sends one span as vLLM does, with the SDK's own exporter."""
    exporter = make(served)
    try:
        yield lambda: exporter.export([sdk_span()])
    finally:
        exporter.shutdown()


def sdk_span() -> ReadableSpan:
    """A finished span as the SDK makes it."""
    provider = TracerProvider(resource=Resource({SERVICE_NAME: "chat-0"}), shutdown_on_exit=False)
    span = provider.get_tracer("vllm.tracing.otel").start_span("llm_request", kind=SpanKind.SERVER)
    span.set_attributes(VLLM)
    span.end()
    assert isinstance(span, ReadableSpan)
    return span


@pytest.mark.parametrize(("name", "make"), EXPORTERS[:4], ids=[name for name, _ in EXPORTERS[:4]])
def test_the_official_exporters_are_understood(
    served: Serving, name: str, make: Callable[[Serving], SpanExporter]
) -> None:
    with exporting(served, make) as send:
        assert send() is SpanExportResult.SUCCESS
    record = served.accepted.record
    assert (record.request_id, record.engine, record.e2e_s) == ("chatcmpl-1", "chat-0", 1.2)


@pytest.mark.parametrize(("name", "make"), EXPORTERS[::2][:2], ids=["grpc", "http"])
def test_the_official_exporters_send_again_what_was_not_stored(
    served: Serving, name: str, make: Callable[[Serving], SpanExporter]
) -> None:
    served.accepted.failure = StoreUnavailable("not now")
    with exporting(served, make) as send, ThreadPoolExecutor() as threads:
        result = threads.submit(send)
        served.counts.wait(lambda counts: counts.refused_bodies["busy"])
        served.accepted.failure = None
        assert result.result() is SpanExportResult.SUCCESS
    assert served.accepted.record.request_id == "chatcmpl-1"


def test_an_exporter_that_deflates_is_reported_so(
    served: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    with exporting(served, EXPORTERS[-1][1]) as send:
        assert send() is SpanExportResult.FAILURE
    assert served.counts.refused_bodies == {"content_encoding": 1}
