"""OTLP endpoints over HTTP and gRPC with scripted responses."""

import threading
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from agent.catalog.reasons import FORWARDS_DROPPED
from agent.outputs.otlp_forwarder import Destination as To
from agent.outputs.otlp_forwarder import Forwarder, destination

WITHIN_S = 10.0

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"


@dataclass(frozen=True, slots=True)
class Received:
    """One received request."""

    path: str
    headers: Mapping[str, str]
    content: bytes


@dataclass(slots=True)
class Destination:
    """Records requests and returns the scripted responses in order; the last one repeats.

    No response is sent while `open_gate` is not set.
    """

    responses: list[Any]
    received: list[Received] = field(default_factory=list)
    open_gate: threading.Event = field(default_factory=threading.Event)
    url: str = ""
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self.open_gate.set()

    def respond(self, received: Received) -> Any:
        """Record a request and return its response."""
        with self._changed:
            self.received.append(received)
            response = self.responses.pop(0) if len(self.responses) > 1 else self.responses[0]
            self._changed.notify_all()
        assert self.open_gate.wait(WITHIN_S)
        return response

    def wait_for(self, tries: int) -> None:
        """Return when this many requests were received."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.received) >= tries, WITHIN_S), self

    @property
    def contents(self) -> list[bytes]:
        """The bodies of all requests."""
        return [received.content for received in self.received]


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A status with headers and a body."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes = b""


@contextmanager
def http_destination(*responses: HttpResponse) -> Iterator[Destination]:
    """An endpoint of OTLP over HTTP."""
    destination = Destination(list(responses) or [HttpResponse(200)])

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            self._send(destination.respond(Received(self.path, dict(self.headers), content)))

        def do_GET(self) -> None:
            destination.respond(Received(self.path, dict(self.headers), b"GET"))
            self._send(HttpResponse(200))

        def _send(self, response: HttpResponse) -> None:
            self.send_response(response.status)
            for name, value in response.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(response.content)))
            self.end_headers()
            self.wfile.write(response.content)

        def log_message(self, format: str, *args: Any) -> None:
            """Logs nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        destination.url = f"http://127.0.0.1:{server.server_port}"
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        try:
            yield destination
        finally:
            destination.open_gate.set()
            server.shutdown()
            serving.join()


@dataclass(frozen=True, slots=True)
class GrpcResponse:
    """A status, with a retry delay or raw details."""

    code: grpc.StatusCode
    retry_after_s: float | None = None
    details: bytes | None = None

    def trailers(self) -> Sequence[tuple[str, bytes]]:
        """The trailers that carry the retry delay or the details."""
        packed = self.details
        if self.retry_after_s is not None:
            detail, delay = AnyMessage(), Duration()
            delay.FromMilliseconds(int(self.retry_after_s * 1000))
            detail.Pack(RetryInfo(retry_delay=delay))
            code = self.code.value[0]
            packed = Status(code=code, details=[detail]).SerializeToString()
        return () if packed is None else (("grpc-status-details-bin", packed),)


@contextmanager
def grpc_destination(*responses: GrpcResponse) -> Iterator[Destination]:
    """An endpoint of OTLP over gRPC."""
    destination = Destination(list(responses) or [GrpcResponse(grpc.StatusCode.OK)])

    def export(content: bytes, context: grpc.ServicerContext) -> bytes:
        response = destination.respond(Received("", {}, content))
        if response.code is not grpc.StatusCode.OK:
            context.set_trailing_metadata(response.trailers())
            context.abort(response.code, "scripted")
        return b""

    server = grpc.server(ThreadPoolExecutor(max_workers=4))
    handlers = {"Export": grpc.unary_unary_rpc_method_handler(export)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    destination.url = f"grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield destination
    finally:
        destination.open_gate.set()
        server.stop(grace=None).wait()


PROTOBUF = "application/x-protobuf"
JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Body:
    """An OTLP body as the receiver passes it to the forwarder."""

    content: bytes
    content_type: str = PROTOBUF
    gzipped: bool = False


@dataclass(slots=True)
class ForwardCounts:
    """Counts sent and dropped bodies; tests wait for them."""

    reasons: Container[str] = FORWARDS_DROPPED
    sent: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def forwarded(self) -> None:
        with self._changed:
            self.sent += 1
            self._changed.notify_all()

    def forward_dropped(self, reason: str) -> None:
        assert reason in self.reasons
        with self._changed:
            self.dropped[reason] += 1
            self._changed.notify_all()

    def wait_for(self, bodies: int) -> None:
        """Return when this many bodies were sent or dropped."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: self.sent + self.dropped.total() >= bodies, WITHIN_S
            ), self


@contextmanager
def forwarding(to: To, first_delay_s: float = 0.0) -> Iterator[tuple[Forwarder, ForwardCounts]]:
    """Run a forwarder that retries at once; close it at the end."""
    counts = ForwardCounts()
    forwarder = Forwarder(to, counts, jitter=lambda: 0.5, first_delay_s=first_delay_s)
    try:
        yield forwarder, counts
    finally:
        forwarder.close(grace_s=WITHIN_S)


def forward(to: Destination, *bodies: Body, first_delay_s: float = 0.0) -> ForwardCounts:
    """Forward these bodies and return the counts when each was sent or dropped."""
    with forwarding(destination(to.url), first_delay_s) as (forwarder, counts):
        for body in bodies:
            forwarder.forward(body)
        counts.wait_for(len(bodies))
    return counts
