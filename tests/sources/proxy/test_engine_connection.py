"""Connections to engines: unusual and broken responses, time-outs, TLS and reuse."""

import asyncio
import json
import ssl
from dataclasses import replace

import pytest

from agent.sources.proxy.engine_connection import ConnectionPool, EngineConnection
from agent.sources.proxy.exchange import Ending
from agent.sources.proxy.relay_context import ProxyLimits
from tests.real_parts.certificates import Certificate, make_certificate
from tests.sources.proxy.wire import (
    CHUNKED,
    GET,
    LAST_CHUNK,
    LIMITS,
    OK,
    Engine,
    Message,
    Recorder,
    Visit,
    chunk,
    closing_after,
    hanging_after,
    post,
    proxying,
    read_message,
    responding,
    served,
    serving,
)

ASK = post(b"{}")


async def broken(response: bytes) -> tuple[Message, Ending | None]:
    """Return a response as the client gets it from an engine that then closes, and the ending."""
    recorder = Recorder()
    async with serving(closing_after(response), measuring=recorder) as (_, proxied):
        message = await proxied.ask(ASK)
        assert proxied.open_requests == {"chat-0": 0}
    return message, recorder.made[0].ending


class Taken:
    """Keeps the calls of a connection."""

    def __init__(self) -> None:
        self.alone: list[bool] = []
        self.pieces: list[tuple[bytes, float]] = []
        self.ended = False
        self.failures: list[str] = []
        self.engine_reads: list[bool] = []

    def take_head(self, *, alone: bool) -> None:
        self.alone.append(alone)

    def take_piece(self, data: bytes, at_s: float, *, ended: bool) -> None:
        assert not self.ended
        self.pieces.append((data, at_s))
        self.ended = ended

    def lose(self, failure: str) -> None:
        self.failures.append(failure)

    def engine_takes(self, *, more: bool) -> None:
        self.engine_reads.append(more)

    def fault(self) -> None:
        raise AssertionError("a call failed")


async def test_a_response_may_be_split_at_every_byte() -> None:
    response = (
        b"HTTP/1.1 100 Continue\r\n\r\n"
        + CHUNKED
        + chunk(b"data: {}\n\n")
        + chunk(b"data: [DONE]\n\n")
        + b"0\r\nX-Sum: 1\r\n\r\n"
    )
    head_end = response.index(chunk(b"data: {}\n\n"))
    connection = EngineConnection(iter(range(10**6)).__next__)
    connection.connection_made(Transport())
    for place in range(1, len(response)):
        taken = Taken()
        connection.send_request(taken, ASK, bodyless=False)
        connection.data_received(response[:place])
        assert not connection.reusable
        connection.data_received(response[place:])
        assert connection.status == 200
        assert [name for name, _ in connection.headers] == [b"content-type", b"transfer-encoding"]
        # Then nothing of the body was read with the head.
        assert taken.alone == [head_end <= place <= response.index(b"data: {}")]
        assert b"".join(data for data, _ in taken.pieces) == b"data: {}\n\ndata: [DONE]\n\n"
        assert sorted(at_s for _, at_s in taken.pieces) == [at_s for _, at_s in taken.pieces]
        assert taken.ended
        assert connection.reusable
        assert taken.failures == []


async def test_a_request_on_a_connection_that_the_engine_has_closed_is_lost() -> None:
    connection, taken = EngineConnection(lambda: 0.0), Taken()
    connection.connection_made(Transport())
    connection.connection_lost(None)
    connection.send_request(taken, ASK, bodyless=False)
    # Not inside the call, after which the handler goes on.
    assert taken.failures == []
    await asyncio.sleep(0)
    assert taken.failures == ["it closed the connection"]
    assert not connection.reusable


async def test_a_handler_that_has_ended_its_exchange_gets_no_more() -> None:
    connection, taken = EngineConnection(lambda: 0.0), Taken()
    connection.connection_made(Transport())
    connection.send_request(taken, ASK, bodyless=False)
    taken.take_head = lambda *, alone: connection.abort()  # type: ignore[method-assign]
    connection.data_received(CHUNKED + chunk(b"one") + b"garbage")
    connection.connection_lost(None)
    assert (taken.pieces, taken.failures) == ([], [])


