"""OTLP endpoints that bodies are sent to, over HTTP and gRPC."""

import gzip
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import grpc
import requests
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from agent.catalog.reasons import ForwardDropped, grpc_reason, http_reason
from agent.http_client import GRPC_WITHOUT_PROXY, http_session

TIMEOUT_S = 10.0

PROTOBUF = "application/x-protobuf"
_JSON = "application/json"

# opentelemetry-proto docs/specification.md: the only statuses after which a sender tries again.
_RETRYABLE_HTTP = frozenset((429, 502, 503, 504))
_RETRYABLE_GRPC = frozenset(
    (
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    )
)
_TRACES = "/v1/traces"
_EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


class OtlpBody(Protocol):
    """An OTLP body as it was received."""

    @property
    def content(self) -> bytes:
        """The bytes of the body."""

    @property
    def content_type(self) -> str:
        """Its media type."""

    @property
    def gzipped(self) -> bool:
        """Whether the bytes are compressed."""


@dataclass(frozen=True, slots=True)
class SendResult:
    """The result of one try: `refused` is None on success, else a reason for counting."""

    refused: str | None = None
    retry: bool = False
    retry_after_s: float | None = None


class Destination(Protocol):
    """An endpoint that bodies can be sent to."""

    def send(self, payload: OtlpBody) -> SendResult:
        """Send once."""

    def close(self) -> None:
        """Close the connections."""


class HttpDestination:
    """OTLP over HTTP; the body goes out as it came in, compression included."""

    def __init__(
        self,
        url: str,
        *,
        path: str = _TRACES,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        proxy: str | None = None,
        ca: Path | None = None,
        on_accepted: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        """`path` is for a URL without one. `on_accepted` gets the response to an accepted body."""
        given = urlsplit(url).path
        self._url = url if given.strip("/") else f"{url.rstrip('/')}{path}"
        self._timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
        self._on_accepted = on_accepted
        self._session = http_session(proxy, ca)
        self._session.headers.update(headers or {})

    def send(self, payload: OtlpBody) -> SendResult:
        """Send once."""
        headers = {"Content-Type": payload.content_type}
        if payload.gzipped:
            headers["Content-Encoding"] = "gzip"
        try:
            response = self._session.post(
                self._url,
                data=payload.content,
                headers=headers,
                timeout=self._timeout_s,
            )
        except requests.RequestException:
            return SendResult(ForwardDropped.UNREACHABLE, retry=True)
        if response.status_code < HTTPStatus.MULTIPLE_CHOICES:
            self._on_accepted(response.content)
            return SendResult()
        return SendResult(
            http_reason(response.status_code),
            retry=response.status_code in _RETRYABLE_HTTP,
            retry_after_s=_seconds(response.headers.get("Retry-After", "")),
        )

    def close(self) -> None:
        """Close the connections."""
        self._session.close()


def _seconds(header: str) -> float | None:
    return float(header) if header.isascii() and header.isdigit() else None


class GrpcDestination:
    """OTLP over gRPC. It cannot carry JSON bodies and drops them."""

    def __init__(self, address: str, proxy: str | None = None) -> None:
        options = [GRPC_WITHOUT_PROXY if proxy is None else ("grpc.http_proxy", proxy)]
        self._channel = grpc.insecure_channel(address, options)
        self._export = self._channel.unary_unary(_EXPORT)

    def send(self, payload: OtlpBody) -> SendResult:
        """Send once."""
        if payload.content_type == _JSON:
            return SendResult(ForwardDropped.JSON_TO_GRPC)
        content = gzip.decompress(payload.content) if payload.gzipped else payload.content
        try:
            self._export(content, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return _grpc_result(error)
        return SendResult()

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


def _grpc_result(error: Any) -> SendResult:
    code, retry_after_s = error.code(), _retry_delay_s(error.trailing_metadata())
    retry = code in _RETRYABLE_GRPC or (
        code is grpc.StatusCode.RESOURCE_EXHAUSTED and retry_after_s is not None
    )
    return SendResult(grpc_reason(code.name), retry=retry, retry_after_s=retry_after_s)


def _retry_delay_s(trailers: Any) -> float | None:
    """Seconds of the RetryInfo in the trailers; None without a readable one."""
    packed = dict(trailers or ()).get("grpc-status-details-bin", b"")
    info = RetryInfo()
    try:
        found = any(detail.Unpack(info) for detail in Status.FromString(packed).details)
    except DecodeError:
        return None
    return info.retry_delay.seconds + info.retry_delay.nanos * 1e-9 if found else None


def destination(url: str, proxy: str | None = None, ca: Path | None = None) -> Destination:
    """The destination of a URL: `grpc://host:port` or `http(s)://host:port[/path]`.

    `proxy` is the URL of an HTTP proxy on the way.
    """
    parts = urlsplit(url)
    if parts.scheme == "grpc":
        return GrpcDestination(parts.netloc, proxy)
    return HttpDestination(url, proxy=proxy, ca=ca)
