"""Plays of the proxy's data plane: what engine and client get, and the records.

`python -m tests.sources.proxy.plays` writes the expected outcomes, of the proxy as it is now.
"""

import asyncio
import gzip
import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop

from agent.records.request import RequestRecord
from agent.sources.proxy.measuring.measured_exchange import RequestMeasuring
from agent.sources.proxy.request_spans import ProxyTracing
from tests.sources.proxy.measuring.playing import REQUESTS, STREAMS, VERSION, events, route
from tests.sources.proxy.wire import (
    CHUNKED,
    LAST_CHUNK,
    WITHIN_S,
    Engine,
    Message,
    Visit,
    chunk,
    post,
    proxying,
    until_gone,
)

EXPECTED = Path(__file__).with_name("plays.json.gz")

# The recorded streams.
NAMES = sorted(path.name[len(VERSION) : -4] for path in STREAMS.glob(f"{VERSION}*.sse"))
HEADS = {
    "plain": "",
    "id": "X-Request-Id: abc\r\nAuthorization: Bearer k\r\nAccept-Encoding: gzip\r\n",
    "trace": (
        "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n"
        "tracestate: a=b\r\nX-Forwarded-For: 1.2.3.4\r\nX-Forwarded-Proto: https\r\n"
        "X-Slo-Ttft-Ms: 5\r\n"
    ),
    "hop": "Connection: keep-alive, X-A\r\nX-A: 1\r\n",
    "repeated": "Accept: */*\r\nAccept: x\r\nCookie: a\r\nCookie: b\r\n",
}
CUTS = ("events", "one", "bytes37")

_ID = re.compile(r"[0-9a-f]{16,32}")
_IDS = ("traceparent", "x-request-id")
_TIMES = ("started_at", "ended_at", "received_at", "ttft_s", "tpot_s", "e2e_s", "max_gap_s")
_PARTS_S = ("queue_s", "prefill_s", "decode_s", "first_byte_s", "first_visible_s", "reasoning_s")


def pieces(stream: bytes, cut: str) -> Sequence[bytes]:
    """The pieces of a stream in which the engine writes it."""
    if cut == "events":
        return events(stream)
    size = len(stream) if cut == "one" else 37
    return [stream[begin : begin + size] for begin in range(0, len(stream), size)]


def request(name: str, head: str) -> bytes:
    """The request of a recorded stream; those that are not recorded ask for any stream."""
    fields = REQUESTS.get(name, {"model": "m", "stream": True, "messages": []})
    return post(json.dumps(fields).encode(), route(name), HEADS[head])


async def play_stream(name: str, head: str, cut: str) -> Any:
    """Play a recorded stream twice on one connection; times and ids are masked."""
    records: list[RequestRecord] = []
    failures: list[str] = []
    parts = pieces((STREAMS / f"{VERSION}{name}.sse").read_bytes(), cut)

    async def script(visit: Visit) -> None:
        while True:
            await visit.request()
            await visit.send(CHUNKED)
            for part in parts:
                visit.writer.write(chunk(part))
                await asyncio.sleep(0)
            await visit.send(LAST_CHUNK)

    tracing = ProxyTracing(None, service="plays", keep=lambda _: False)
    measuring = RequestMeasuring("agent", tracing, records.append, failures.append)
    async with (
        Engine(script) as engine,
        proxying(engine.proxied, measuring=measuring, monotonic=_slowly) as proxied,
    ):
        async with proxied.client() as client:
            got = [await client.ask(request(name, head)) for _ in range(2)]
        failures += proxied.failures
    return {
        "responses": [_masked_message(each) for each in got],
        "requests": [_masked_message(each) for each in engine.requests],
        "records": [_masked_record(each) for each in records],
        "failures": failures,
    }


def _slowly() -> float:
    """A clock by which every play is shorter than the engine's own times in the recordings."""
    return time.monotonic() / 1000


def _masked_message(message: Message) -> Any:
    # The order of lines with different names has no meaning.
    masked = [_masked_line(name.lower(), value) for name, value in message.headers]
    lines = sorted(masked, key=lambda line: line[0])
    return [message.first_line, lines, message.body.decode("latin-1"), message.complete]