@pytest.mark.parametrize(
    "response",
    [
        pytest.param(b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok", id="bare LF"),
        pytest.param(b"HTTP/1.1 200\r\nContent-Length: 2\r\n\r\nok", id="no reason"),
        pytest.param(CHUNKED + b"2 \r\nok\r\n0\r\n\r\n", id="space after a size"),
        pytest.param(CHUNKED + b"2;a=b\r\nok\r\n0;c\r\n\r\n", id="extensions"),
        pytest.param(CHUNKED + b"0002\r\nok\r\n00\r\n\r\n", id="leading zeros"),
        pytest.param(b"HTTP/1.1 100 Continue\r\n\r\n" + OK, id="continue"),
        pytest.param(
            b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 102 P\r\n\r\n" + OK,
            id="early hints",
        ),
        pytest.param(CHUNKED + chunk(b"ok") + b"0\r\nX-Sum: 1\r\nY: 2\r\n\r\n", id="trailers"),
    ],
)
async def test_an_unusual_response_is_relayed(response: bytes) -> None:
    async with serving(responding(response)) as (_, proxied):
        message = await proxied.ask(ASK)
    assert message.complete
    assert (message.status, message.body) == (200, b"ok")
    names = {name for name, _ in message.headers}
    assert names <= {"content-length", "content-type", "transfer-encoding"}


async def test_a_body_without_a_length_ends_with_the_connection() -> None:
    message, ending = await broken(b"HTTP/1.1 200 OK\r\n\r\nabc")
    assert message.complete
    assert (message.body, ending) == (b"abc", Ending.COMPLETE)


@pytest.mark.parametrize(
    "response",
    [
        pytest.param(OK + OK, id="a second response"),
        pytest.param(OK + b"x", id="extra bytes"),
        pytest.param(OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), id="close"),
        pytest.param(OK.replace(b"1.1", b"1.0"), id="old"),
    ],
)
async def test_a_connection_with_leftover_bytes_is_not_reused(response: bytes) -> None:
    async with served(responding(response)) as (engine, _, client):
        for visits in (1, 2, 3):
            assert (await client.ask(ASK)).body == b"ok"
            assert engine.visits == visits


@pytest.mark.parametrize(
    ("response", "body"),
    [
        pytest.param(CHUNKED, b"", id="after the head"),
        pytest.param(CHUNKED + chunk(b"data: {}\n\n"), b"data: {}\n\n", id="no last chunk"),
        pytest.param(CHUNKED + chunk(b"abc") + b"5\r\nde", b"abcde", id="in a chunk"),
        pytest.param(CHUNKED + chunk(b"abc") + b"5\rx", b"abc", id="in a size"),
        pytest.param(OK.replace(b"h: 2", b"h: 9"), b"ok", id="before its length"),
        pytest.param(
            CHUNKED + chunk(b"ok") + b"0\r\nX: " + b"x" * 1_000_000, b"ok", id="endless trailers"
        ),
    ],
)
async def test_a_client_sees_that_a_response_broke_off(response: bytes, body: bytes) -> None:
    message, ending = await broken(response)
    assert message.status == 200
    assert not message.complete
    assert message.body.startswith(body)
    assert ending is Ending.ENGINE_GONE


async def test_faults_of_engines_are_not_logged_and_those_of_clients_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    switching = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n"
    async with Engine(responding(CHUNKED)) as engine, proxying(engine.proxied) as proxied:
        for response in (CHUNKED, switching):
            engine.script = closing_after(response)
            for _ in range(2):
                await proxied.ask(ASK)
                assert (await proxied.ask(b"GARBAGE\r\n\r\n")).status == 400
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "listen: a client was cut off (malformed); logged once"


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        pytest.param(b"", "closed the connection", id="nothing"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-", "closed the connection", id="half a head"),
        pytest.param(b"SSH-2.0-OpenSSH\r\n", "not HTTP", id="another protocol"),
        pytest.param(b"HTTP/1.1 101 Sw\r\nUpgrade: x\r\n\r\n", "status 101", id="switching"),
        pytest.param(b"HTTP/1.1 999 Odd\r\n\r\n", "status 999", id="no status"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
            "transfer coding",
            id="unsupported coding",
        ),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n",
            "not HTTP",
            id="two lengths",
        ),
        pytest.param(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 1_000_000, "exceeds", id="endless"),
    ],
)
async def test_an_unreadable_response_becomes_a_502(response: bytes, reason: str) -> None:
    message, ending = await broken(response)
    assert message.status == 502
    error = json.loads(message.body)["error"]
    assert (error["type"], error["code"]) == ("engine_unreachable", 502)
    assert error["message"].startswith("engine chat-0 sent no response: ")
    assert reason in error["message"]
    assert ending is Ending.UNREACHABLE


