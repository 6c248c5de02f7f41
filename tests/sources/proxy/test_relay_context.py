"""Records that are made after the client has its response."""

import asyncio
import select
import socket
import time
from dataclasses import dataclass, field

import pytest

from agent.sources.proxy.exchange import Arrival, Ending, Exchange
from agent.sources.proxy.relay_context import DeferredWork
from tests.sources.proxy.wire import (
    CHUNKED,
    LAST_CHUNK,
    Engine,
    Recorded,
    Recorder,
    Visit,
    chunk,
    post,
    proxying,
    responding,
    serving,
)

STREAM = CHUNKED + chunk(b"one") + chunk(b"two") + LAST_CHUNK
ASK = post(b"{}")
CALLS = "agent.sources.proxy.relay_context._DEFERRED_S"


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deferred work is not done by time."""
    monkeypatch.setattr(CALLS, 1000.0)


@dataclass(slots=True)
class Peeking(Recorded):
    """Notes what the client could read at the first call of each name."""

    client: socket.socket | None = None
    readable: dict[str, bytes] = field(default_factory=dict)

    def chunk(self, data: bytes, at_s: float) -> bytes:
        self.peek("chunk")
        return data

    def ended(self, ending: Ending, at_s: float) -> bytes:
        self.peek("ended")
        return b""

    def peek(self, call: str) -> None:
        assert self.client is not None
        there, _, _ = select.select([self.client], [], [], 0)
        read = self.client.recv(4096, socket.MSG_PEEK) if there else b""
        self.readable.setdefault(call, read)


class PeekingRecorder(Recorder):
    def __init__(self, client: socket.socket) -> None:
        super().__init__()
        self.client = client

    def begin(self, arrival: Arrival) -> Exchange:
        exchange = Peeking(arrival, client=self.client)
        self.made.append(exchange)
        return exchange


async def peeked(*pieces: bytes) -> dict[str, bytes]:
    """What the client had at each call, of a response that the engine sends in pieces."""
    done = asyncio.Event()

    async def script(visit: Visit) -> None:
        await visit.request()
        for piece in pieces:
            await visit.send(piece)
            await asyncio.sleep(0.01)
        await done.wait()

    with socket.socket() as client:
        recorder = PeekingRecorder(client)
        async with serving(script, measuring=recorder) as (_, proxied):
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", proxied.port))
            await loop.sock_sendall(client, ASK)
            while not recorder.made or "ended" not in recorder.made[0].readable:  # type: ignore[attr-defined]
                await asyncio.sleep(0)
            done.set()
    (exchange,) = recorder.made
    assert isinstance(exchange, Peeking)
    return exchange.readable


async def test_the_client_has_the_first_piece_and_the_last_before_they_are_measured() -> None:
    readable = await peeked(CHUNKED + chunk(b"one"), LAST_CHUNK)
    assert readable["chunk"].endswith(chunk(b"one"))
    assert readable["ended"].endswith(LAST_CHUNK)
    readable = await peeked(STREAM)
    assert readable["chunk"].endswith(LAST_CHUNK)


async def test_the_first_of_many_events_leaves_before_the_others_are_looked_at() -> None:
    events = [b"data: %d\n\n" % number for number in range(1000)]
    readable = await peeked(CHUNKED + chunk(b"".join(events)) + LAST_CHUNK)
    assert readable["chunk"].endswith(chunk(events[0]))


async def test_a_large_piece_without_the_end_of_an_event_passes_whole() -> None:
    body, recorder = b"{" + bytes(10_000) + b"}", Recorder()
    response = CHUNKED + chunk(body) + LAST_CHUNK
    async with serving(responding(response), measuring=recorder) as (_, proxied):
        assert (await proxied.ask(ASK)).body == body
    assert [call[1] for call in recorder.made[0].calls if call[0] == "chunk"] == [body]


async def test_no_record_is_lost_when_the_proxy_closes(never: None) -> None:
    recorder = Recorder()
    async with serving(responding(STREAM), measuring=recorder) as (_, proxied):
        assert (await proxied.ask(ASK)).body == b"onetwo"
        (exchange,) = recorder.made
        assert exchange.ending is None
        # Nothing else waits for its record.
        assert proxied.open_requests == {"chat-0": 0}
        assert proxied.proxy.live == 0
    assert exchange.ending is Ending.COMPLETE
    assert exchange.names == ["routed", "answered", "chunk", "ended"]


async def test_at_most_64_records_wait(never: None) -> None:
    recorder = Recorder()
    async with serving(responding(STREAM), measuring=recorder) as (_, proxied):
        async with proxied.client() as client:
            for _ in range(66):
                await client.ask(ASK)
        assert [each.ending for each in recorder.made[:3]] == [Ending.COMPLETE] * 2 + [None]


async def test_an_engine_is_chosen_by_the_ends_of_all_earlier_responses(never: None) -> None:
    recorder = Recorder()
    async with (
        Engine(responding(STREAM)) as one,
        Engine(responding(STREAM), "chat-1") as other,
        proxying(one.proxied, other.proxied, measuring=recorder) as proxied,
    ):
        for _ in range(3):
            await proxied.ask(ASK)
        assert [each.ending for each in recorder.made] == [Ending.COMPLETE] * 2 + [None]


async def test_a_fault_in_deferred_measuring_costs_its_record_alone(never: None) -> None:
    recorder = Recorder(fails_at="chunk")
    async with serving(responding(STREAM), measuring=recorder) as (_, proxied):
        async with proxied.client() as client:
            bodies = [(await client.ask(ASK)).body for _ in range(3)]
        assert bodies == [b"onetwo"] * 3
        await proxied.proxy.close()
        assert proxied.failures == {"chunk": 3}


async def test_deferred_work_leaves_the_event_loop_to_others_between_slices() -> None:
    deferred, done = DeferredWork(), []

    def work(number: int) -> None:
        done.append(number)
        # Longer than a slice.
        time.sleep(0.001)

    for number in range(3):
        deferred.add(lambda number=number: work(number))  # type: ignore[misc]
    assert done == []
    turns: list[int] = []
    while len(done) < 3:
        await asyncio.sleep(0)
        turns.append(len(done))
    assert {1, 2, 3} <= set(turns)


async def test_deferred_work_that_adds_more_is_all_done() -> None:
    deferred, done = DeferredWork(), list[str]()

    def first() -> None:
        done.append("first")
        deferred.add(lambda: done.append("second"))

    deferred.add(first)
    while len(done) < 2:
        await asyncio.sleep(0)
    assert done == ["first", "second"]
