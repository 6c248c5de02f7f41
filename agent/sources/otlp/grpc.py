"""OTLP over gRPC. Bodies are taken as bytes, so that a bad one gets the status OTLP asks for."""

from typing import Any

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from agent.errors import PayloadInvalid, PayloadTooLarge, SettingsInvalid, StoreUnavailable
from agent.sources.otlp.answers import REFUSALS, Refusal, response
from agent.sources.otlp.payload import MAX_BODY_BYTES
from agent.sources.otlp.receiver import RETRY_AFTER_S, Body, Receiver

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"

_CODES = {code.value[0]: code for code in grpc.StatusCode}

_OPTIONS = (
    # Counted by gRPC after decompression; its own default of 4 MiB is below OTLP's 64 MiB.
    ("grpc.max_receive_message_length", MAX_BODY_BYTES),
    # A second agent on the port must fail to start, not take half of the spans.
    ("grpc.so_reuseport", 0),
)


class OtlpGrpc:
    """The gRPC receiver on one address; `port` is known after `start`."""

    def __init__(self, receiver: Receiver, address: str) -> None:
        self._receiver = receiver
        self._address = address
        self._server: Any = None
        self.port = 0

    async def start(self) -> None:
        """Listen. SettingsInvalid where the address cannot be had."""
        self._server = grpc.aio.server(options=_OPTIONS)
        handler = grpc.unary_unary_rpc_method_handler(self._export)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Export": handler}),)
        )
        try:
            self.port = self._server.add_insecure_port(self._address)
        except RuntimeError as error:
            raise SettingsInvalid(
                [f"otlp.grpc: cannot listen on {self._address}; choose another address"]
            ) from error
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Take no new export; those under way have `grace_s` to end."""
        if self._server is not None:
            await self._server.stop(grace_s)

    async def _export(self, body: bytes, context: Any) -> bytes:
        try:
            with self._receiver.room() as hold:
                hold(len(body))
                answer = await self._receiver.take(Body(body))
        except (PayloadInvalid, PayloadTooLarge, StoreUnavailable) as error:
            refusal = REFUSALS[type(error)]
            self._receiver.refused(refusal.reason)
            await _abort(context, refusal, str(error))
        return response(answer).SerializeToString()


async def _abort(context: Any, refusal: Refusal, message: str) -> None:
    trailers: tuple[tuple[str, bytes], ...] = ()
    if refusal.retryable:
        detail = AnyMessage()
        detail.Pack(RetryInfo(retry_delay=Duration(seconds=RETRY_AFTER_S)))
        status = Status(code=refusal.grpc_code, message=message, details=[detail])
        trailers = (("grpc-status-details-bin", status.SerializeToString()),)
    await context.abort(_CODES[refusal.grpc_code], message, trailers)
