"""What holds at every transport: gRPC and HTTP, protobuf and JSON, plain and compressed."""

import asyncio
import gzip
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import grpc
import pytest
import requests
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http import Compression as HttpCompression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind

from agent.errors import SettingsInvalid, StoreUnavailable
from agent.sources.listening import AsgiServer, open_socket
from agent.sources.otlp.grpc import OtlpGrpc
from agent.sources.otlp.http import OtlpHttp
from agent.sources.otlp.limits import MAX_BODY_BYTES, MAX_BYTES_HELD, MAX_GRPC_READING
from tests.sources.otlp.exports import VLLM, export, gzip_bomb, in_json, json_bytes, vllm_span
from tests.sources.otlp.serving import WITHIN_S, LoopThread, Serving, in_hand
from tests.sources.otlp.transports import (
    INVALID_ARGUMENT,
    JSON,
    PROTOBUF,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    Transport,
    at_every_transport,
    call,
    post,
    read_reply,
)


@at_every_transport
def test_a_good_export_is_taken_and_forwarded_as_it_came(
    served: Serving, transport: Transport
) -> None:
    span = vllm_span()
    assert transport.send(served, export(span)).is_full_success
    record = served.accepted.record
    assert (record.trace_id, record.span_id) == (span.trace_id.hex(), span.span_id.hex())
    assert (record.ttft_s, record.output_tokens, record.engine) == (0.2, 11, "chat-0")
    assert not served.counts.refused_bodies
    (body,) = served.forwarded
    assert body.content_type == (JSON if "json" in transport.name else PROTOBUF)
    # gRPC unpacks by itself, so that there is nothing to say about compression any more.
    assert body.gzipped == (transport.name in ("http-gzip", "http-json-gzip"))
    content = gzip.decompress(body.content) if body.gzipped else body.content
    assert content == transport.encode(export(span))


@at_every_transport
def test_an_export_of_nothing_is_a_success(served: Serving, transport: Transport) -> None:
    for empty in (ExportTraceServiceRequest(), export()):
        assert transport.send(served, empty).is_full_success
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
    kept = [record.span_id for record in served.accepted.records]
    assert kept == [span.span_id.hex() for span in good]
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


_GZIP, _DEFLATE = HttpCompression.Gzip, HttpCompression.Deflate
EXPORTERS: Mapping[str, Callable[[Serving], SpanExporter]] = {
    "grpc": lambda to: GrpcExporter(to.grpc_url, insecure=True),
    "grpc-gzip": lambda to: GrpcExporter(
        to.grpc_url, insecure=True, compression=grpc.Compression.Gzip
    ),
    "http": lambda to: HttpExporter(to.traces_url),
    "http-gzip": lambda to: HttpExporter(to.traces_url, compression=_GZIP),
    "http-deflate": lambda to: HttpExporter(to.traces_url, compression=_DEFLATE),
}


@contextmanager
def exporting(served: Serving, name: str) -> Iterator[Callable[[], SpanExportResult]]:
    """A function that sends one span as vLLM does, with the SDK's own exporter."""
    exporter = EXPORTERS[name](served)
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


