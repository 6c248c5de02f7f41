"""Passing received spans on to another OTLP endpoint, the same bytes, in the agent's own time."""

import gzip
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

import grpc
import requests

MAX_QUEUE_BYTES = 64 * 1024 * 1024
MAX_TRIES = 6
FIRST_DELAY_S = 1.0
MAX_DELAY_S = 30.0
TIMEOUT_S = 10.0

_JSON = "application/json"

# opentelemetry-proto docs/specification.md: the only answers after which a sender tries again.
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
_EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


class Payload(Protocol):
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
class Outcome:
    """What became of one try: `refused` is None on success, else a word for counting."""

    refused: str | None = None
    retry: bool = False
    retry_after_s: float | None = None


class Destination(Protocol):
    """An endpoint that bodies can be sent to."""

    def send(self, payload: Payload) -> Outcome:
        """Send once. Never raises."""


class HttpDestination:
    """OTLP over HTTP; the body goes out as it came in, compression included."""

    def __init__(self, url: str) -> None:
        path = urlsplit(url).path
        self._url = url if path.strip("/") else f"{url.rstrip('/')}/v1/traces"
        self._session = requests.Session()

    def send(self, payload: Payload) -> Outcome:
        """Send once. Never raises."""
        headers = {"Content-Type": payload.content_type}
        if payload.gzipped:
            headers["Content-Encoding"] = "gzip"
        try:
            answer = self._session.post(
                self._url, data=payload.content, headers=headers, timeout=TIMEOUT_S
            )
        except requests.RequestException:
            return Outcome("unreachable", retry=True)
        if answer.ok:
            return Outcome()
        return Outcome(
            f"http_{answer.status_code}",
            retry=answer.status_code in _RETRYABLE_HTTP,
            retry_after_s=_seconds(answer.headers.get("Retry-After")),
        )


class GrpcDestination:
    """OTLP over gRPC. JSON bodies have no place there and are dropped."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self._export = self._channel.unary_unary(_EXPORT)

    def send(self, payload: Payload) -> Outcome:
        """Send once. Never raises."""
        if payload.content_type == _JSON:
            return Outcome("json_to_grpc")
        content = gzip.decompress(payload.content) if payload.gzipped else payload.content
        try:
            self._export(content, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            code = error.code()
            return Outcome(f"grpc_{code.name.lower()}", retry=code in _RETRYABLE_GRPC)
        return Outcome()


def _seconds(header: str | None) -> float | None:
    return float(header) if header is not None and header.isdigit() else None


def destination(url: str) -> Destination:
    """Where an URL leads: `grpc://host:port` or `http(s)://host:port[/path]`."""
    parts = urlsplit(url)
    return GrpcDestination(parts.netloc) if parts.scheme == "grpc" else HttpDestination(url)


class Tell(Protocol):
    """Where the forwarder reports what became of bodies."""

    def forwarded(self) -> None:
        """A body was taken by the destination."""

    def forward_dropped(self, reason: str) -> None:
        """A body was given up."""


class Forwarder:
    """Sends bodies from a bounded queue in its own thread; a full queue drops the newest."""

    def __init__(
        self,
        to: Destination,
        tell: Tell,
        jitter: Callable[[], float] = random.random,
        first_delay_s: float = FIRST_DELAY_S,
    ) -> None:
        self._to = to
        self._tell = tell
        self._jitter = jitter
        self._first_delay_s = first_delay_s
        self._queue: deque[Payload] = deque()
        self._queued_bytes = 0
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="otlp-forwarder", daemon=True)
        self._thread.start()

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait to be sent."""
        return self._queued_bytes

    def forward(self, payload: Payload) -> None:
        """Put a body in the queue; never blocks."""
        with self._changed:
            if self._queued_bytes + len(payload.content) > MAX_QUEUE_BYTES:
                self._tell.forward_dropped("queue_full")
                return
            self._queue.append(payload)
            self._queued_bytes += len(payload.content)
            self._changed.notify()

    def close(self, grace_s: float) -> None:
        """Send what waits, for `grace_s` at most; what is left then is counted as dropped."""
        with self._changed:
            self._closing.set()
            self._changed.notify()
        self._thread.join(grace_s)
        with self._changed:
            for _ in range(len(self._queue)):
                self._tell.forward_dropped("stopping")
            self._queue.clear()

    def _run(self) -> None:
        while (payload := self._next()) is not None:
            self._deliver(payload)
            with self._changed:
                self._queued_bytes -= len(payload.content)

    def _next(self) -> Payload | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing.is_set())
            return self._queue.popleft() if self._queue else None

    def _deliver(self, payload: Payload) -> None:
        delay_s, refused = self._first_delay_s, "stopping"
        for _ in range(MAX_TRIES):
            outcome = self._to.send(payload)
            if outcome.refused is None:
                self._tell.forwarded()
                return
            refused = outcome.refused
            if not outcome.retry:
                break
            asked_s = outcome.retry_after_s
            self._closing.wait(
                asked_s if asked_s is not None else delay_s * (0.8 + 0.4 * self._jitter())
            )
            delay_s = min(2 * delay_s, MAX_DELAY_S)
        self._tell.forward_dropped(refused)
