"""The spans that vLLM 0.32 sends for finished requests, made and sent by the OTel SDK.

Names, attributes and resource are those of `vllm/v1/engine/output_processor.py` (`do_tracing`)
and `vllm/tracing/otel.py`; the resource has `goodput.simulated`, so that they do not pass as real.
"""

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
    OTLPSpanExporter as GrpcExporter,
)
from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
    OTLPSpanExporter as HttpExporter,
)
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from agent.http_client import GRPC_WITHOUT_PROXY, http_session
from agent.simulator.batching import Finished, Step

SCOPE = "vllm.tracing.otel"
_W3C = TraceContextTextMapPropagator()
TRACE_HEADERS = ("traceparent", "tracestate")
# How long `close` waits for a receiver that does not answer before it drops its spans.
FLUSH_WITHIN_S = 5.0


class SpanProtocol(StrEnum):
    """A protocol for spans, with the values of OTEL_EXPORTER_OTLP_TRACES_PROTOCOL."""

    GRPC = "grpc"
    HTTP = "http/protobuf"


_EXPORTERS: Mapping[SpanProtocol, Callable[[str], SpanExporter]] = {
    SpanProtocol.GRPC: lambda endpoint: GrpcExporter(
        endpoint=endpoint, insecure=True, channel_options=(GRPC_WITHOUT_PROXY,)
    ),
    SpanProtocol.HTTP: lambda endpoint: HttpExporter(endpoint=endpoint, session=http_session()),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanTarget:
    """The destination of spans. As in vLLM, the endpoint of http/protobuf is the full URL with
    `/v1/traces`, and a service name of None is left to the SDK and its environment."""

    endpoint: str
    protocol: SpanProtocol = SpanProtocol.GRPC
    service_name: str | None = None


def attributes(done: Finished) -> dict[str, str | int | float]:
    """The attributes of a request's span, without parameters that are 0, as in vLLM."""
    request = done.request
    parameters = {
        "gen_ai.request.top_p": request.top_p,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": request.temperature,
        "gen_ai.request.n": 1,
    }
    return {
        "gen_ai.latency.time_to_first_token": done.ttft_s,
        "gen_ai.latency.e2e": done.e2e_s,
        "gen_ai.latency.time_in_queue": done.queue_s,
        "gen_ai.latency.time_in_model_prefill": done.prefill_s,
        "gen_ai.latency.time_in_model_decode": done.decode_s,
        "gen_ai.latency.time_in_model_inference": done.inference_s,
        "gen_ai.usage.prompt_tokens": request.prompt_tokens,
        "gen_ai.usage.completion_tokens": request.output_tokens,
        "gen_ai.request.id": request.request_id,
        **{name: value for name, value in parameters.items() if value},
    }


class SpanSender:
    """Sends the spans of one engine. `unix_ns` converts the engine's seconds to Unix time."""

    def __init__(self, target: SpanTarget, unix_ns: Callable[[float], int]) -> None:
        self._unix_ns = unix_ns
        self._exporter = _EXPORTERS[target.protocol](target.endpoint)
        self._processor = BatchSpanProcessor(self._exporter)
        self._provider = provider_for(target.service_name)
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer(SCOPE)

    def observe(self, step: Step) -> None:
        """Send a span for each request that the step finished."""
        for done in step.finished:
            record_span(self._tracer, done, self._unix_ns)

    async def close(self) -> None:
        """Send the remaining spans, within FLUSH_WITHIN_S."""
        flush = asyncio.create_task(asyncio.to_thread(self._processor.force_flush))
        _, trying = await asyncio.wait({flush}, timeout=FLUSH_WITHIN_S)
        if trying:
            self._exporter.shutdown()
        await flush
        await asyncio.to_thread(self._provider.shutdown)


def record_span(tracer: Tracer, done: Finished, unix_ns: Callable[[float], int]) -> None:
    """Start and end the span of a request; `unix_ns` converts the engine's seconds."""
    # An empty context, so that no span of this process becomes the parent.
    parent = _W3C.extract(done.request.trace_headers, context=Context())
    span = tracer.start_span(
        "llm_request",
        context=parent,
        kind=SpanKind.SERVER,
        attributes=attributes(done),
        start_time=unix_ns(done.request.arrived_s),
    )
    span.end(end_time=unix_ns(done.last_token_s))


def provider_for(service_name: str | None) -> TracerProvider:
    """The provider of an engine's spans, without exporters."""
    # `close` flushes, not the SDK's own atexit.
    return TracerProvider(resource=_resource(service_name), shutdown_on_exit=False)


def _resource(service_name: str | None) -> Resource:
    named = {} if service_name is None else {SERVICE_NAME: service_name}
    return Resource.create(
        {
            "vllm.instrumenting_module_name": "vllm.llm_engine",
            "vllm.process_id": str(os.getpid()),
            "goodput.simulated": True,
            **named,
        }
    )
