"""Two small OTLP receivers, one for each protocol, that collect the exports."""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from agent.simulator.span_sender import SpanProtocol, SpanTarget


@dataclass(frozen=True, slots=True)
class Received:
    """The exports so far, and the target to send to."""

    target: SpanTarget
    exports: list[ExportTraceServiceRequest] = field(default_factory=list)

    def spans(self) -> list[Span]:
        """Every span so far."""
        return [span for _, _, span in self._parts()]

    def scopes(self) -> set[str]:
        """The names of all instrumentation scopes."""
        return {scope for _, scope, _ in self._parts()}

    def resources(self) -> list[dict[str, Any]]:
        """The attributes of the resource of each span."""
        return [resource for resource, _, _ in self._parts()]

    def _parts(self) -> Iterator[tuple[dict[str, Any], str, Span]]:
        for export in self.exports:
            for resource in export.resource_spans:
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        yield values(resource.resource.attributes), scope.scope.name, span


def values(attributes: Any) -> dict[str, Any]:
    """Attributes as Python values."""

    def value(pair: KeyValue) -> Any:
        return getattr(pair.value, pair.value.WhichOneof("value") or "string_value")

    return {pair.key: value(pair) for pair in attributes}


class _Servicer(TraceServiceServicer):
    def __init__(self, exports: list[ExportTraceServiceRequest]) -> None:
        self._exports = exports

    def Export(  # noqa: N802 - the name is OTLP's
        self, request: ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> ExportTraceServiceResponse:
        self._exports.append(request)
        return ExportTraceServiceResponse()


@asynccontextmanager
async def grpc_receiver() -> AsyncIterator[Received]:
    """A receiver of OTLP over gRPC."""
    server = grpc.server(ThreadPoolExecutor(max_workers=1))
    port = server.add_insecure_port("127.0.0.1:0")
    received = Received(SpanTarget(endpoint=f"http://127.0.0.1:{port}", service_name="sim-0"))
    add_TraceServiceServicer_to_server(_Servicer(received.exports), server)  # type: ignore[no-untyped-call]
    server.start()
    try:
        yield received
    finally:
        server.stop(grace=None).wait()


@asynccontextmanager
async def http_receiver() -> AsyncIterator[Received]:
    """A receiver of OTLP over HTTP."""
    exports: list[ExportTraceServiceRequest] = []

    async def export(request: web.Request) -> web.Response:
        exports.append(ExportTraceServiceRequest.FromString(await request.read()))
        body = ExportTraceServiceResponse().SerializeToString()
        return web.Response(body=body, content_type="application/x-protobuf")

    app = web.Application()
    app.router.add_post("/v1/traces", export)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
    try:
        yield Received(
            SpanTarget(endpoint=endpoint, protocol=SpanProtocol.HTTP, service_name="sim-0"), exports
        )
    finally:
        await runner.cleanup()


RECEIVERS: Mapping[str, Callable[[], AbstractAsyncContextManager[Received]]] = {
    "grpc": grpc_receiver,
    "http/protobuf": http_receiver,
}
