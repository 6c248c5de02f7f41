"""OTLP clients that record which of their spans were acknowledged: one at a time, and a load."""

import http.client
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

EXPORT_WITHIN_S = 5.0


@dataclass(slots=True)
class SpanSender:
    """Sends spans like vLLM's, one trace each; `sent` and `acknowledged` hold trace ids in hex."""

    port: int
    sent: set[str] = field(default_factory=set)
    acknowledged: set[str] = field(default_factory=set)

    def export(self, spans: Sequence[Span]) -> bool:
        """Whether the receiver acknowledged them; False when it is unreachable."""
        request = ExportTraceServiceRequest()
        request.resource_spans.add().scope_spans.add().spans.extend(spans)
        ids = {span.trace_id.hex() for span in spans}
        self.sent.update(ids)
        # A new channel each time: gRPC reconnects a lost channel with growing delays.
        with grpc.insecure_channel(f"127.0.0.1:{self.port}") as channel, suppress(grpc.RpcError):
            stub = TraceServiceStub(channel)  # type: ignore[no-untyped-call]
            stub.Export(request, timeout=EXPORT_WITHIN_S)
            self.acknowledged.update(ids)
        return ids <= self.acknowledged


def request_span(request_id: str) -> Span:
    """A span of a request that ended just now, with the attributes of vLLM 0.32."""
    e2e_s = 0.5
    ended_ns = time.time_ns()
    seconds = {
        "gen_ai.latency.time_to_first_token": 0.1,
        "gen_ai.latency.e2e": e2e_s,
        "gen_ai.latency.time_in_queue": 0.01,
        "gen_ai.latency.time_in_model_prefill": 0.09,
        "gen_ai.latency.time_in_model_decode": 0.4,
        "gen_ai.latency.time_in_model_inference": 0.49,
    }
    counts = {"gen_ai.usage.prompt_tokens": 20, "gen_ai.usage.completion_tokens": 11}
    return Span(
        trace_id=secrets.token_bytes(16),
        span_id=secrets.token_bytes(8),
        name="llm_request",
        kind=Span.SPAN_KIND_SERVER,
        start_time_unix_nano=ended_ns - int(e2e_s * 1e9),
        end_time_unix_nano=ended_ns,
        attributes=[
            KeyValue(key="gen_ai.request.id", value=AnyValue(string_value=request_id)),
            *(KeyValue(key=key, value=AnyValue(double_value=v)) for key, v in seconds.items()),
            *(KeyValue(key=key, value=AnyValue(int_value=v)) for key, v in counts.items()),
        ],
    )


SENDERS = 3
SPANS_A_BATCH = 3
_AGAIN_AFTER_S = 0.02
_ANSWER_WITHIN_S = 120.0
_PROTOBUF = {"Content-Type": "application/x-protobuf"}


class ConstantLoad:
    """Three threads; `sent` and `acknowledged` hold trace ids in hex.

    `statuses` counts responses.
    """

    def __init__(self, port: int, pause_s: float) -> None:
        self._port = port
        self._pause_s = pause_s
        self.sent: set[str] = set()
        self.acknowledged: set[str] = set()
        self.statuses: Counter[int] = Counter()
        self._batches = [0] * SENDERS
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._send, args=(n,)) for n in range(SENDERS)]

    def start(self) -> None:
        """Begin to send."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End; what is not acknowledged yet stays so."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def more_acknowledged(self, batches: int, *, of_each: bool = False) -> None:
        """Return when so many further batches are acknowledged, in all or `of_each` sender."""
        before = list(self._batches)

        def came() -> bool:
            more = [now - then for now, then in zip(self._batches, before, strict=True)]
            return (min(more) if of_each else sum(more)) >= batches

        with self._changed:
            assert self._changed.wait_for(came, _ANSWER_WITHIN_S), "no batch is acknowledged"

    def _send(self, sender: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_ANSWER_WITHIN_S)
        ids, body = self._next_batch()
        while not self._stopping.is_set():
            if not self._is_acknowledged(connection, body):
                self._stopping.wait(_AGAIN_AFTER_S)
                continue
            with self._changed:
                self.acknowledged.update(ids)
                self._batches[sender] += 1
                self._changed.notify_all()
            ids, body = self._next_batch()
            self._stopping.wait(self._pause_s)
        connection.close()

    def _is_acknowledged(self, connection: http.client.HTTPConnection, body: bytes) -> bool:
        try:
            connection.request("POST", "/v1/traces", body, _PROTOBUF)
            response = connection.getresponse()
            response.read()
        except (OSError, http.client.HTTPException):
            connection.close()
            return False
        self.statuses[response.status] += 1
        return response.status == 200

    def _next_batch(self) -> tuple[Sequence[str], bytes]:
        spans = [request_span("under load") for _ in range(SPANS_A_BATCH)]
        request = ExportTraceServiceRequest()
        request.resource_spans.add().scope_spans.add().spans.extend(spans)
        ids = [span.trace_id.hex() for span in spans]
        self.sent.update(ids)
        return ids, request.SerializeToString()


@contextmanager
def constant_load(port: int, pause_s: float = 0.0) -> Iterator[ConstantLoad]:
    """A load inside the block, to an OTLP receiver over HTTP that need not be there yet.

    Each sender waits for a pause between two batches.
    """
    load = ConstantLoad(port, pause_s)
    load.start()
    try:
        yield load
    finally:
        load.stop()
