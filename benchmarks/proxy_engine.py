"""`python -m benchmarks.proxy_engine PORT`: an engine that uses almost no processor time.

It responds to a chat completion with a prepared stream of 64 events, in bursts of eight. A word in
the prompt changes that. "prefilled": the first event comes 1 ms after the head, as vLLM sends the
head when it accepts a request. "paced": one event every 2 ms. "held": two events, then nothing.
"""

import asyncio
import json
import sys
import time

import uvloop

EVENTS = 64
_BURST = 8
_PACE_S = 0.002
_PREFILL_S = 0.001

_EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk",'
    b'"created":1760000000,"model":"m","choices":[{"index":0,"delta":{"content":" word"},'
    b'"logprobs":null,"finish_reason":null}]}\n\n'
)
_HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Mon, 09 Nov 2026 10:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_PIECE = _chunk(_EVENT)
_LAST = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def _whole(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


_MODELS = _whole(
    json.dumps(
        {"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 2048}]}
    ).encode()
)


class _EngineConnection(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._received = b""
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, _: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, blank, body = self._received.partition(b"\r\n\r\n")
        if blank and len(body) >= _length(head.lower()):
            self._received = b""
            self._respond(head, body)

    def _respond(self, head: bytes, body: bytes) -> None:
        if not head.startswith(b"POST"):
            self._write(_MODELS if b"/models" in head else _whole(b"{}"))
            return
        self._write(_HEAD)
        if b"prefilled" in body:
            # A timer of the event loop is not exact enough; only one client is connected.
            time.sleep(_PREFILL_S)
        self._write(_PIECE)
        if b"held" in body:
            self._write(_PIECE)
        elif b"paced" in body:
            self._loop.call_later(_PACE_S, self._pace, EVENTS - 1)
        else:
            self._burst(EVENTS - 1)

    def _burst(self, left: int) -> None:
        now = min(left, _BURST)
        self._write(_PIECE * now)
        if left > now:
            self._loop.call_soon(self._burst, left - now)
        else:
            self._write(_LAST)

    def _pace(self, left: int) -> None:
        self._write(_PIECE if left else _LAST)
        if left:
            self._loop.call_later(_PACE_S, self._pace, left - 1)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


def _length(head: bytes) -> int:
    _, found, rest = head.partition(b"content-length:")
    return int(rest.split(b"\r\n")[0]) if found else 0


async def _serve(port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(_EngineConnection, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
