"""An OTLP client that records which of its spans were acknowledged."""

import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
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
