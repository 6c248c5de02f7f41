"""Receivers of OTLP spans: one records them, one passes them on."""

import threading
from collections.abc import Sequence
from concurrent import futures
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    TraceServiceStub,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.real_parts.ports import free_port


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedSpan:
    """A request span as it was sent, read without any of the agent's code."""

    request_id: str
    trace_id: str
    ttft_s: float
    decode_s: float
    input_tokens: int
    output_tokens: int

    @property
    def tpot_s(self) -> float:
        """Seconds per output token after the first."""
        return self.decode_s / (self.output_tokens - 1)


class Collector(TraceServiceServicer):
    """Receives exports over gRPC."""

    def __init__(self, port: int | None = None) -> None:
        self.port = port or free_port()
        self._lock = threading.Lock()
        self._spans: list[ReceivedSpan] = []
        self._all: list[Span] = []
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
        add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self._server.add_insecure_port(f"127.0.0.1:{self.port}")

    def spans(self) -> dict[str, ReceivedSpan]:
        """The request spans received so far, by request id."""
        with self._lock:
            return {span.request_id: span for span in self._spans}

    def received(self) -> list[Span]:
        """Every span received so far, of requests or not."""
        with self._lock:
            return list(self._all)

    def Export(  # noqa: N802 - the name is OTLP's
        self, request: ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> ExportTraceServiceResponse:
        """The one method of OTLP's trace service."""
        spans = [
            span
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        received = [_received(span) for span in spans if span.name == "llm_request"]
        with self._lock:
            self._spans += received
            self._all += spans
        return ExportTraceServiceResponse()

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.stop(grace=None).wait()


def _received(span: Span) -> ReceivedSpan:
    attributes = {attribute.key: attribute.value for attribute in span.attributes}
    return ReceivedSpan(
        request_id=attributes["gen_ai.request.id"].string_value,
        trace_id=span.trace_id.hex(),
        ttft_s=attributes["gen_ai.latency.time_to_first_token"].double_value,
        decode_s=attributes["gen_ai.latency.time_in_model_decode"].double_value,
        input_tokens=attributes["gen_ai.usage.prompt_tokens"].int_value,
        output_tokens=attributes["gen_ai.usage.completion_tokens"].int_value,
    )


PASSED_ON_WITHIN_S = 60.0


class SpanRelay(TraceServiceServicer):
    """Listens on the gRPC port `at` and passes on to the ports `to`; times are `lead_s` ahead."""

    def __init__(self, at: int, to: Sequence[int]) -> None:
        self.lead_s = 0.0
        self._channels = [grpc.insecure_channel(f"127.0.0.1:{port}") for port in to]
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
        add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self._server.add_insecure_port(f"127.0.0.1:{at}")

    def Export(  # noqa: N802 - the name is OTLP's
        self, request: ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> ExportTraceServiceResponse:
        """The one method of OTLP's trace service."""
        lead_ns = round(self.lead_s * 1e9)
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    span.start_time_unix_nano += lead_ns
                    span.end_time_unix_nano += lead_ns
        for channel in self._channels:
            stub = TraceServiceStub(channel)  # type: ignore[no-untyped-call]
            stub.Export(request, timeout=PASSED_ON_WITHIN_S, wait_for_ready=True)
        return ExportTraceServiceResponse()

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.stop(grace=None).wait()
        for channel in self._channels:
            channel.close()