@pytest.mark.parametrize("name", EXPORTERS)
def test_the_official_exporters_are_understood_and_deflate_is_refused(
    served: Serving, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with exporting(served, name) as send:
        result = send()
    if name == "http-deflate":
        assert result is SpanExportResult.FAILURE
        assert served.counts.refused_bodies == {"content_encoding": 1}
    else:
        assert result is SpanExportResult.SUCCESS
        record = served.accepted.record
        assert (record.request_id, record.engine, record.e2e_s) == ("chatcmpl-1", "chat-0", 1.2)


@pytest.mark.parametrize("name", ["grpc", "http"])
def test_the_official_exporters_send_again_what_was_not_stored(served: Serving, name: str) -> None:
    served.accepted.failure = StoreUnavailable("not now")
    with exporting(served, name) as send, ThreadPoolExecutor() as threads:
        result = threads.submit(send)
        served.counts.wait(lambda counts: counts.refused_bodies["busy"])
        served.accepted.failure = None
        assert result.result() is SpanExportResult.SUCCESS
    assert served.accepted.record.request_id == "chatcmpl-1"


BODY = export(vllm_span()).SerializeToString()
SERVICE = "/opentelemetry.proto.collector.trace.v1.TraceService"


@pytest.mark.parametrize("compression", [None, grpc.Compression.Gzip])
def test_messages_over_the_limit_are_refused_however_small_they_were_made(
    served: Serving, compression: grpc.Compression | None
) -> None:
    reply = call(served, bytes(MAX_BODY_BYTES + 1), compression=compression)
    assert (reply.code, reply.retry_after_s) == (RESOURCE_EXHAUSTED, None)
    assert call(served, BODY).is_full_success


@pytest.mark.parametrize("method", [f"{SERVICE}/Import", "/opentelemetry.LogsService/Export"])
def test_other_calls_are_not_implemented(served: Serving, method: str) -> None:
    address = f"127.0.0.1:{served.grpc_port}"
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as failure:
        channel.unary_unary(method)(BODY, timeout=WITHIN_S)
    assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_sender_that_leaves_while_its_rows_are_stored_is_counted_once(
    loop: LoopThread, served: Serving
) -> None:
    served.accepted.gate = asyncio.Event()
    with grpc.insecure_channel(f"127.0.0.1:{served.grpc_port}") as channel:
        sending = channel.unary_unary(f"{SERVICE}/Export").future(BODY, timeout=WITHIN_S)
        assert served.accepted.entered.wait(WITHIN_S)
        sending.cancel()
    # Another exchange on the same server, so that the agent has heard of the cancelling.
    assert call(served, b"\xff").code == INVALID_ARGUMENT
    loop.call(served.accepted.gate.set)
    served.counts.wait(lambda counts: counts.contents)
    assert len(served.accepted.records) == len(served.counts.contents) == len(served.forwarded) == 1


@contextmanager
def stalled(port: int, senders: int) -> Iterator[list[grpc.Future]]:
    """Calls whose message does not come, each on a connection of its own."""
    never = threading.Event()

    def message() -> Iterator[bytes]:
        never.wait(WITHIN_S)
        yield from ()

    options = [("grpc.use_local_subchannel_pool", 1)]
    with ExitStack() as stack:
        calls = []
        for _ in range(senders):
            channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}", options))
            calls.append(
                channel.stream_unary(f"{SERVICE}/Export").future(message(), timeout=WITHIN_S)
            )
        try:
            yield calls
        finally:
            for begun in calls:
                begun.cancel()
            never.set()


def test_a_call_without_a_message_is_bad_data(served: Serving) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{served.grpc_port}") as channel:
        failure = channel.stream_unary(f"{SERVICE}/Export").future(iter(())).exception()
    assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert failure.details() == "the call holds no message"


def test_senders_that_leave_before_their_message_give_way(served: Serving) -> None:
    for _ in range(3):
        with stalled(served.grpc_port, MAX_GRPC_READING) as calls:
            for sending in calls:
                sending.cancel()
    assert call(served, BODY).is_full_success


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_an_address_that_cannot_be_had_is_reported_in_a_sentence(
    loop: LoopThread, served: Serving, host: str
) -> None:
    taken = served.grpc_port
    with pytest.raises(SettingsInvalid) as failure:
        loop.run(OtlpGrpc(served.receiver, f"{host}:{taken}").start())
    assert failure.value.problems == (
        f"otlp.grpc: cannot listen on {host}:{taken}; choose another address",
    )


def test_stopping_what_never_started_is_no_fault(loop: LoopThread, served: Serving) -> None:
    loop.run(OtlpGrpc(served.receiver, "127.0.0.1:0").stop(0.0))


GOOD = export(vllm_span())
NOT_FOUND = 5
MIB = 1024 * 1024
in_each_format = pytest.mark.parametrize("content_type", [PROTOBUF, JSON])


@pytest.mark.parametrize(
    ("content_type", "encoding"),
    [
        ("application/%s; charset=utf-8", None),
        ("Application/%s ;charset=utf-8", "identity"),
        ("application/%s", ""),
    ],
)
def test_a_content_type_may_have_parameters_and_any_case(
    served: Serving, content_type: str, encoding: str | None
) -> None:
    bodies = {"X-Protobuf": GOOD.SerializeToString(), "json": json_bytes(in_json(GOOD))}
    for name, body in bodies.items():
        reply = post(served, body, content_type=content_type % name, encoding=encoding)
        assert reply.is_full_success
    assert len(served.accepted.records) == 2


