"""Exports over gRPC and HTTP, in protobuf and JSON, plain and compressed."""

import gzip
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol

import grpc
import pytest
import requests
from google.protobuf.json_format import Parse
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tests.sources.otlp.exports import in_json, json_bytes
from tests.sources.otlp.serving import WITHIN_S

PROTOBUF = "application/x-protobuf"
JSON = "application/json"

OK = 0
INVALID_ARGUMENT = 3
RESOURCE_EXHAUSTED = 8
UNAVAILABLE = 14


class Wire(Protocol):
    """Where a receiver listens."""

    @property
    def grpc_port(self) -> int: ...

    @property
    def http_port(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer: `code` is google.rpc.Code, `content` what came back, as the sender's format says.

    `headers` are those of HTTP or the trailers of gRPC.
    """

    code: int
    content: ExportTraceServiceResponse | Status
    retry_after_s: float | None = None
    http_status: int | None = None
    headers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rejected_spans(self) -> int:
        """How many spans were refused; AssertionError where the export failed."""
        assert isinstance(self.content, ExportTraceServiceResponse), self.content
        return self.content.partial_success.rejected_spans

    @property
    def is_full_success(self) -> bool:
        """Whether every span was taken, and nothing else is said, as OTLP asks for."""
        return self.code == OK and self.content == ExportTraceServiceResponse()

    @property
    def message(self) -> str:
        if isinstance(self.content, ExportTraceServiceResponse):
            return self.content.partial_success.error_message
        return str(self.content.message)


def post(
    served: Wire,
    content: Any,
    *,
    content_type: str | bytes | None = PROTOBUF,
    encoding: str | bytes | None = None,
    method: str = "POST",
    path: str = "/v1/traces",
) -> Reply:
    headers = {"Content-Type": content_type, "Content-Encoding": encoding}
    answer = requests.request(
        method,
        f"http://127.0.0.1:{served.http_port}{path}",
        data=content,
        headers={name: value for name, value in headers.items() if value is not None},
        timeout=WITHIN_S,
    )
    return read_reply(answer)


def read_reply(answer: requests.Response) -> Reply:
    """An HTTP answer; a failure must hold a google.rpc.Status in the format it claims."""
    good = answer.status_code == HTTPStatus.OK
    message: Any = ExportTraceServiceResponse() if good else Status()
    if answer.headers["Content-Type"] == JSON:
        Parse(answer.text, message)
    else:
        assert answer.headers["Content-Type"] == PROTOBUF
        message.ParseFromString(answer.content)
    asked = answer.headers.get("Retry-After")
    return Reply(
        code=OK if good else message.code,
        content=message,
        retry_after_s=None if asked is None else float(asked),
        http_status=answer.status_code,
        headers=answer.headers,
    )


def call(served: Wire, content: bytes, *, compression: Any = None) -> Reply:
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"127.0.0.1:{served.grpc_port}", options) as channel:
        export = channel.unary_unary("/opentelemetry.proto.collector.trace.v1.TraceService/Export")
        try:
            answer = export(content, compression=compression, timeout=WITHIN_S)
        except grpc.RpcError as error:
            return _failed_call(error)
    return Reply(code=OK, content=ExportTraceServiceResponse.FromString(answer))


def _failed_call(error: Any) -> Reply:
    code: int = error.code().value[0]
    trailers = {item.key: item.value for item in error.trailing_metadata()}
    status, info = Status.FromString(trailers.get("grpc-status-details-bin", b"")), RetryInfo()
    found = any(detail.Unpack(info) for detail in status.details)
    if found:
        assert (status.code, status.message) == (code, error.details())
    else:
        assert "grpc-status-details-bin" not in trailers
    return Reply(
        code=code,
        content=Status(code=code, message=error.details()),
        retry_after_s=info.retry_delay.ToTimedelta().total_seconds() if found else None,
        headers=trailers,
    )


def _protobuf(request: ExportTraceServiceRequest) -> bytes:
    return request.SerializeToString()


def _json(request: ExportTraceServiceRequest) -> bytes:
    return json_bytes(in_json(request))


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    name: str
    encode: Callable[[ExportTraceServiceRequest], bytes] = _protobuf
    send_bytes: Callable[[Wire, bytes], Reply]

    def send(self, served: Wire, request: ExportTraceServiceRequest) -> Reply:
        return self.send_bytes(served, self.encode(request))


def _gzipped_post(content_type: str) -> Callable[[Wire, bytes], Reply]:
    return lambda served, content: post(
        served, gzip.compress(content), content_type=content_type, encoding="gzip"
    )


TRANSPORTS = (
    Transport(name="grpc", send_bytes=call),
    Transport(
        name="grpc-gzip",
        send_bytes=lambda served, content: call(served, content, compression=grpc.Compression.Gzip),
    ),
    Transport(name="http", send_bytes=post),
    Transport(name="http-gzip", send_bytes=_gzipped_post(PROTOBUF)),
    Transport(
        name="http-json",
        encode=_json,
        send_bytes=lambda served, content: post(served, content, content_type=JSON),
    ),
    Transport(name="http-json-gzip", encode=_json, send_bytes=_gzipped_post(JSON)),
)

# Those that take a protobuf body: what is wrong with one is wrong at each of them.
PROTOBUF_TRANSPORTS = tuple(transport for transport in TRANSPORTS if transport.encode is _protobuf)

at_every_transport = pytest.mark.parametrize(
    "transport", TRANSPORTS, ids=lambda transport: transport.name
)
at_protobuf_transports = pytest.mark.parametrize(
    "transport", PROTOBUF_TRANSPORTS, ids=lambda transport: transport.name
)
