"""OTLP over HTTP: a plain ASGI application, for the sake of the many small exports."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message
from google.rpc.status_pb2 import Status

from agent.errors import PayloadInvalid, PayloadTooLarge, StoreUnavailable
from agent.sources.otlp import answers
from agent.sources.otlp.answers import REFUSALS, Refusal, response
from agent.sources.otlp.payload import CONTENT_TYPES, JSON, MAX_BODY_BYTES, PROTOBUF
from agent.sources.otlp.receiver import RETRY_AFTER_S, Body, Receiver

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

TRACES_PATH = "/v1/traces"


class ClientGone(Exception):
    """The sender left before its body was complete."""


class OtlpHttp:
    """Answers `POST /v1/traces`; a refusal carries a google.rpc.Status in the sender's format."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI call."""
        if scope["type"] != "http":
            return
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        content_type = headers.get(b"content-type", "").split(";")[0].strip().lower()
        refusal = _refusal(scope, content_type, headers.get(b"content-encoding", "identity"))
        if refusal is not None:
            await self._refuse(send, refusal, _sentence(refusal), content_type)
            return
        try:
            await self._export(scope, receive, send, content_type)
        except ClientGone:
            self._receiver.refused("client_gone")

    async def _export(self, scope: Scope, receive: Receive, send: Send, content_type: str) -> None:
        headers = dict(scope["headers"])
        gzipped = headers.get(b"content-encoding", b"identity").strip().lower() == b"gzip"
        try:
            with self._receiver.room() as hold:
                content = await self._read_body(receive, hold)
                answer = await self._receiver.take(Body(content, content_type, gzipped))
        except (PayloadInvalid, PayloadTooLarge, StoreUnavailable) as error:
            await self._refuse(send, REFUSALS[type(error)], str(error), content_type)
        else:
            await _respond(send, 200, response(answer), content_type)

    async def _read_body(self, receive: Receive, hold: Callable[[int], None]) -> bytes:
        chunks: list[bytes] = []
        size_bytes = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk = message.get("body", b"")
            size_bytes += len(chunk)
            if size_bytes > MAX_BODY_BYTES:
                raise PayloadTooLarge(
                    f"the body is over {MAX_BODY_BYTES} bytes; send smaller batches"
                )
            hold(len(chunk))
            chunks.append(chunk)
            if not message.get("more_body", False):
                return b"".join(chunks)

    async def _refuse(self, send: Send, refusal: Refusal, message: str, content_type: str) -> None:
        self._receiver.refused(refusal.reason)
        extra = [(b"retry-after", str(RETRY_AFTER_S).encode())] if refusal.retryable else []
        extra += [(b"allow", b"POST")] if refusal is answers.METHOD else []
        status = Status(code=refusal.grpc_code, message=message)
        await _respond(send, refusal.http_status, status, content_type, extra)


def _refusal(scope: Scope, content_type: str, encoding: str) -> Refusal | None:
    if scope["path"] != TRACES_PATH:
        return answers.NO_SUCH_PATH
    if scope["method"] != "POST":
        return answers.METHOD
    if content_type not in CONTENT_TYPES:
        return answers.CONTENT_TYPE
    if encoding.strip().lower() not in ("identity", "gzip"):
        return answers.CONTENT_ENCODING
    return None


def _sentence(refusal: Refusal) -> str:
    return {
        answers.NO_SUCH_PATH: f"only traces are received here, at {TRACES_PATH}",
        answers.METHOD: "send exports with POST",
        answers.CONTENT_TYPE: f"send {PROTOBUF} or {JSON}",
        answers.CONTENT_ENCODING: "send the body plain or compressed with gzip",
    }[refusal]


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
