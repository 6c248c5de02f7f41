"""The pool of connections to one engine."""

import asyncio

from agent.sources.proxy.connection_pool import ConnectionPool
from agent.sources.proxy.engine_connection import EngineConnection
from tests.sources.proxy.wire import OK, in_loop


class Transport(asyncio.Transport):
    """A transport that is open until it is aborted."""

    closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Drop the bytes."""

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = True


def used_connection() -> tuple[EngineConnection, Transport]:
    """A connection after one complete response."""
    connection, transport = EngineConnection(asyncio.get_running_loop(), lambda: 0.0), Transport()
    connection.connection_made(transport)
    connection.send_request(b"GET / HTTP/1.1\r\n\r\n", bodyless=False)
    connection.data_received(OK)
    return connection, transport


@in_loop
async def test_the_connection_used_last_is_taken_first_and_old_ones_are_closed() -> None:
    now_s = 0.0
    pool = ConnectionPool("http://engine", lambda: now_s, 5.0)
    old, old_transport = used_connection()
    await old.read(None)
    pool.give_back(old)
    now_s = 3.0
    one, _ = used_connection()
    other, _ = used_connection()
    for connection in (one, other):
        await connection.read(None)
        pool.give_back(connection)
    assert pool.take() is other
    now_s = 4.5
    pool.give_back(other)
    assert old_transport.closed
    assert (pool.take(), pool.take(), pool.take()) == (other, one, None)
