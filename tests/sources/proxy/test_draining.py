"""Draining and closing."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from agent.sources.proxy.exchange import Ending
from tests.sources.proxy.wire import (
    CHUNKED,
    GET,
    LAST_CHUNK,
    OK,
    Client,
    Engine,
    Proxied,
    Recorder,
    Visit,
    chunk,
    in_loop,
    post,
    proxying,
    read_message,
    responding,
    served,
    until_gone,
)

ASK = post(b"{}")


class Paused:
    """A script that pauses in the middle of a stream until `go_on`."""

    def __init__(self) -> None:
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()

    async def __call__(self, visit: Visit) -> None:
        await visit.request()
        await visit.send(CHUNKED + chunk(b"one"))
        self.begun.set()
        await self.go_on.wait()
        await visit.send(chunk(b"two") + LAST_CHUNK)


@in_loop
async def test_a_stream_that_exceeds_the_drain_limit_is_cut_and_counted() -> None:
    paused, recorder = Paused(), Recorder()

    async def silent(visit: Visit) -> None:
        await visit.request()
        received.set()
        await until_gone(visit.reader)

    received = asyncio.Event()
    async with (
        Engine(paused) as engine,
        Engine(silent, "chat-1") as other,
        proxying(engine.proxied, other.proxied, measuring=recorder) as proxied,
        proxied.client() as client,
        proxied.client() as waiting,
    ):
        client.writer.write(ASK)
        await paused.begun.wait()
        waiting.writer.write(ASK)
        await received.wait()
        assert await proxied.proxy.drain(0.01) == 2
        message = await read_message(client.reader)
        assert (message.body, message.complete) == (b"one", False)
        assert (await read_message(waiting.reader)).status == 503
        await other.closed.wait()
        assert proxied.open_requests == {"chat-0": 0, "chat-1": 0}
        assert proxied.proxy.live == 0
        paused.go_on.set()
    assert [exchange.ending for exchange in recorder.made] == [Ending.REFUSED] * 2


# A stop: requests that are on their way get their responses


@contextlib.asynccontextmanager
async def _one_client() -> AsyncIterator[tuple[Proxied, Client]]:
    async with served(responding(OK)) as (_, proxied, client):
        # Connections are taken in turn: after this the client's is, too.
        await proxied.ask(GET)
        yield proxied, client


@contextlib.asynccontextmanager
async def _stopping(proxied: Proxied) -> AsyncIterator[None]:
    """Stop the server: it takes no new connections, and ends after its last clients."""
    stopped = asyncio.create_task(proxied.server.stop(within_s=None))
    with contextlib.suppress(ConnectionError):
        while True:
            _, writer = await asyncio.open_connection("127.0.0.1", proxied.port)
            writer.close()
            await writer.wait_closed()
    yield
    await stopped


@in_loop
async def test_a_client_that_has_just_connected_gets_its_response() -> None:
    async with _one_client() as (proxied, client), _stopping(proxied):
        response = await client.ask(GET)
        assert (response.body, response.all("connection")) == (b"ok", ["close"])


@in_loop
async def test_a_client_whose_head_is_not_complete_gets_its_response(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agent.sources.proxy.reverse_proxy._LAST_REQUEST_S", 0.05)
    async with _one_client() as (proxied, client), proxied.client() as unused:
        client.writer.write(GET[:8])
        await proxied.ask(GET)
        async with _stopping(proxied):
            assert await unused.reader.read() == b""
            assert (await client.ask(GET[8:])).body == b"ok"


@in_loop
async def test_the_next_request_of_a_client_gets_its_response() -> None:
    async with _one_client() as (proxied, client):
        assert (await client.ask(GET)).all("connection") == []
        async with _stopping(proxied):
            response = await client.ask(GET)
            assert (response.body, response.all("connection")) == (b"ok", ["close"])
