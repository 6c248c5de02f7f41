"""`python -m benchmarks.proxy_engine PORT`: an engine that uses almost no processor time.

It responds to a chat completion with a prepared stream of 64 events, in bursts of eight. Words in
the prompt change that. "prefilled": the first event comes 1 ms after the head, as vLLM sends the
head when it accepts a request. "apart": so it does, and the others come 2 ms later. "paced": one
event every 2 ms. "decoded": one every 20 ms, 192 in all. "held": two events, then nothing. "brief":
one event and the end. "loose": a space after each colon and comma of the events' JSON, as most JSON
writers put it.
"""

import asyncio
import json
import sys
import time
from typing import Any

import uvloop

EVENTS = 64
_BURST = 8
_PACE_S = 0.002
DECODE_S = 0.02
DECODED_EVENTS = 192
_PREFILL_S = 0.001

# The tokens of a stream differ; these have 5 bytes on average.
_WORDS = (" a", " is", " the", " word", " which", " people", " through")


def _fields(word: str) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": word}, "logprobs": None, "finish_reason": None}
    return {
        "id": "chatcmpl-0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": 1760000000,
        "model": "m",
        "choices": [choice],
    }


_HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Mon, 09 Nov 2026 10:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _events(separators: tuple[str, str]) -> list[bytes]:
    """The events of the longest stream, each a chunk."""
    words = [_WORDS[number % len(_WORDS)] for number in range(DECODED_EVENTS)]
    texts = [json.dumps(_fields(word), separators=separators) for word in words]
    return [_chunk(b"data: %b\n\n" % text.encode()) for text in texts]


_COMPACT, _LOOSE = _events((",", ":")), _events((", ", ": "))
_LAST = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def _whole(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


MODELS = ("m", *(f"m-{number}" for number in range(1, 20)))
_MODELS = _whole(
    json.dumps(
        {
            "object": "list",
            "data": [{"id": name, "object": "model", "max_model_len": 2048} for name in MODELS],
        }
    ).encode()
)


_EXPOSITION = _whole(
    b"# TYPE vllm:num_requests_running gauge\n"
    b'vllm:num_requests_running{model_name="m"} 1.0\n'
    b"# TYPE vllm:num_requests_waiting gauge\n"
    b'vllm:num_requests_waiting{model_name="m"} 0.0\n'
)


def _page(head: bytes) -> bytes:
    if b"/models" in head:
        return _MODELS
    return _EXPOSITION if b"/metrics" in head else _whole(b"{}")


class _EngineConnection(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._received = b""
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._events = _COMPACT

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
            self._write(_page(head))
            return
        self._events = _LOOSE if b"loose" in body else _COMPACT
        self._write(_HEAD)
        if b"prefilled" in body or b"apart" in body:
            # A timer of the event loop is not exact enough; only one client is connected.
            time.sleep(_PREFILL_S)
        self._write(self._events[0])
        if b"held" in body:
            self._write(self._events[1])
        elif b"brief" in body:
            self._write(_LAST)
        elif b"apart" in body:
            self._loop.call_later(_PACE_S, self._burst, 1)
        elif b"paced" in body:
            self._pace(self._loop.time(), _PACE_S, EVENTS - 1)
        elif b"decoded" in body:
            self._pace(self._loop.time(), DECODE_S, DECODED_EVENTS - 1)
        else:
            self._burst(1)

    def _burst(self, begin: int) -> None:
        end = min(begin + _BURST, EVENTS)
        self._write(b"".join(self._events[begin:end]))
        if end < EVENTS:
            self._loop.call_soon(self._burst, end)
        else:
            self._write(_LAST)

    def _pace(self, last_s: float, pace_s: float, left: int) -> None:
        """Write the next event `pace_s` after the last one, however late that was."""
        self._loop.call_at(last_s + pace_s, self._paced, last_s + pace_s, pace_s, left)

    def _paced(self, now_s: float, pace_s: float, left: int) -> None:
        self._write(self._events[left] if left else _LAST)
        if left:
            self._pace(now_s, pace_s, left - 1)

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
