"""An OTLP gRPC receiver that passes each export on to several others."""

from collections.abc import Sequence
from concurrent import futures
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


class FanOut(TraceServiceServicer):
    """Listens on one port, and passes on to the others."""

    def __init__(self, port: int, others: Sequence[int]) -> None:
        self._channels = [grpc.insecure_channel(f"127.0.0.1:{other}") for other in others]
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
        add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self._server.add_insecure_port(f"127.0.0.1:{port}")

    def Export(  # noqa: N802 - the name is OTLP's
        self, request: ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> ExportTraceServiceResponse:
        """The one method of OTLP's trace service."""
        for channel in self._channels:
            TraceServiceStub(channel).Export(request)  # type: ignore[no-untyped-call]
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
