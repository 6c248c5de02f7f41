"""Relaying: what the engine and the client get."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from agent.sources.proxy.engine_request import ClientRequest
from agent.sources.proxy.exchange import Arrival, Ending, Exchange, GuardedExchange
from agent.sources.proxy.headers import redirect_to_proxy
from agent.sources.proxy.relay_context import BodyMemory
from tests.sources.proxy.wire import (
    CHUNKED,
    GET,
    LAST_CHUNK,
    LIMITS,
    OK,
    Engine,
    Message,
    Recorded,
    Recorder,
    Visit,
    chunk,
    closing_after,
    post,
    proxying,
    read_chunk,
    read_head,
    responding,
    served,
    serving,
)


async def relayed(request: bytes) -> Message:
    async with Engine(responding(OK)) as engine, proxying(engine.proxied) as proxied:
        assert (await proxied.ask(request)).body == b"ok"
    return engine.requests[0]


async def test_a_request_is_relayed_with_the_bytes_of_its_client() -> None:
    body = bytes(range(256)) * 10
    odd = "A: 1\r\nB: caf\xe9 \xc3\xa9\r\nA: 2\r\n"
    head = f"PURGE /v1/a%2Fb//c%C3%A9?x=%20&y=a+b&z HTTP/1.1\r\nHost: proxy\r\n{odd}"
    request = await relayed(f"{head}Content-Length: {len(body)}\r\n\r\n".encode("latin-1") + body)
    assert request.first_line == "PURGE /v1/a%2Fb//c%C3%A9?x=%20&y=a+b&z HTTP/1.1"
    assert request.body == body
    lines = [line for line in request.headers if line[0] in ("a", "b")]
    assert lines == [("a", "1"), ("b", "caf\xe9 \xc3\xa9"), ("a", "2")]
    assert (await relayed(post(b""))).all("content-length") == ["0"]
    assert (await relayed(b"OPTIONS /x HTTP/1.1\r\nHost: h\r\n\r\n")).all("content-length") == []


async def test_hop_by_hop_headers_are_not_relayed() -> None:
    request = await relayed(
        b"POST / HTTP/1.1\r\nHost: proxy\r\nConnection: keep-alive, X-Mine\r\nX-Mine: 1\r\n"
        b"Keep-Alive: 5\r\nTE: trailers\r\nTrailer: x\r\nProxy-Authorization: secret\r\n"
        b"Proxy-Connection: keep-alive\r\nTransfer-Encoding: chunked\r\nX-Kept: 1\r\n\r\n"
        b"2\r\nhi\r\n0\r\nX-Trailer: 1\r\n\r\n"
    )
    names = {name for name, _ in request.headers}
    forwarded = {"x-forwarded-for", "x-forwarded-proto", "x-forwarded-host"}
    assert names == {"host", "x-kept", "content-length"} | forwarded
    assert request.body == b"hi"


async def test_the_engine_gets_its_own_host_and_x_forwarded_headers() -> None:
    async with Engine(responding(OK)) as engine, proxying(engine.proxied) as proxied:
        await proxied.ask(GET)
        before = b"X-Forwarded-For: 10.0.0.1\r\nX-Forwarded-Proto: https\r\n"
        await proxied.ask(GET.replace(b"\r\n\r\n", b"\r\n" + before + b"\r\n"))
    first, second = engine.requests
    assert first.all("host") == [f"127.0.0.1:{engine.port}"]
    assert first.all("x-forwarded-for") == ["127.0.0.1"]
    assert first.all("x-forwarded-proto") == ["http"]
    assert first.all("x-forwarded-host") == ["proxy"]
    assert second.all("x-forwarded-for") == ["10.0.0.1, 127.0.0.1"]
    assert second.all("x-forwarded-proto") == ["https"]


async def test_expect_100_continue_is_answered_by_the_proxy() -> None:
    async with served(responding(OK)) as (engine, _, client):
        head, body = post(b"hello", headers="Expect: 100-continue\r\n").split(b"\r\n\r\n")
        client.writer.write(head + b"\r\n\r\n")
        assert (await read_head(client.reader)).first_line == "HTTP/1.1 100 Continue"
        assert engine.requests == []
        assert (await client.ask(body)).body == b"ok"
    assert engine.requests[0].body == b"hello"
    assert engine.requests[0].all("expect") == []


async def client_response(
    response: bytes, request: bytes = GET, *, bodyless: bool = False
) -> Message:
    """Return a response as the client gets it; the connection must be reusable."""
    async with served(responding(response, OK)) as (_, _, client):
        message = await client.ask(request, bodyless=bodyless)
        assert message.complete
        # HEAD closes the engine's connection, and the script begins again.
        if request.startswith(b"HEAD"):
            await client.ask(request, bodyless=True)
        else:
            assert (await client.ask(GET)).body == b"ok"
    return message


async def test_the_response_has_the_engines_headers_and_no_others() -> None:
    message = await client_response(
        b"HTTP/1.1 418 I'm a teapot\r\nDate: then\r\nServer: engine\r\nSet-Cookie: a=1\r\n"
        b"X-B: caf\xe9\r\nSet-Cookie: b=2\r\nContent-Encoding: gzip\r\n"
        b"Keep-Alive: timeout=5\r\nContent-Length: 3\r\n\r\nabc"
    )
    assert message.status == 418
    assert message.body == b"abc"
    assert message.headers == [
        ("date", "then"),
        ("server", "engine"),
        ("set-cookie", "a=1"),
        ("x-b", "caf\xe9"),
        ("set-cookie", "b=2"),
        ("content-encoding", "gzip"),
        ("content-length", "3"),
    ]


@pytest.mark.parametrize(
    ("method", "response", "lengths"),
    [
        (b"GET", b"HTTP/1.1 204 No Content\r\nX: 1\r\n\r\n", []),
        (b"GET", b"HTTP/1.1 304 Not Modified\r\nX: 1\r\nContent-Length: 500\r\n\r\n", []),
        (b"GET", b"HTTP/1.1 200 OK\r\nX: 1\r\nContent-Length: 0\r\n\r\n", ["0"]),
        (b"HEAD", b"HTTP/1.1 200 OK\r\nX: 1\r\nContent-Length: 500\r\n\r\n", ["500"]),
    ],
)
async def test_a_response_without_a_body_ends_with_its_head(
    method: bytes, response: bytes, lengths: list[str]
) -> None:
    message = await client_response(response, GET.replace(b"GET", method), bodyless=True)
    assert message.all("x") == ["1"]
    assert message.all("content-length") == lengths


async def test_the_path_of_the_engines_url_is_a_prefix() -> None:
    async with Engine(responding(OK)) as engine:
        with_path = type(engine.proxied)("chat-0", f"{engine.proxied.url}/llm/")
        async with proxying(with_path) as proxied:
            await proxied.ask(GET)
    assert engine.requests[0].first_line == "GET /llm/v1/models HTTP/1.1"


@pytest.mark.parametrize(("size", "status"), [(60_000, 200), (70_000, 431), (300_000, 431)])
async def test_a_head_above_the_limit_is_refused(size: int, status: int) -> None:
    async with Engine(responding(OK)) as engine, proxying(engine.proxied) as proxied:
        long = GET.replace(b"proxy", b"proxy\r\nX: " + b"x" * size)
        assert (await proxied.ask(long)).status == status
        passed = [len(request.all("x")[0]) for request in engine.requests]
        assert passed == ([size] if status == 200 else [])


async def test_a_websocket_is_refused_with_a_reason() -> None:
    upgrade = b"proxy\r\nConnection: Upgrade\r\nUpgrade: websocket"
    async with Engine(responding(OK)) as engine, proxying(engine.proxied) as proxied:
        message = await proxied.ask(GET.replace(b"proxy", upgrade))
        assert (message.status, engine.visits) == (501, 0)
    assert b'"type": "upgrade_refused"' in message.body
    assert b"no WebSocket" in message.body


ENGINE, PROXY = b"http://127.0.0.1:8000", b"https://llm.example"


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        (b"http://127.0.0.1:8000/v1/models", b"https://llm.example/v1/models"),
        (b"http://127.0.0.1:8000", b"https://llm.example"),
        (b"http://127.0.0.1:80001/v1", b"http://127.0.0.1:80001/v1"),
        (b"http://elsewhere/v1", b"http://elsewhere/v1"),
        (b"/v1/models", b"/v1/models"),
    ],
)
def test_a_redirect_to_the_engine_becomes_one_to_the_proxy(
    location: bytes, expected: bytes
) -> None:
    others = [(b"server", b"uvicorn"), (b"x-location", location)]
    lines = redirect_to_proxy([*others, (b"location", location)], ENGINE, PROXY)
    assert lines == [*others, (b"location", expected)]


@pytest.mark.parametrize("greedy", [1, 3, 40])
def test_greedy_bodies_leave_room_for_a_small_one(greedy: int) -> None:
    memory, held = BodyMemory(1000), [0] * greedy
    for _ in range(1000):
        for number in range(greedy):
            held[number] += memory.take(held[number], 1)
    # All in turn: each has the same as what is left.
    assert sum(held) <= 1000 * greedy / (greedy + 1)
    assert memory.has(1000 // (greedy + 1) // 2)
    for one in held:
        memory.give_back(one)
    assert memory.has(500)
    assert not memory.has(501)


def test_what_comes_of_a_body_after_the_response_takes_no_memory() -> None:
    request = ClientRequest(b"POST", b"/", (), keeps_alive=True)
    request.add_body(b"before")
    request.drop_body()
    request.add_body(b"after")
    assert request.take_body() == b""


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_without_room_passes_as_it_arrives(declared: bool) -> None:
    recorder = Recorder()
    limits = replace(LIMITS, body_memory_bytes=100_000)
    body = bytes(900_000)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    request = post(body) if declared else head + chunk(body) + LAST_CHUNK
    async with serving(responding(OK), measuring=recorder, limits=limits) as (_, proxied):
        assert (await proxied.ask(request)).body == b"ok"
    (exchange,) = recorder.made
    assert (exchange.arrival.body, exchange.ending) == (None, Ending.COMPLETE)
    assert sum(call[1] for call in exchange.calls if call[0] == "sent") == len(body)


STREAM = CHUNKED + chunk(b"one") + chunk(b"two") + LAST_CHUNK


async def measured(recorder: Recorder, request: bytes) -> tuple[Message, Message]:
    """Return a request as the engine gets it, and its stream as the client gets it."""
    async with serving(responding(STREAM), measuring=recorder) as (engine, proxied):
        message = await proxied.ask(request)
        assert proxied.failures == {}
    return engine.requests[0], message


async def test_the_calls_of_an_exchange_are_in_order() -> None:
    recorder = Recorder()
    await measured(recorder, post(b'{"model": "m"}', "/v1/x?y=1", "X-Mine: 1\r\n"))
    (exchange,) = recorder.made
    arrival = exchange.arrival
    assert (arrival.method, arrival.path) == ("POST", "/v1/x")
    assert arrival.body == b'{"model": "m"}'
    assert (b"x-mine", b"1") in arrival.headers
    routed, answered, *chunks, ended = exchange.calls
    assert (routed, ended) == (("routed", "chat-0"), ("ended", Ending.COMPLETE))
    assert answered[:2] == ("answered", 200)
    assert (b"content-type", b"text/event-stream") in answered[2]
    assert {call[0] for call in chunks} == {"chunk"}
    assert b"".join(call[1] for call in chunks) == b"onetwo"
    assert [arrival.at_s, *exchange.times_s] == sorted([arrival.at_s, *exchange.times_s])


async def test_a_piece_keeps_the_time_of_its_read_when_the_client_is_slow() -> None:
    """Two reads that are relayed together keep their own times."""

    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(CHUNKED + chunk(b"x" * 10_000_000))
        await visit.send(LAST_CHUNK)

    recorder = Recorder()
    async with served(script, measuring=recorder) as (_, _, client):
        client.writer.write(post(b"{}"))
        await read_head(client.reader)
        while await read_chunk(client.reader):
            pass
    times_s = recorder.made[0].times_s
    assert len(set(times_s)) > 3
    assert times_s == sorted(times_s)


# The size is known from the header, or only when the limit is passed.
@pytest.mark.parametrize(
    ("framing", "limit_bytes"), [("Content-Length: 6", 5), ("Transfer-Encoding: chunked", 2)]
)
@pytest.mark.parametrize("measured", ["not", "whole", "until a fault"])
async def test_a_body_that_is_not_measured_is_relayed_while_it_arrives_and_counted(
    framing: str, limit_bytes: int, measured: str
) -> None:
    chunked = "chunked" in framing

    async def script(visit: Visit) -> None:
        head = await read_head(visit.reader)
        assert framing.lower() in [f"{name}: {value}" for name, value in head.headers]
        for half in (b"abc", b"def"):
            take = read_chunk(visit.reader) if chunked else visit.reader.readexactly(3)
            assert await take == half
            taken.set()
        await visit.send(STREAM)

    faulty = measured == "until a fault"
    taken, recorder = asyncio.Event(), Recorder(fails_at="sent" if faulty else None)
    limits = replace(LIMITS, measured_body_bytes=limit_bytes)
    measuring = None if measured == "not" else recorder
    async with served(script, measuring=measuring, limits=limits) as (_, proxied, client):
        head = f"POST /v1/x HTTP/1.1\r\nHost: proxy\r\n{framing}\r\n\r\n".encode()
        client.writer.write(head + (chunk(b"abc") if chunked else b"abc"))
        await taken.wait()
        rest = chunk(b"def") + LAST_CHUNK if chunked else b"def"
        assert (await client.ask(rest)).body == b"onetwo"
        assert proxied.failures == ({"sent": 1} if faulty else {})
    assert len(recorder.made) == (measured != "not")
    for exchange in recorder.made:
        assert exchange.arrival.body is None
        sent = [call[1] for call in exchange.calls if call[0] == "sent"]
        assert sum(sent) == 6 if measured == "whole" else len(sent) == 1


async def test_engine_and_client_get_the_headers_and_bytes_of_measuring() -> None:
    recorder = Recorder(
        body=b"longer than before",
        headers=((b"x-request-id", b"new"), (b"traceparent", b"00-1")),
        response_headers=((b"x-other", b"theirs"), (b"connection", b"x")),
        added_headers=((b"x-request-id", b"mine"), (b"x-other", b"mine")),
        change=lambda data: data.replace(b"two", b""),
        last=b"[end]",
    )
    request, message = await measured(recorder, post(b"old", headers="X-Request-Id: old\r\n"))
    assert request.body == b"longer than before"
    assert request.all("content-length") == ["18"]
    assert request.all("x-request-id") == ["new"]
    assert request.all("traceparent") == ["00-1"]
    assert message.all("x-request-id") == ["mine"]
    assert message.all("x-other") == ["theirs"]
    assert message.all("connection") == []
    assert message.body == b"one[end]"


async def test_the_proxys_own_response_has_the_added_headers() -> None:
    recorder = Recorder(added_headers=((b"x-request-id", b"mine"),))
    async with serving(closing_after(b""), measuring=recorder) as (_, proxied):
        message = await proxied.ask(post(b"{}"))
    assert (message.status, message.all("x-request-id")) == (502, ["mine"])


async def test_held_bytes_are_sent_when_the_engine_dies() -> None:
    recorder = Recorder(change=lambda _: b"", last=b"held")
    async with serving(closing_after(CHUNKED + chunk(b"data")), measuring=recorder) as (_, proxied):
        message = await proxied.ask(post(b"{}"))
    assert (message.body, message.complete) == (b"held", False)
    assert recorder.made[0].ending is Ending.ENGINE_GONE


@pytest.mark.parametrize("call", ["routed", "answered", "chunk", "catch_up", "ended"])
async def test_after_a_fault_in_measuring_the_response_is_unchanged(call: str) -> None:
    recorder = Recorder(fails_at=call, last=b"held")
    async with serving(responding(STREAM), measuring=recorder) as (_, proxied):
        for _ in range(2):
            message = await proxied.ask(post(b"{}"))
            assert (message.status, message.body, message.complete) == (200, b"onetwo", True)
        assert proxied.failures == {call: 2}
    assert all(exchange.names.count("ended") == 1 for exchange in recorder.made)
    assert all(exchange.names.count(call) == 1 for exchange in recorder.made)


def test_pieces_after_a_fault_are_unchanged() -> None:
    def change(data: bytes) -> bytes:
        if data == b"two":
            raise RuntimeError
        return data.upper()

    failures: list[str] = []
    arrival = Arrival(method="POST", path="/", headers=(), body=b"", at=0.0, at_s=0.0)
    guarded = GuardedExchange(Recorded(arrival, change=change), failures.append)
    pieces = (b"one", b"two", b"three")
    assert [guarded.chunk(each, 1.0) for each in pieces] == [b"ONE", b"two", b"three"]
    assert failures == ["chunk"]


class Faulty(Recorder):
    """A measuring that raises in `wants` or `begin`, or begins an invalid exchange."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self._at = at

    def wants(self, method: str, path: str) -> bool:
        if self._at == "wants":
            raise RuntimeError("wants is broken")
        return True

    def begin(self, arrival: Arrival) -> Exchange:
        if self._at == "begin":
            raise RuntimeError("begin is broken")
        exchange = super().begin(arrival)
        exchange.headers = None  # type: ignore[assignment]
        return exchange


@pytest.mark.parametrize(
    ("at", "reason"), [("wants", "wants"), ("begin", "begin"), ("headers", "begin")]
)
async def test_a_request_whose_measurement_cannot_start_is_relayed(at: str, reason: str) -> None:
    async with serving(responding(STREAM), measuring=Faulty(at)) as (_, proxied):
        assert (await proxied.ask(post(b"{}"))).body == b"onetwo"
        assert proxied.failures == {reason: 1}


@pytest.mark.parametrize(
    ("wrong", "status"),
    [
        pytest.param({"change": lambda data: data * 2}, 200, id="longer than its content-length"),
        pytest.param({"body": "text"}, 500, id="a body that is no bytes"),
    ],
)
async def test_a_fault_of_the_proxy_cuts_its_response_or_becomes_a_500(
    wrong: dict[str, Any], status: int
) -> None:
    async with serving(responding(OK), measuring=Recorder(**wrong)) as (_, proxied):
        message = await proxied.ask(post(b"{}"))
        assert (message.status, message.complete) == (status, status == 500)
        assert (b'"type": "proxy_error"' in message.body) == (status == 500)
        assert proxied.failures == {"relay": 1}
        assert proxied.open_requests == {"chat-0": 0}
