"""Room for the bodies of all requests."""

import asyncio
from dataclasses import replace

import pytest

from agent.sources.proxy.body_room import BodyRoom
from agent.sources.proxy.exchange import Ending
from tests.sources.proxy.wire import (
    LAST_CHUNK,
    LIMITS,
    OK,
    Recorder,
    chunk,
    in_loop,
    post,
    responding,
    serving,
)


@pytest.mark.parametrize("greedy", [1, 3, 40])
def test_greedy_bodies_leave_room_for_a_small_one(greedy: int) -> None:
    room, held = BodyRoom(1000), [0] * greedy
    for _ in range(1000):
        for number in range(greedy):
            held[number] += room.take(held[number], 1)
    # All in turn: each has the same as what is left.
    assert sum(held) <= 1000 * greedy / (greedy + 1)
    assert room.has(1000 // (greedy + 1) // 2)
    for one in held:
        room.give_back(one)
    assert room.has(500)
    assert not room.has(501)


@in_loop
async def test_the_room_is_given_back_after_each_request() -> None:
    recorder = Recorder()
    limits = replace(LIMITS, body_room_bytes=600_000)
    # More than one read of a socket, so that it takes room; eight would fill it.
    body = bytes(290_000)
    async with serving(responding(OK), measuring=recorder, limits=limits) as (_, proxied):
        for _ in range(8):
            assert (await proxied.ask(post(body))).body == b"ok"
        async with proxied.client() as client:
            client.writer.write(post(body)[:-1])
            await client.writer.drain()
            while not proxied.proxy.live:
                await asyncio.sleep(0)
            client.leave()
        await recorder_has(recorder, 9)
        assert (await proxied.ask(post(body))).body == b"ok"
    assert [len(one.arrival.body or b"") for one in recorder.made] == [*[290_000] * 8, 0, 290_000]
    assert recorder.made[8].ending is Ending.CLIENT_GONE


async def recorder_has(recorder: Recorder, count: int) -> None:
    """Return when so many exchanges are over."""
    while len(recorder.made) < count:
        await asyncio.sleep(0)
    await recorder.made[-1].over.wait()


@pytest.mark.parametrize("declared", [True, False])
@in_loop
async def test_a_body_without_room_passes_as_it_arrives(declared: bool) -> None:
    recorder = Recorder()
    limits = replace(LIMITS, body_room_bytes=100_000)
    body = bytes(900_000)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    request = post(body) if declared else head + chunk(body) + LAST_CHUNK
    async with serving(responding(OK), measuring=recorder, limits=limits) as (_, proxied):
        assert (await proxied.ask(request)).body == b"ok"
    (exchange,) = recorder.made
    assert (exchange.arrival.body, exchange.ending) == (None, Ending.COMPLETE)
    assert sum(call[1] for call in exchange.calls if call[0] == "sent") == len(body)
