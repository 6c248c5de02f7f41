"""The calls to measuring, what measuring may change, and its faults."""

import asyncio
from dataclasses import replace

import pytest

from agent.sources.proxy.exchange import Arrival, Ending, Exchange, GuardedExchange
from tests.sources.proxy.wire import (
    CHUNKED,
    LAST_CHUNK,
    LIMITS,
    Engine,
    Message,
    Recorded,
    Recorder,
    Visit,
    chunk,
    closing_after,
    in_loop,
    post,
    proxying,
    read_chunk,
    read_head,
    responding,
    served,
    serving,
)

STREAM = CHUNKED + chunk(b"one") + chunk(b"two") + LAST_CHUNK


async def measured(recorder: Recorder, request: bytes) -> tuple[Message, Message]:
    """Return a request as the engine gets it, and its stream as the client gets it."""
    async with serving(responding(STREAM), measuring=recorder) as (engine, proxied):
        message = await proxied.ask(request)
        assert proxied.failures == {}
    return engine.requests[0], message


# Calls


@in_loop
async def test_the_calls_of_an_exchange_are_in_order() -> None:
    recorder = Recorder()
    await measured(recorder, post(b'{"model": "m"}', "/v1/x?y=1", "X-Mine: 1\r\n"))
    (exchange,) = recorder.made
    arrival = exchange.arrival
    assert (arrival.method, arrival.path) == ("POST", "/v1/x")
    assert arrival.body == b'{"model": "m"}'
    assert (b"x-mine", b"1") in arrival.headers
    assert exchange.names[:2] == ["routed", "answered"]
    assert exchange.names[-1] == "ended"
    assert set(exchange.names[2:-1]) == {"chunk"}
    assert exchange.calls[0] == ("routed", "chat-0")
    assert exchange.calls[1][1] == 200
    assert (b"content-type", b"text/event-stream") in exchange.calls[1][2]
    assert b"".join(call[1] for call in exchange.calls[2:-1]) == b"onetwo"
    assert exchange.ending is Ending.COMPLETE
    assert [arrival.at_s, *exchange.times_s] == sorted([arrival.at_s, *exchange.times_s])


@in_loop
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
@in_loop
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


# Changes


@in_loop
async def test_the_engine_gets_the_body_and_headers_of_measuring() -> None:
    request, _ = await measured(
        Recorder(
            body=b"longer than before",
            headers=((b"x-request-id", b"new"), (b"traceparent", b"00-1")),
        ),
        post(b"old", headers="X-Request-Id: old\r\n"),
    )
    assert request.body == b"longer than before"
    assert request.all("content-length") == ["18"]
    assert request.all("x-request-id") == ["new"]
    assert request.all("traceparent") == ["00-1"]


@in_loop
async def test_the_client_gets_the_headers_and_pieces_of_measuring() -> None:
    _, message = await measured(
        Recorder(
            response_headers=((b"x-other", b"theirs"), (b"connection", b"x")),
            added_headers=((b"x-request-id", b"mine"), (b"x-other", b"mine")),
            change=lambda data: data.replace(b"two", b""),
            last=b"[end]",
        ),
        post(b"{}"),
    )
    assert message.all("x-request-id") == ["mine"]
    assert message.all("x-other") == ["theirs"]
    assert message.all("connection") == []
    assert message.body == b"one[end]"


@in_loop
async def test_the_proxys_own_response_has_the_added_headers() -> None:
    async with Engine(responding()) as engine:
        gone = engine.proxied
    async with proxying(
        gone, measuring=Recorder(added_headers=((b"x-request-id", b"mine"),))
    ) as proxied:
        message = await proxied.ask(post(b"{}"))
    assert (message.status, message.all("x-request-id")) == (502, ["mine"])


@in_loop
async def test_held_bytes_are_sent_when_the_engine_dies() -> None:
    recorder = Recorder(change=lambda _: b"", last=b"held")
    async with serving(closing_after(CHUNKED + chunk(b"data")), measuring=recorder) as (_, proxied):
        message = await proxied.ask(post(b"{}"))
    assert (message.body, message.complete) == (b"held", False)
    assert recorder.made[0].ending is Ending.ENGINE_GONE


# Faults


@pytest.mark.parametrize("call", ["routed", "answered", "chunk", "catch_up", "ended"])
@in_loop
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
    reads = [(b"one", 1.0), (b"two", 1.0), (b"three", 2.0)]
    assert guarded.chunks(reads) == b"ONEtwothree"
    assert guarded.chunks([(b"four", 3.0)]) == b"four"
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
@in_loop
async def test_a_request_whose_measurement_cannot_start_is_relayed(at: str, reason: str) -> None:
    async with serving(responding(STREAM), measuring=Faulty(at)) as (_, proxied):
        assert (await proxied.ask(post(b"{}"))).body == b"onetwo"
        assert proxied.failures == {reason: 1}


@in_loop
async def test_a_response_longer_than_its_content_length_is_cut() -> None:
    response = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    async with serving(responding(response), measuring=Recorder(change=lambda data: data * 2)) as (
        _,
        proxied,
    ):
        assert not (await proxied.ask(post(b"{}"))).complete
        assert proxied.failures == {"relay": 1}
        assert proxied.open_requests == {"chat-0": 0}


@in_loop
async def test_a_fault_of_the_proxy_becomes_a_500() -> None:
    async with serving(responding(STREAM), measuring=Recorder(body="text")) as (_, proxied):
        message = await proxied.ask(post(b"{}"))
        assert message.status == 500
        assert b'"type": "proxy_error"' in message.body
        assert proxied.failures == {"relay": 1}
        assert proxied.open_requests == {"chat-0": 0}