@pytest.mark.parametrize(
    ("begun", "limits", "status", "said"),
    [
        (
            b"",
            replace(LIMITS, answer_s=0.05),
            504,
            b"engine chat-0 did not start its response within 0.05 s",
        ),
        (CHUNKED + chunk(b"data: {}\n\n"), replace(LIMITS, gap_s=0.05), 200, b"data: {}\n\n"),
    ],
)
async def test_a_response_that_does_not_begin_or_go_on_in_time_is_ended(
    begun: bytes, limits: ProxyLimits, status: int, said: bytes
) -> None:
    recorder = Recorder()
    async with serving(hanging_after(begun), measuring=recorder, limits=limits) as (
        engine,
        proxied,
    ):
        message = await proxied.ask(ASK)
        await engine.closed.wait()
    assert (message.status, message.complete) == (status, status == 504)
    assert said in message.body
    assert recorder.made[0].ending is Ending.TIMEOUT


async def test_an_idle_connection_is_closed_before_the_engine_closes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request on a connection that the engine is closing would be lost."""
    async with Engine(responding(OK)) as engine, proxying(engine.proxied) as proxied:
        await proxied.ask(GET)
        monkeypatch.setattr("agent.sources.proxy.engine_connection._IDLE_S", -1.0)
        await proxied.ask(GET)
        assert engine.visits == 2


async def test_unrequested_bytes_close_an_idle_connection() -> None:
    async def script(visit: Visit) -> None:
        await visit.request()
        await visit.send(OK)
        await go_on.wait()
        await visit.send(OK)
        assert await visit.reader.read() == b""

    go_on = asyncio.Event()
    async with Engine(script) as engine, proxying(engine.proxied) as proxied:
        await proxied.ask(ASK)
        go_on.set()
        await engine.closed.wait()
        go_on.clear()
        async with proxied.client() as client:
            client.writer.write(ASK)
            assert (await read_message(client.reader)).body == b"ok"
        assert engine.visits == 2
        go_on.set()


class Transport(asyncio.Transport):
    """A transport that is open until it is aborted."""

    closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = True


def used_connection() -> tuple[EngineConnection, Transport]:
    connection, transport = EngineConnection(lambda: 0.0), Transport()
    connection.connection_made(transport)
    connection.send_request(Taken(), b"GET / HTTP/1.1\r\n\r\n", bodyless=False)
    connection.data_received(OK)
    return connection, transport


async def test_the_connection_used_last_is_taken_first_and_old_ones_are_closed() -> None:
    now_s = 0.0
    pool = ConnectionPool("http://engine", lambda: now_s, 5.0)
    old, old_transport = used_connection()
    pool.give_back(old)
    now_s = 3.0
    one, _ = used_connection()
    other, _ = used_connection()
    for connection in (one, other):
        pool.give_back(connection)
    assert pool.take() is other
    now_s = 4.5
    pool.give_back(other)
    assert old_transport.closed
    assert (pool.take(), pool.take(), pool.take()) == (other, one, None)


STREAM = CHUNKED + chunk(b"one") + chunk(b"two") + LAST_CHUNK


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"), "engine")


@pytest.mark.parametrize("trusted", [True, False])
async def test_an_engine_gets_requests_over_tls_if_its_certificate_is_trusted(
    certificate: Certificate, trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate.certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.certificate, certificate.key)
    async with serving(responding(STREAM), tls=context) as (engine, proxied):
        for _ in range(2):
            message = await proxied.ask(ASK)
            if trusted:
                assert (message.status, message.body, message.complete) == (200, b"onetwo", True)
                assert engine.visits == 1
            else:
                assert message.status == 502
                assert b"certificate" in message.body
                assert engine.requests == []