def test_an_answer_to_json_is_json(served: Serving) -> None:
    content = in_json(export(vllm_span(), vllm_span(trace_id=b"short")))
    answer = requests.post(served.traces_url, json=content, timeout=WITHIN_S)
    assert answer.headers["Content-Type"] == JSON
    assert answer.json() == {
        "partialSuccess": {"rejectedSpans": "1", "errorMessage": "refused: 1 by id_length"}
    }


def test_a_gzip_body_may_have_several_members_or_nothing(served: Serving) -> None:
    body = GOOD.SerializeToString()
    parts = (body[:7], b"", body[7:100], body[100:])
    members = b"".join(map(gzip.compress, parts))
    for encoding in ("gzip", "GZIP"):
        assert post(served, members, encoding=encoding).is_full_success
    assert [record.request_id for record in served.accepted.records] == ["chatcmpl-1"] * 2
    for nothing in (b"", gzip.compress(b"")):
        assert post(served, nothing, encoding="gzip").is_full_success
    # Work that grows with the square of their number would take minutes.
    assert post(served, gzip.compress(b"") * 200_000, encoding="gzip").is_full_success


NO_PATH = "only traces are received here, at /v1/traces"


@in_each_format
@pytest.mark.parametrize(
    ("sent", "status", "code", "message", "reason"),
    [
        *(
            ({"path": path}, 404, NOT_FOUND, NO_PATH, "no_such_path")
            for path in ("/", "/v1/traces/", "/v1/logs", "/v1/metrics", "/v1/traces/x")
        ),
        *(
            ({"method": method}, 405, INVALID_ARGUMENT, "", "method")
            for method in ("GET", "PUT", "PATCH", "DELETE", "OPTIONS")
        ),
        *(
            ({"encoding": encoding}, 415, INVALID_ARGUMENT, "", "content_encoding")
            for encoding in ("deflate", "br", "zstd", "gzip, gzip", "none of these")
        ),
    ],
)
def test_other_paths_methods_and_encodings_are_refused_in_the_senders_format(
    served: Serving,
    sent: dict[str, str],
    status: int,
    code: int,
    message: str,
    reason: str,
    content_type: str,
) -> None:
    reply = post(served, GOOD.SerializeToString(), content_type=content_type, **sent)
    assert (reply.http_status, reply.code) == (status, code)
    assert reply.message.startswith(message)
    assert reply.headers["Content-Type"] == content_type
    assert reply.headers.get("Allow") == ("POST" if status == 405 else None)
    assert served.counts.refused_bodies == {reason: 1}


@pytest.mark.parametrize(
    "content_type", [None, "", "text/plain", "application/grpc", "application/protobuf", "garbage;"]
)
def test_other_content_types_are_not_supported(served: Serving, content_type: str | None) -> None:
    reply = post(served, GOOD.SerializeToString(), content_type=content_type)
    assert (reply.http_status, reply.code) == (415, INVALID_ARGUMENT)
    assert reply.message == f"send {PROTOBUF} or {JSON}"
    assert served.counts.refused_bodies == {"content_type": 1}


COMPRESSED = gzip.compress(GOOD.SerializeToString())


@in_each_format
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(COMPRESSED[:-1], id="cut in the trailer"),
        pytest.param(COMPRESSED[: len(COMPRESSED) // 2], id="cut in the middle"),
        pytest.param(COMPRESSED[:5], id="cut in the header"),
        pytest.param(COMPRESSED + COMPRESSED[:9], id="second member cut"),
        pytest.param(COMPRESSED + b"\0", id="garbage after it"),
        pytest.param(COMPRESSED[:-6] + b"\0\0" + COMPRESSED[-4:], id="wrong checksum"),
        pytest.param(GOOD.SerializeToString(), id="not compressed at all"),
    ],
)
def test_a_broken_gzip_body_is_bad_data(served: Serving, body: bytes, content_type: str) -> None:
    reply = post(served, body, encoding="gzip", content_type=content_type)
    assert (reply.http_status, reply.code) == (400, INVALID_ARGUMENT)
    assert "gzip" in reply.message
    assert reply.headers["Content-Type"] == content_type
    assert served.counts.refused_bodies == {"invalid": 1}
    assert served.accepted.records == []


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("chunks", [False, True])
def test_a_gzip_bomb_is_too_large(served: Serving, members: int, chunks: bool) -> None:
    bomb = gzip_bomb(MAX_BODY_BYTES + 3, members)
    reply = post(served, iter([bomb[:9], bomb[9:]]) if chunks else bomb, encoding="gzip")
    assert (reply.http_status, reply.code) == (413, RESOURCE_EXHAUSTED)
    assert reply.retry_after_s is None
    assert served.counts.refused_bodies == {"too_large": 1}


