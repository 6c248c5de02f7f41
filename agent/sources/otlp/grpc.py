"""OTLP over gRPC. It takes bodies as bytes, so that a bad one gets the status that OTLP wants."""

import asyncio
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from agent.errors import PayloadInvalid, SettingsInvalid
from agent.sources.otlp.export_refusals import (
    REFUSALS,
    REFUSED,
    BodyTooSlow,
    Refusal,
    public,
    response,
)
from agent.sources.otlp.payload import MAX_BODY_BYTES
from agent.sources.otlp.receiver import RETRY_AFTER_S, Body, ExportResult, Receiver

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"

_CODES = {code.value[0]: code for code in grpc.StatusCode}

_OPTIONS = (
    # Counted by gRPC after decompression; its own default of 4 MiB is below OTLP's 64 MiB.
    ("grpc.max_receive_message_length", MAX_BODY_BYTES),
    # A second agent on the port must fail to start, not take half of the spans.
    ("grpc.so_reuseport", 0),
)


# gRPC reads a whole message into memory before its length is known, so few are read at a time; the
# others wait in their senders.
MAX_READING = 4

# vLLM's exporter gives up after the same time, and a stalled sender must not block others.
BODY_WITHIN_S = 10.0


class OtlpGrpc:
    """The gRPC receiver on one address; `port` is known after `start`."""

    def __init__(
        self, receiver: Receiver, address: str, body_within_s: float = BODY_WITHIN_S
    ) -> None:
        self._receiver = receiver
        self._address = address
        self._body_within_s = body_within_s
        self._reading = asyncio.Semaphore(MAX_READING)
        self._server: Any = None
        self.port = 0

    async def start(self) -> None:
        """Listen. Raises SettingsInvalid for a taken address."""
        self._server = grpc.aio.server(options=_OPTIONS)
        # On the wire a stream of one message is the same; only a stream is read on demand.
        handler = grpc.stream_unary_rpc_method_handler(self._export)
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
        """Take no new export; running ones have `grace_s` to end."""
        if self._server is not None:
            await self._server.stop(grace_s)

    async def _export(self, _messages: Any, context: Any) -> bytes:
        result = await self._take(context)
        if isinstance(result, ExportResult):
            return response(result).SerializeToString()
        # gRPC keeps the abort and its stack frames until a garbage collection, so no frame among
        # them may hold the body.
        await _abort(context, *result)

    async def _take(self, context: Any) -> ExportResult | tuple[Refusal, str]:
        try:
            with self._receiver.room() as hold:
                body = await self._read(context)
                hold(len(body))
                return await self._receiver.take(Body(body))
        except REFUSED as error:
            refusal = REFUSALS[type(error)]
            self._receiver.refused(refusal.reason)
            return refusal, public(error)

    async def _read(self, context: Any) -> bytes:
        try:
            async with asyncio.timeout(self._body_within_s), self._reading:
                body = await context.read()
        except TimeoutError as error:
            raise BodyTooSlow from error
        if not isinstance(body, bytes):
            raise PayloadInvalid("the call holds no message")
        return body


async def _abort(context: Any, refusal: Refusal, message: str) -> NoReturn:
    trailers: tuple[tuple[str, bytes], ...] = ()
    if refusal.retryable:
        detail = AnyMessage()
        detail.Pack(RetryInfo(retry_delay=Duration(seconds=RETRY_AFTER_S)))
        status = Status(code=refusal.grpc_code, message=message, details=[detail])
        trailers = (("grpc-status-details-bin", status.SerializeToString()),)
    await context.abort(_CODES[refusal.grpc_code], message, trailers)
    raise AssertionError("an abort returned")
