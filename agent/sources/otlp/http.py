"""OTLP over HTTP: a plain ASGI application, which is fast for many small exports."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message
from google.rpc.status_pb2 import Status

from agent.catalog.reasons import ExportRefused
from agent.errors import PayloadTooLarge
from agent.settings.access import AccessPolicy
from agent.sources.client_connection import RETRY_AFTER_S
from agent.sources.otlp.limits import BODY_WITHIN_S, MAX_BODY_BYTES, BodyTooSlow, Reservation
from agent.sources.otlp.payload import CONTENT_TYPES, JSON, PROTOBUF, Body
from agent.sources.otlp.receiver import (
    ACCESS_REFUSALS,
    CONTENT_ENCODING,
    CONTENT_TYPE,
    METHOD,
    NO_SUCH_PATH,
    REFUSALS,
    REFUSED,
    TOO_SLOW,
    ExportResult,
    Receiver,
    Refusal,
    public,
    response,
)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

TRACES_PATH = "/v1/traces"


class ClientGone(Exception):
    """The sender left before its body was complete."""


class OtlpHttp:
    """Serves `POST /v1/traces`; a refusal is a google.rpc.Status in the sender's format."""

    def __init__(
        self,
        receiver: Receiver,
        body_within_s: float = BODY_WITHIN_S,
        *,
        access: AccessPolicy | None = None,
    ) -> None:
        """Without an access policy every client may send."""
        self._access = access or AccessPolicy()
        self._receiver = receiver
        self._body_within_s = body_within_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI call."""
        if scope["type"] != "http":
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        content_type = headers.get(b"content-type", "").split(";")[0].strip().lower()
        encoding = headers.get(b"content-encoding", "").strip().lower()
        refused = self._access.refusal(headers.get(b"host"), headers.get(b"authorization"))
        if refused is not None:
            await self._refuse(send, ACCESS_REFUSALS[refused], refused.value, content_type)
            return
        refusal = _refusal(scope, content_type, encoding)
        if refusal is not None:
            await self._refuse(send, refusal, _SENTENCES[refusal], content_type)
            return
        try:
            result = await self._export(receive, content_type, gzipped=encoding == _GZIP)
        except ClientGone:
            self._receiver.refused(ExportRefused.CLIENT_GONE)
        except REFUSED as error:
            await self._refuse(send, REFUSALS[type(error)], public(error), content_type)
        else:
            await _respond(send, 200, response(result), content_type)

    async def _export(self, receive: Receive, content_type: str, *, gzipped: bool) -> ExportResult:
        with self._receiver.reserve() as memory:
            try:
                async with asyncio.timeout(self._body_within_s):
                    content = await _read_body(receive, memory)
            except TimeoutError as error:
                raise BodyTooSlow from error
            return await self._receiver.take(Body(content, content_type, gzipped), memory)

    async def _refuse(self, send: Send, refusal: Refusal, message: str, content_type: str) -> None:
        self._receiver.refused(refusal.reason)
        extra = list(_EXTRA_HEADERS.get(refusal, ()))
        if refusal.retryable:
            extra.append((b"retry-after", str(RETRY_AFTER_S).encode()))
        status = Status(code=refusal.grpc_code, message=message)
        await _respond(send, refusal.http_status, status, content_type, extra)


async def _read_body(receive: Receive, memory: Reservation) -> bytes:
    content = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        if len(content) + len(chunk) > MAX_BODY_BYTES:
            raise PayloadTooLarge(f"the body is over {MAX_BODY_BYTES} bytes; send smaller batches")
        memory.add(len(chunk))
        content += chunk
        if not message.get("more_body", False):
            return bytes(content)


def _refusal(scope: Scope, content_type: str, encoding: str) -> Refusal | None:
    if scope["path"] != TRACES_PATH:
        return NO_SUCH_PATH
    if scope["method"] != "POST":
        return METHOD
    if content_type not in CONTENT_TYPES:
        return CONTENT_TYPE
    if encoding not in _ENCODINGS:
        return CONTENT_ENCODING
    return None


_GZIP = "gzip"
_ENCODINGS = frozenset(("", "identity", _GZIP))

_SENTENCES = {
    NO_SUCH_PATH: f"only traces are received here, at {TRACES_PATH}",
    METHOD: "send exports with POST",
    CONTENT_TYPE: f"send {PROTOBUF} or {JSON}",
    CONTENT_ENCODING: "send the body plain or compressed with gzip",
}

_EXTRA_HEADERS = {
    METHOD: ((b"allow", b"POST"),),
    # The rest of the body may never arrive, so the connection is useless.
    TOO_SLOW: ((b"connection", b"close"),),
}


async def _respond(
    send: Send,
    status: int,
    message: Message,
    content_type: str,
    extra: list[tuple[bytes, bytes]] | None = None,
) -> None:
    as_json = content_type == JSON
    body = MessageToJson(message, indent=None).encode() if as_json else message.SerializeToString()
    headers = [
        (b"content-type", (JSON if as_json else PROTOBUF).encode()),
        (b"content-length", str(len(body)).encode()),
        *(extra or []),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