def _masked_line(name: str, value: str) -> tuple[str, str]:
    if name in ("host", "x-forwarded-host"):
        return name, re.sub(r"127\.0\.0\.1:\d+", "ENGINE", value)
    return name, _ID.sub("ID", value) if name in _IDS else value


def _masked_record(record: RequestRecord) -> Any:
    fields = record._asdict()
    fields["proxied"] = proxied = None if record.proxied is None else record.proxied._asdict()
    for values in filter(None, (fields, proxied)):
        for name in (*_TIMES, *_PARTS_S):
            if name in values:
                values[name] = values[name] is not None
    for name in ("trace_id", "span_id", "request_id"):
        fields[name] = _ID.sub("ID", str(fields[name]))
    if proxied is not None:
        proxied["gaps"] = sum((proxied["gaps"] or {}).values())
    fields["engine_view"] = fields.get("engine_view") is not None
    return fields


# Requests on the wire


CLOSE = b"GET /close HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
GET = b"GET /ok HTTP/1.1\r\nHost: h\r\n"
POST = b"POST /ok HTTP/1.1\r\nHost: h\r\n"
LENGTH_2 = POST + b"Content-Length: 2\r\n"

# What a client sends on one connection. The proxy ends each by itself.
WIRE: Mapping[str, bytes] = {
    "pipelined": GET + b"\r\n" + LENGTH_2 + b"\r\nab" + GET + b"\r\n" + CLOSE,
    "empty lines first": b"\r\n\r\n" + GET + b"\r\n\r\n" + CLOSE,
    "chunked": POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n" + CLOSE,
    "chunk extension": POST + b"Transfer-Encoding: chunked\r\n\r\n2;a=b\r\nab\r\n0\r\n\r\n" + CLOSE,
    "trailers": POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\nX-A: 1\r\n\r\n" + CLOSE,
    "chunked in capitals": POST + b"Transfer-Encoding: CHUNKED\r\n\r\n0\r\n\r\n" + CLOSE,
    "two lengths": LENGTH_2 + b"Content-Length: 3\r\n\r\nabc" + CLOSE,
    "a length twice": LENGTH_2 + b"Content-Length: 2\r\n\r\nab" + CLOSE,
    "length list": POST + b"Content-Length: 2, 2\r\n\r\nab" + CLOSE,
    "length and chunked": LENGTH_2 + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + CLOSE,
    "chunked and length": POST
    + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n"
    + CLOSE,
    "coding before chunked": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n" + CLOSE,
    "coding after chunked": POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n" + CLOSE,
    "identity": POST + b"Transfer-Encoding: identity\r\n\r\n" + CLOSE,
    "chunked twice": POST
    + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    + CLOSE,
    "chunked with a tab": POST + b"Transfer-Encoding:\tchunked\r\n\r\n0\r\n\r\n" + CLOSE,
    "chunked with a form feed": POST + b"Transfer-Encoding:\x0cchunked\r\n\r\n0\r\n\r\n" + CLOSE,
    "space before a colon": POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + CLOSE,
    "length of a sign": POST + b"Content-Length: +2\r\n\r\nab" + CLOSE,
    "negative length": POST + b"Content-Length: -2\r\n\r\nab" + CLOSE,
    "hexadecimal length": POST + b"Content-Length: 0x2\r\n\r\nab" + CLOSE,
    "endless length": POST + b"Content-Length: 99999999999999999999\r\n\r\nab" + CLOSE,
    "endless chunk": POST + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n" + CLOSE,
    "negative chunk": POST + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n" + CLOSE,
    "chunk with a space": POST + b"Transfer-Encoding: chunked\r\n\r\n2 \r\nab\r\n0\r\n\r\n" + CLOSE,
    "chunk without its end": POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\nabX0\r\n\r\n" + CLOSE,
    "chunks with bare LF": POST + b"Transfer-Encoding: chunked\r\n\r\n2\nab\n0\n\n" + CLOSE,
    "bare LF": b"GET /ok HTTP/1.1\nHost: h\n\n" + CLOSE,
    "bare CR": b"GET /ok HTTP/1.1\rHost: h\r\r" + CLOSE,
    "folded line": GET + b"X-A: 1\r\n 2\r\n\r\n" + CLOSE,
    "NUL": GET + b"X-A: a\x00b\r\n\r\n" + CLOSE,
    "control character": GET + b"X-A: a\x01b\r\n\r\n" + CLOSE,
    "value of any bytes": GET + b"X-A: caf\xe9 \xff\r\n\r\n" + CLOSE,
    "empty value": GET + b"X-A:\r\nX-B: \t \r\n\r\n" + CLOSE,
    "name with a space": GET + b"X A: 1\r\n\r\n" + CLOSE,
    "empty name": GET + b": 1\r\n\r\n" + CLOSE,
    "line without a colon": GET + b"abc\r\n\r\n" + CLOSE,
    "no host": b"GET /ok HTTP/1.1\r\n\r\n" + CLOSE,
    "two hosts": GET + b"Host: other\r\n\r\n" + CLOSE,
    "absolute address": b"GET http://other/ok?x=1 HTTP/1.1\r\nHost: h\r\n\r\n" + CLOSE,
    "address of a host": b"GET http://other HTTP/1.1\r\nHost: h\r\n\r\n" + CLOSE,
    "address of two slashes": b"GET //other/ok HTTP/1.1\r\nHost: h\r\n\r\n" + CLOSE,
    "fragment": b"GET /ok?a#b HTTP/1.1\r\nHost: h\r\n\r\n" + CLOSE,
    "two question marks": b"GET /ok??a?b HTTP/1.1\r\nHost: h\r\n\r\n" + CLOSE,
    "no query": b"GET /ok? HTTP/1.1\r\nHost: h\r\n\r\n" + CLOSE,
    "encoded address": b"GET /%6fk/%2F%zz?%00 HTTP/1.1\r\nHost: h\r\n\r\n" + CLOSE,
    "address of any bytes": b"GET /caf\xe9 HTTP/1.1\r\nHost: h\r\n\r\n" + CLOSE,
    "address with a tab": b"GET /o\tk HTTP/1.1\r\nHost: h\r\n\r\n" + CLOSE,
    "address with a space": b"GET /o k HTTP/1.1\r\nHost: h\r\n\r\n" + CLOSE,
    "address without a slash": b"GET ok HTTP/1.1\r\nHost: h\r\n\r\n" + CLOSE,
    "asterisk": b"OPTIONS * HTTP/1.1\r\nHost: h\r\n\r\n" + CLOSE,
    "CONNECT": b"CONNECT other:443 HTTP/1.1\r\nHost: h\r\n\r\n" + CLOSE,
    "HEAD": b"HEAD /ok HTTP/1.1\r\nHost: h\r\n\r\n" + CLOSE,
    "unknown method": b"BREW /ok HTTP/1.1\r\nHost: h\r\n\r\n" + CLOSE,
    "lower-case method": b"get /ok HTTP/1.1\r\nHost: h\r\n\r\n" + CLOSE,
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/1.2": b"GET /ok HTTP/1.2\r\nHost: h\r\n\r\n" + CLOSE,
    "HTTP/0.9": b"GET /ok\r\n\r\n",
    "HTTP/1.0": b"GET /ok HTTP/1.0\r\n\r\n",
    "HTTP/1.0 that goes on": b"GET /ok HTTP/1.0\r\nConnection: keep-alive\r\n\r\n" + CLOSE,
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "after a close": CLOSE + GET + b"\r\n",
    "offer of h2c": LENGTH_2
    + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n\r\nab"
    + CLOSE,
    "offer without Connection": LENGTH_2 + b"Upgrade: h2c\r\n\r\nab" + CLOSE,
    "WebSocket": GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n" + CLOSE,
    "WebSocket with a body": LENGTH_2
    + b"Connection: Upgrade\r\nUpgrade: WebSocket\r\n\r\nab"
    + CLOSE,
    "100-continue": LENGTH_2 + b"Expect: 100-continue\r\n\r\nab" + CLOSE,
    "100-continue without a body": GET + b"Expect: 100-continue\r\n\r\n" + CLOSE,
    "another expectation": LENGTH_2 + b"Expect: x\r\n\r\nab" + CLOSE,
    "empty body": POST + b"Content-Length: 0\r\n\r\n" + CLOSE,
    "no body": POST + b"\r\n" + CLOSE,
    "body of a GET": GET + b"Content-Length: 2\r\n\r\nab" + CLOSE,
    "no response body": b"GET /204 HTTP/1.1\r\nHost: h\r\n\r\n" + CLOSE,
    "not modified": b"GET /304 HTTP/1.1\r\nHost: h\r\n\r\n" + CLOSE,
    "redirect": b"GET /301 HTTP/1.1\r\nHost: h\r\n\r\n" + CLOSE,
    "interim responses": b"GET /103 HTTP/1.1\r\nHost: h\r\n\r\n" + CLOSE,
    "stream": b"GET /stream HTTP/1.1\r\nHost: h\r\n\r\n" + CLOSE,
    "cut stream": b"GET /cut HTTP/1.1\r\nHost: h\r\n\r\n",
    "until closed": b"GET /until-closed HTTP/1.1\r\nHost: h\r\n\r\n" + CLOSE,
    "nothing": b"GET /nothing HTTP/1.1\r\nHost: h\r\n\r\n" + CLOSE,
    "garbage": b"GARBAGE\r\n\r\n",
    "garbage after a body": LENGTH_2 + b"\r\nabGARBAGE\r\n\r\n",
}
# Whether the engine gets what came before the error depends on when the rest is read.
RACES = ("chunk without its end", "garbage after a body")
RESPONSES: Mapping[str, bytes] = {
    "/204": b"HTTP/1.1 204 No Content\r\nX: 1\r\n\r\n",
    "/304": b"HTTP/1.1 304 Not Modified\r\nX: 1\r\nContent-Length: 500\r\n\r\n",
    "/103": b"HTTP/1.1 103 E\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
    "/stream": CHUNKED + chunk(b"one") + chunk(b"two") + b"0\r\nX-Sum: 1\r\n\r\n",
    "/cut": CHUNKED + chunk(b"one") + b"5\r\ntw",
    "/until-closed": b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nok",
    "/nothing": b"",
}
_ENDS = ("/cut", "/until-closed", "/nothing")
_OK = b"HTTP/1.1 200 OK\r\nServer: engine\r\nKeep-Alive: 5\r\nContent-Length: 2\r\n\r\nok"


