"""What goes through the proxy goes through untouched."""

import gzip

import pytest

from tests.sources.proxy.wire import (
    CHUNKED,
    GET,
    LAST_CHUNK,
    OK,
    Engine,
    Message,
    Visit,
    answering,
    chunk,
    in_loop,
    post,
    proxying,
    read_chunk,
    read_head,
    read_message,
)


class Listener:
    """A script that keeps the requests and answers each of them."""

    def __init__(self, answer: bytes = OK) -> None:
        self.requests: list[Message] = []
        self._answer = answer

    async def __call__(self, visit: Visit) -> None:
        while True:
            self.requests.append(await visit.request())
            await visit.send(self._answer)


async def heard(request: bytes) -> Message:
    """The request as its engine gets it."""
    listener = Listener()
    async with Engine(listener) as engine, proxying(engine.proxied) as proxied:
        assert (await proxied.ask(request)).body == b"ok"
    return listener.requests[0]


# Requests


@in_loop
async def test_the_target_and_the_body_reach_the_engine_as_they_are() -> None:
    body = bytes(range(256)) * 10
    request = await heard(post(body, "/v1/a%2Fb//c%C3%A9?x=%20&y=a+b&z"))
    assert request.first_line == "POST /v1/a%2Fb//c%C3%A9?x=%20&y=a+b&z HTTP/1.1"
    assert request.body == body


@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE", "OPTIONS", "PURGE"])
@in_loop
async def test_every_method_passes(method: str) -> None:
    request = await heard(f"{method} /x HTTP/1.1\r\nHost: proxy\r\n\r\n".encode())
    assert request.first_line == f"{method} /x HTTP/1.1"
    assert request.all("content-length") == []


@in_loop
async def test_an_empty_body_that_is_named_stays_named() -> None:
    assert (await heard(post(b""))).all("content-length") == ["0"]


@in_loop
async def test_header_lines_keep_their_order_their_number_and_their_bytes() -> None:
    odd = b"GET / HTTP/1.1\r\nHost: proxy\r\nA: 1\r\nB: caf\xe9 \xc3\xa9\r\nA: 2\r\n\r\n"
    request = await heard(odd)
    lines = [line for line in request.headers if line[0] in ("a", "b")]
    assert lines == [("a", "1"), ("b", "caf\xe9 \xc3\xa9"), ("a", "2")]