def body_of(size_bytes: int) -> bytes:
    """A good export of exactly so many bytes, with spans of up to a MiB; the last is a phase's."""
    spans = [vllm_span({"gen_ai.prompt": "x" * MIB}) for _ in range(size_bytes // MIB - 1)]
    body = export(*spans).SerializeToString()
    padded = vllm_span(name="vllm_" + "x" * MIB)
    rest = export(padded).SerializeToString()
    padded.name = padded.name[: size_bytes - len(body) - len(rest)]
    return body + export(padded).SerializeToString()


def test_the_limit_is_4_mib(served: Serving) -> None:
    assert MAX_BODY_BYTES == 4 * 1024 * 1024
    body = body_of(MAX_BODY_BYTES)
    assert len(body) == MAX_BODY_BYTES
    assert post(served, body).is_full_success
    assert len(served.accepted.records) == 3
    reply = post(served, body + b"\0")
    assert (reply.http_status, reply.code) == (413, RESOURCE_EXHAUSTED)
    assert served.counts.refused_bodies == {"too_large": 1}


def test_a_body_may_come_in_chunks_of_unknown_number(served: Serving) -> None:
    body = GOOD.SerializeToString()
    assert post(served, (bytes([byte]) for byte in body)).is_full_success
    assert served.accepted.record.request_id == "chatcmpl-1"


def test_a_connection_outlives_what_is_refused_on_it(served: Serving) -> None:
    body, large = GOOD.SerializeToString(), b"\0" * 1_000_000
    headers = {"Content-Type": PROTOBUF}
    with requests.Session() as session:
        for url in (served.traces_url + "x", served.traces_url, served.traces_url):
            answer = session.post(url, data=large, headers=headers, timeout=WITHIN_S)
            assert answer.status_code in (400, 404)
        answer = session.post(served.traces_url, data=body, headers=headers, timeout=WITHIN_S)
    assert read_reply(answer).is_full_success


@contextmanager
def half_sent(port: int, sent: bytes = b"half a body") -> Iterator[socket.socket]:
    """A connection on which a part of a larger body was sent."""
    head = (
        "POST /v1/traces HTTP/1.1\r\nHost: agent\r\n"
        f"Content-Type: {PROTOBUF}\r\nContent-Length: {len(sent) + 1}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", port), timeout=WITHIN_S) as connection:
        connection.sendall(head.encode() + sent)
        yield connection


def test_a_sender_that_leaves_in_the_middle_of_its_body_is_counted(served: Serving) -> None:
    with half_sent(served.http_port):
        pass
    served.counts.wait(lambda counts: counts.refused_bodies)
    assert served.counts.refused_bodies == {"client_gone": 1}
    assert post(served, GOOD.SerializeToString()).is_full_success


def test_a_sender_that_stalls_gives_its_room_back(loop: LoopThread, served: Serving) -> None:
    async def start() -> AsgiServer:
        listening = open_socket("otlp.http", "127.0.0.1", 0)
        server = AsgiServer(OtlpHttp(served.receiver, body_within_s=0.05), listening)
        server.start()
        return server

    server = loop.run(start())
    try:
        with half_sent(server.port) as connection:
            answer = b"".join(iter(lambda: connection.recv(65536), b"")).lower()
    finally:
        loop.run(server.stop())
    assert answer.startswith(b"http/1.1 503 ")
    assert b"\r\nretry-after: 1\r\n" in answer
    assert b"\r\nconnection: close\r\n" in answer
    assert served.counts.refused_bodies == {"too_slow": 1}
    with in_hand(loop, served, MAX_BYTES_HELD):
        pass


def test_a_sender_over_http_that_leaves_while_its_rows_are_stored_is_counted_once(
    loop: LoopThread, served: Serving
) -> None:
    served.accepted.gate = asyncio.Event()
    body = GOOD.SerializeToString()
    with half_sent(served.http_port, body[:-1]) as connection:
        connection.sendall(body[-1:])
        assert served.accepted.entered.wait(WITHIN_S)
    loop.call(served.accepted.gate.set)
    served.counts.wait(lambda counts: counts.contents)
    assert len(served.accepted.records) == len(served.counts.contents) == len(served.forwarded) == 1
    assert not served.counts.refused_bodies