async def play_wire(name: str, *, by_bytes: bool) -> Any:
    """Return what the client got until the proxy closed, and the requests of the engine."""

    async def script(visit: Visit) -> None:
        while True:
            asked = await visit.request()
            method, path, *_ = asked.first_line.split()
            response = RESPONSES.get(path, _OK)
            if path == "/301":
                location = f"http://127.0.0.1:{engine.port}/x".encode()
                response = b"HTTP/1.1 301 M\r\nLocation: %b\r\nContent-Length: 0\r\n\r\n" % location
            await visit.send(response.removesuffix(b"ok") if method == "HEAD" else response)
            if path in _ENDS:
                return

    async with Engine(script) as engine, proxying(engine.proxied) as proxied:
        async with proxied.client() as client:
            sent = WIRE[name]
            for part in [sent[at : at + 1] for at in range(len(sent))] if by_bytes else [sent]:
                if client.writer.transport.is_closing():
                    break
                client.writer.write(part)
                await asyncio.sleep(0)
            received = await asyncio.wait_for(until_gone(client.reader), WITHIN_S)
        failures = dict(proxied.failures)
    requests = [] if name in RACES else engine.requests
    return {
        "received": received.decode("latin-1").replace(f":{engine.port}", ":ENGINE"),
        "requests": [_masked_message(each) for each in requests],
        "failures": failures,
    }


# The expected outcomes


def read_expected() -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """The outcomes by digest, and the digest of each play by its name."""
    outcomes, plays = json.loads(gzip.decompress(EXPECTED.read_bytes()))
    return outcomes, plays


def as_json(outcome: Any) -> Any:
    """The outcome as it comes back from the file."""
    return json.loads(json.dumps(outcome))


async def _write() -> None:
    outcomes, plays = {}, {}

    def keep(name: str, outcome: Any) -> None:
        text = json.dumps(outcome, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        outcomes[digest], plays[name] = json.loads(text), digest

    for name in NAMES:
        for head in HEADS:
            for cut in CUTS:
                keep(f"{name} {head} {cut}", await play_stream(name, head, cut))
    for name in WIRE:
        for by_bytes in (False, True):
            keep(f"wire {name} {by_bytes}", await play_wire(name, by_bytes=by_bytes))
    text = json.dumps([outcomes, plays], sort_keys=True, indent=0)
    EXPECTED.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    uvloop.run(_write())