@in_loop
async def test_what_is_for_the_next_hop_only_stays_with_the_proxy() -> None:
    request = await heard(
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
async def test_the_engine_is_named_as_the_host_and_told_who_asked() -> None:
    listener = Listener()
    async with Engine(listener) as engine, proxying(engine.proxied) as proxied:
        await proxied.ask(GET)
        before = b"X-Forwarded-For: 10.0.0.1\r\nX-Forwarded-Proto: https\r\n"
        await proxied.ask(GET.replace(b"\r\n\r\n", b"\r\n" + before + b"\r\n"))
    first, second = listener.requests
    assert first.all("host") == [f"127.0.0.1:{engine.port}"]
    assert first.all("x-forwarded-for") == ["127.0.0.1"]
    assert first.all("x-forwarded-proto") == ["http"]
    assert first.all("x-forwarded-host") == ["proxy"]
    assert second.all("x-forwarded-for") == ["10.0.0.1, 127.0.0.1"]
    assert second.all("x-forwarded-proto") == ["https"]


@pytest.mark.parametrize("framing", ["Content-Length: 6", "Transfer-Encoding: chunked"])
@in_loop
async def test_a_body_is_relayed_while_it_comes(framing: str) -> None:
    """The client sends the second half only when the engine has answered the first."""
    chunked = "chunked" in framing

    async def script(visit: Visit) -> None:
        head = await read_head(visit.reader)
        assert f"{framing}".lower() in [f"{name}: {value}" for name, value in head.headers]
        take = read_chunk(visit.reader) if chunked else visit.reader.readexactly(3)
        assert await take == b"one"
        await visit.send(CHUNKED + chunk(b"got one"))
        take = read_chunk(visit.reader) if chunked else visit.reader.readexactly(3)
        assert await take == b"two"
        if chunked:
            assert await read_chunk(visit.reader) == b""
        await visit.send(chunk(b"got two") + LAST_CHUNK)
        await visit.request()

    def framed(data: bytes) -> bytes:
        return chunk(data) if chunked else data

    async with (
        Engine(script) as engine,
        proxying(engine.proxied) as proxied,
        proxied.client() as client,
    ):
        head = f"POST /files HTTP/1.1\r\nHost: proxy\r\n{framing}\r\n\r\n".encode()
        client.writer.write(head + framed(b"one"))
        assert (await read_head(client.reader)).status == 200
        assert await read_chunk(client.reader) == b"got one"
        client.writer.write(framed(b"two") + (LAST_CHUNK if chunked else b""))
        assert await read_chunk(client.reader) == b"got two"
        assert await read_chunk(client.reader) == b""


@in_loop
async def test_a_client_that_waits_for_leave_to_send_gets_it_and_the_engine_is_not_asked() -> None:
    listener = Listener()
    async with (
        Engine(listener) as engine,
        proxying(engine.proxied) as proxied,
        proxied.client() as client,
    ):
        head, body = post(b"hello", headers="Expect: 100-continue\r\n").split(b"\r\n\r\n")
        client.writer.write(head + b"\r\n\r\n")
        assert (await read_head(client.reader)).first_line == "HTTP/1.1 100 Continue"
        assert listener.requests == []
        assert (await client.ask(body)).body == b"ok"
    assert listener.requests[0].body == b"hello"
    assert listener.requests[0].all("expect") == []


# Answers


async def answered(answer: bytes, request: bytes = GET, *, bodyless: bool = False) -> Message:
    """What the client gets of an answer; the connection must be good for another request."""
    async with (
        Engine(answering(answer, OK)) as engine,
        proxying(engine.proxied) as proxied,
        proxied.client() as client,
    ):
        message = await client.ask(request, bodyless=bodyless)
        assert message.complete
        # HEAD leaves its engine's connection unusable, and then the script begins anew.
        if request.startswith(b"HEAD"):
            await client.ask(request, bodyless=True)
        else:
            assert (await client.ask(GET)).body == b"ok"
    return message


@in_loop
async def test_the_answer_has_the_engines_lines_and_no_others() -> None:
    message = await answered(
        b"HTTP/1.1 418 I'm a teapot\r\nDate: then\r\nServer: engine\r\nSet-Cookie: a=1\r\n"
        b"X-B: caf\xe9\r\nSet-Cookie: b=2\r\nKeep-Alive: timeout=5\r\nContent-Length: 3\r\n\r\nabc"
    )
    assert message.status == 418
    assert message.body == b"abc"
    assert message.headers == [
        ("date", "then"),
        ("server", "engine"),
        ("set-cookie", "a=1"),
        ("x-b", "caf\xe9"),
        ("set-cookie", "b=2"),
        ("content-length", "3"),
    ]


@in_loop
async def test_a_compressed_answer_stays_compressed() -> None:
    packed = gzip.compress(b"hello" * 100)
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n"
    message = await answered(head + chunk(packed[:20]) + chunk(packed[20:]) + LAST_CHUNK)
    assert message.body == packed
    assert message.all("content-encoding") == ["gzip"]


@pytest.mark.parametrize(
    ("answer", "lengths"),
    [
        (b"HTTP/1.1 204 No Content\r\nX: 1\r\n\r\n", []),
        (b"HTTP/1.1 304 Not Modified\r\nX: 1\r\nContent-Length: 500\r\n\r\n", []),
        (b"HTTP/1.1 200 OK\r\nX: 1\r\nContent-Length: 0\r\n\r\n", ["0"]),
    ],
)
@in_loop
async def test_an_answer_without_a_body_ends_with_its_head(
    answer: bytes, lengths: list[str]
) -> None:
    message = await answered(answer, bodyless=True)
    assert message.all("x") == ["1"]
    assert message.all("content-length") == lengths


@in_loop
async def test_an_answer_to_head_names_a_length_and_has_no_body() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n"
    head = GET.replace(b"GET", b"HEAD")
    message = await answered(answer, head, bodyless=True)
    assert message.all("content-length") == ["500"]


@in_loop
async def test_connections_to_the_engine_are_used_again() -> None:
    async with Engine(answering(OK)) as engine, proxying(engine.proxied) as proxied:
        for _ in range(5):
            assert (await proxied.ask(GET)).body == b"ok"
        assert engine.visits == 1


@in_loop
async def test_a_url_with_a_path_stands_before_every_path() -> None:
    listener = Listener()
    async with Engine(listener) as engine:
        under = type(engine.proxied)("chat-0", f"{engine.proxied.url}/llm/")
        async with proxying(under) as proxied:
            await proxied.ask(GET)
    assert listener.requests[0].first_line == "GET /llm/v1/models HTTP/1.1"


# What the proxy does not take


@pytest.mark.parametrize("size", [70_000, 300_000])
@in_loop
async def test_a_head_that_is_too_long_is_refused(size: int) -> None:
    async with Engine(answering(OK)) as engine, proxying(engine.proxied) as proxied:
        message = await proxied.ask(GET.replace(b"proxy", b"proxy\r\nX: " + b"x" * size))
        assert message.status == 431
        assert engine.visits == 0


@in_loop
async def test_a_head_of_almost_64_kib_passes() -> None:
    listener = Listener()
    async with Engine(listener) as engine, proxying(engine.proxied) as proxied:
        long = b"x" * 60_000
        assert (await proxied.ask(GET.replace(b"proxy", b"proxy\r\nX: " + long))).status == 200
    assert listener.requests[0].all("x") == [long.decode()]


@in_loop
async def test_a_websocket_is_refused_with_a_reason() -> None:
    async with Engine(answering(OK)) as engine, proxying(engine.proxied) as proxied:
        message = await proxied.ask(
            GET.replace(b"proxy", b"proxy\r\nConnection: Upgrade\r\nUpgrade: websocket")
        )
        assert engine.visits == 0
    assert message.status == 501
    assert b'"type": "upgrade_refused"' in message.body
    assert b"no WebSocket" in message.body


@in_loop
async def test_a_wish_for_another_http_is_answered_in_this_one() -> None:
    listener = Listener()
    wish = b"proxy\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA"
    async with Engine(listener) as engine, proxying(engine.proxied) as proxied:
        message = await proxied.ask(GET.replace(b"proxy", wish))
    assert message.body == b"ok"
    assert message.all("connection") == ["close"]
    assert {"upgrade", "http2-settings"} & {name for name, _ in listener.requests[0].headers} == (
        set()
    )


@in_loop
async def test_requests_sent_ahead_are_answered_in_their_order() -> None:
    async with (
        Engine(answering(OK, OK.replace(b"ok", b"no"))) as engine,
        proxying(engine.proxied) as proxied,
        proxied.client() as client,
    ):
        client.writer.write(GET * 3)
        bodies = [(await read_message(client.reader)).body for _ in range(3)]
    assert bodies == [b"ok", b"no", b"ok"]
