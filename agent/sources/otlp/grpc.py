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
from agent.settings.access import AccessPolicy, AccessRefusal
from agent.sources.client_connection import RETRY_AFTER_S
from agent.sources.listening import TlsFiles
from agent.sources.otlp.limits import (
    BODY_WITHIN_S,
    GRPC_MESSAGE_WITHIN_S,
    MAX_BODY_BYTES,
    MAX_GRPC_CALLS,
    MAX_GRPC_READING,
    BodyTooSlow,
)
from agent.sources.otlp.payload import Body
from agent.sources.otlp.receiver import (
    ACCESS_REFUSALS,
    REFUSALS,
    REFUSED,
    ExportResult,
    Receiver,
    Refusal,
    public,
    response,
)

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"

_CODES = {code.value[0]: code for code in grpc.StatusCode}

_OPTIONS = (
    # Counted by gRPC before and after decompression.
    ("grpc.max_receive_message_length", MAX_BODY_BYTES),
    # Else gRPC takes megabytes of each call into memory before it is read.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.max_concurrent_streams", MAX_GRPC_CALLS),
    # A second agent on the port must fail to start, not take half of the spans.
    ("grpc.so_reuseport", 0),
)
_MOST_CONNECTIONS = "grpc.max_allowed_incoming_connections"


class OtlpGrpc:
    """The gRPC receiver on one address; `port` is known after `start`."""

    def __init__(
        self,
        receiver: Receiver,
        address: str,
        *,
        message_within_s: float = GRPC_MESSAGE_WITHIN_S,
        access: AccessPolicy | None = None,
        tls: TlsFiles | None = None,
        connections: int | None = None,
    ) -> None:
        """Without an access policy every client may send."""
        self._access = access or AccessPolicy()
        self._tls = tls
        limits = () if connections is None else ((_MOST_CONNECTIONS, connections),)
        self._options = _OPTIONS + limits
        self._receiver = receiver
        self._address = address
        self._message_within_s = message_within_s
        self._reading = asyncio.Semaphore(MAX_GRPC_READING)
        self._server: Any = None
        self.port = 0

    async def start(self) -> None:
        """Listen. Raises SettingsInvalid for a taken address."""
        self._server = grpc.aio.server(options=self._options)
        # On the wire a stream of one message is the same; only a stream is read on demand.
        handler = grpc.stream_unary_rpc_method_handler(self._export)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Export": handler}),)
        )
        try:
            self.port = self._listen()
        except RuntimeError as error:
            raise SettingsInvalid(
                [f"otlp.grpc: cannot listen on {self._address}; choose another address"]
            ) from error
        await self._server.start()

    def _listen(self) -> int:
        if self._tls is None:
            port = self._server.add_insecure_port(self._address)
        else:
            port = self._server.add_secure_port(self._address, self._tls.credentials())
        return int(port)

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
        if (refused := self._refused_access(context)) is not None:
            refusal = ACCESS_REFUSALS[refused]
            self._receiver.refused(refusal.reason)
            return refusal, refused.value
        try:
            body = await self._read(context)
            with self._receiver.reserve() as memory:
                memory.add(len(body))
                return await self._receiver.take(Body(body), memory)
        except REFUSED as error:
            refusal = REFUSALS[type(error)]
            self._receiver.refused(refusal.reason)
            return refusal, public(error)

    def _refused_access(self, context: Any) -> AccessRefusal | None:
        if self._access.tokens is None:
            return None
        # No browser can send this protocol, so the name of the host does not matter.
        return self._access.refusal(None, dict(context.invocation_metadata()).get("authorization"))

    async def _read(self, context: Any) -> bytes:
        try:
            async with asyncio.timeout(BODY_WITHIN_S), self._reading:
                async with asyncio.timeout(self._message_within_s):
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
