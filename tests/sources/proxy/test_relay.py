"""Relaying: what the engine and the client get."""

from dataclasses import replace

import pytest

from agent.sources.proxy.exchange import Ending
from agent.sources.proxy.headers import redirect_to_proxy
from agent.sources.proxy.relay_context import BodyMemory
from tests.sources.proxy.wire import (
    GET,
    LAST_CHUNK,
    LIMITS,
    OK,
    Engine,
    Message,
    Recorder,
    chunk,
    in_loop,
    post,
    proxying,
    read_head,
    responding,
    served,
    serving,
)


async def relayed(request: bytes) -> Message:
    """Return the request as the engine gets it."""
    async with Engine(responding(OK)) as engine, proxying(engine.proxied) as proxied:
        assert (await proxied.ask(request)).body == b"ok"
    return engine.requests[0]


# Requests


@in_loop
async def test_the_target_and_the_body_are_relayed_unchanged() -> None:
    body = bytes(range(256)) * 10
    request = await relayed(post(body, "/v1/a%2Fb//c%C3%A9?x=%20&y=a+b&z"))
    assert request.first_line == "POST /v1/a%2Fb//c%C3%A9?x=%20&y=a+b&z HTTP/1.1"
    assert request.body == body
    assert (await relayed(post(b""))).all("content-length") == ["0"]


@pytest.mark.parametrize("method", ["OPTIONS", "PURGE"])
@in_loop
async def test_other_methods_are_relayed(method: str) -> None:
    request = await relayed(f"{method} /x HTTP/1.1\r\nHost: proxy\r\n\r\n".encode())
    assert request.first_line == f"{method} /x HTTP/1.1"
    assert request.all("content-length") == []


@in_loop
async def test_header_lines_keep_order_number_and_bytes() -> None:
    odd = b"GET / HTTP/1.1\r\nHost: proxy\r\nA: 1\r\nB: caf\xe9 \xc3\xa9\r\nA: 2\r\n\r\n"
    request = await relayed(odd)
    lines = [line for line in request.headers if line[0] in ("a", "b")]
    assert lines == [("a", "1"), ("b", "caf\xe9 \xc3\xa9"), ("a", "2")]


@in_loop
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


@in_loop
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


@in_loop
async def test_expect_100_continue_is_answered_by_the_proxy() -> None:
    async with served(responding(OK)) as (engine, _, client):
        head, body = post(b"hello", headers="Expect: 100-continue\r\n").split(b"\r\n\r\n")
        client.writer.write(head + b"\r\n\r\n")
        assert (await read_head(client.reader)).first_line == "HTTP/1.1 100 Continue"
        assert engine.requests == []
        assert (await client.ask(body)).body == b"ok"
    assert engine.requests[0].body == b"hello"
    assert engine.requests[0].all("expect") == []


# Responses


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


@in_loop
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
@in_loop
async def test_a_response_without_a_body_ends_with_its_head(
    method: bytes, response: bytes, lengths: list[str]
) -> None:
    message = await client_response(response, GET.replace(b"GET", method), bodyless=True)
    assert message.all("x") == ["1"]
    assert message.all("content-length") == lengths


@in_loop
async def test_the_path_of_the_engines_url_is_a_prefix() -> None:
    async with Engine(responding(OK)) as engine:
        with_path = type(engine.proxied)("chat-0", f"{engine.proxied.url}/llm/")
        async with proxying(with_path) as proxied:
            await proxied.ask(GET)
    assert engine.requests[0].first_line == "GET /llm/v1/models HTTP/1.1"


# Refused requests


@pytest.mark.parametrize("size", [70_000, 300_000])
@in_loop
async def test_a_head_above_the_limit_is_refused(size: int) -> None:
    async with Engine(responding(OK)) as engine, proxying(engine.proxied) as proxied:
        message = await proxied.ask(GET.replace(b"proxy", b"proxy\r\nX: " + b"x" * size))
        assert message.status == 431
        assert engine.visits == 0


@in_loop
async def test_a_head_below_the_limit_passes() -> None:
    async with Engine(responding(OK)) as engine, proxying(engine.proxied) as proxied:
        long = b"x" * 60_000
        assert (await proxied.ask(GET.replace(b"proxy", b"proxy\r\nX: " + long))).status == 200
    assert engine.requests[0].all("x") == [long.decode()]


@in_loop
async def test_a_websocket_is_refused_with_a_reason() -> None:
    async with Engine(responding(OK)) as engine, proxying(engine.proxied) as proxied:
        message = await proxied.ask(
            GET.replace(b"proxy", b"proxy\r\nConnection: Upgrade\r\nUpgrade: websocket")
        )
        assert engine.visits == 0
    assert message.status == 501
    assert b'"type": "upgrade_refused"' in message.body
    assert b"no WebSocket" in message.body


# Redirects of an engine


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


@pytest.mark.parametrize("declared", [True, False])
@in_loop
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
