"""Forwards OTLP bodies to other endpoints, from a bounded queue with a thread of its own."""

import gzip
import logging
import random
import threading
import time
from collections import deque
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

_LOG = logging.getLogger(__name__)

TIMEOUT_S = 10.0
MAX_QUEUE_BYTES = 64 * 1024 * 1024
# Bodies can be very small, and each takes some memory of its own.
MAX_QUEUE_BODIES = 10_000
MAX_TRIES = 6
FIRST_DELAY_S = 1.0
MAX_DELAY_S = 30.0
# A destination that asks for a longer delay would make the queue overflow.
MAX_RETRY_AFTER_S = 300.0

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
        on_accepted: Callable[[bytes], None] | None = None,
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
            if self._on_accepted is not None:
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


class ForwardCounter(Protocol):
    """Counts forwarded bodies. The meter does; outputs do not import each other."""

    def forwarded(self) -> None:
        """The destination accepted a body."""

    def forward_dropped(self, reason: str) -> None:
        """A body was dropped."""


class Forwarder:
    """Sends bodies from a bounded queue in its own thread; a full queue drops the newest."""

    def __init__(
        self,
        to: Destination,
        counter: ForwardCounter,
        jitter: Callable[[], float] = random.random,
        first_delay_s: float = FIRST_DELAY_S,
        *,
        name: str = "otlp-forwarder",
        max_bodies: int | None = None,
    ) -> None:
        """`name` is that of its thread. At most `max_bodies` wait, or MAX_QUEUE_BODIES."""
        self._to = to
        self._counter = counter
        self._jitter = jitter
        self._first_delay_s = first_delay_s
        self._queue: deque[tuple[OtlpBody, float]] = deque()
        self._queued_bytes = 0
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._max_bodies = MAX_QUEUE_BODIES if max_bodies is None else max_bodies
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def queued_bytes(self) -> int:
        """Bytes of the bodies in the queue."""
        return self._queued_bytes

    @property
    def fill(self) -> float:
        """The share of the queue that is taken, by bodies or by bytes."""
        return max(len(self._queue) / self._max_bodies, self._queued_bytes / MAX_QUEUE_BYTES)

    @property
    def lag_s(self) -> float:
        """For how long the oldest body has waited; 0 while none waits."""
        with self._changed:
            return time.monotonic() - self._queue[0][1] if self._queue else 0.0

    def forward(self, payload: OtlpBody) -> None:
        """Queue a body; never blocks."""
        with self._changed:
            refused = self._refusal(payload)
            if refused is None:
                self._queue.append((payload, time.monotonic()))
                self._queued_bytes += len(payload.content)
                self._changed.notify()
        if refused is not None:
            self._counter.forward_dropped(refused)

    def _refusal(self, payload: OtlpBody) -> str | None:
        if self._closing.is_set():
            return ForwardDropped.STOPPING
        too_large = self._queued_bytes + len(payload.content) > MAX_QUEUE_BYTES
        full = too_large or len(self._queue) >= self._max_bodies
        return ForwardDropped.QUEUE_FULL if full else None

    def close(self, grace_s: float) -> None:
        """Send queued bodies for at most `grace_s`, then drop and count the rest."""
        with self._changed:
            self._closing.set()
            self._changed.notify()
        self._thread.join(grace_s)
        with self._changed:
            left = len(self._queue)
            self._queue.clear()
            self._queued_bytes = 0
        for _ in range(left):
            self._counter.forward_dropped(ForwardDropped.STOPPING)
        self._to.close()

    def _run(self) -> None:
        while (payload := self._next()) is not None:
            try:
                refused = self._deliver(payload)
            except Exception:
                # A body that cannot be sent must not block the next.
                _LOG.exception("a body could not be forwarded")
                refused = ForwardDropped.FAILED
            if not self._done(payload):
                return
            if refused is None:
                self._counter.forwarded()
            else:
                self._counter.forward_dropped(refused)

    def _next(self) -> OtlpBody | None:
        """The oldest body, which stays queued until it is sent or dropped; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing.is_set())
            return self._queue[0][0] if self._queue else None

    def _done(self, payload: OtlpBody) -> bool:
        """Remove the body; False if `close` has already dropped and counted it."""
        with self._changed:
            if not self._queue:
                return False
            self._queue.popleft()
            self._queued_bytes -= len(payload.content)
            return True

    def _deliver(self, payload: OtlpBody) -> str | None:
        """None if the destination accepted the body, else the reason of the drop."""
        delay_s = self._first_delay_s
        for tries_left in reversed(range(MAX_TRIES)):
            last = tries_left == 0 or self._closing.is_set()
            result = self._to.send(payload)
            if result.refused is None or not result.retry or last:
                break
            self._closing.wait(self._pause_s(result.retry_after_s, delay_s))
            delay_s = min(2 * delay_s, MAX_DELAY_S)
        return result.refused

    def _pause_s(self, retry_after_s: float | None, delay_s: float) -> float:
        if retry_after_s is not None:
            return min(retry_after_s, MAX_RETRY_AFTER_S)
        return delay_s * (0.8 + 0.4 * self._jitter())
