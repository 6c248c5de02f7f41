"""The proxy's server at a stop: requests that are on their way get their responses."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from tests.sources.proxy.wire import (
    GET,
    OK,
    Client,
    Proxied,
    in_loop,
    responding,
    served,
)


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
async def test_a_client_whose_head_is_not_complete_gets_its_response() -> None:
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
