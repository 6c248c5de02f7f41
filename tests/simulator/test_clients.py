"""The clients of the demo, which send a scenario's requests through a proxy."""

import asyncio
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from aiohttp import web

from agent.simulator.batching import EngineRequest
from agent.simulator.simulated_engine import Clock
from agent.simulator.traffic import Clients
from tests.simulator.kit import SetClock, engine_request


class Proxy:
    """Answers each request with a stream, an empty one without `chunks`, and keeps its body."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.chunks: int | None = None
        self.written_at: list[float] = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]

    async def listen(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._take)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        return runner

    async def _take(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        if self.chunks is None:
            return web.Response(text="data: [DONE]\n\n")
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(self.chunks):
            await response.write(b"data: " + 1500 * b" " + b"\n\n")
            self.written_at.append(time.monotonic())
        return response


def arriving(*at_s: float) -> list[EngineRequest]:
    return [engine_request(10 + index, 5, arrived_s=each) for index, each in enumerate(at_s)]


async def sent(planned: Sequence[EngineRequest], clock: Clock, proxy: Proxy) -> None:
    """Send all, and wait for the responses."""
    clients = Clients(f"http://127.0.0.1:{proxy.port}", "simulated", clock)
    async with asyncio.timeout(30):
        await clients.wait_for_proxy()
        await clients.send(iter(planned))


def lengths(proxy: Proxy) -> list[int]:
    """The prompts in tokens of four characters."""
    return sorted(len(body["messages"][0]["content"]) // 4 for body in proxy.bodies)


def test_each_copy_of_a_surge_is_sent_and_none_of_the_past() -> None:
    proxy, clock = Proxy(), Clock(lead_s=100.0)

    async def run() -> None:
        runner = await proxy.listen()
        # At one time, as the copies of a surge; the first two arrived before the clients began.
        await sent(arriving(10.0, 99.0, 100.5, 100.5, 100.5), clock, proxy)
        await runner.cleanup()

    asyncio.run(run())
    assert lengths(proxy) == [12, 13, 14]
    wanted = {(body["max_tokens"], body["ignore_eos"], body["stream"]) for body in proxy.bodies}
    assert wanted == {(5, True, True)}


def test_requests_that_arrive_before_the_proxy_listens_are_not_sent_all_at_once_then() -> None:
    proxy, clock = Proxy(), SetClock(100.0)

    async def run() -> None:
        sending = asyncio.create_task(sent(arriving(101.0, 102.0, 201.0), clock, proxy))
        await asyncio.sleep(0)
        await clock.sleep_until(200.0)
        runner = await proxy.listen()
        await sending
        await runner.cleanup()

    asyncio.run(run())
    assert lengths(proxy) == [12]


PAUSE_S = 0.5


def test_a_client_that_pauses_keeps_the_proxy_waiting_with_a_response_of_250_tokens() -> None:
    proxy, clock = Proxy(), SetClock(0.0)
    proxy.chunks = 250
    slow = replace(engine_request(20, 250, arrived_s=1.0), client_pause_s=PAUSE_S)

    async def run() -> None:
        runner = await proxy.listen()
        await sent([slow], clock, proxy)
        await runner.cleanup()

    asyncio.run(run())
    assert len(proxy.written_at) == proxy.chunks
    assert proxy.written_at[-1] - proxy.written_at[0] >= 0.9 * PAUSE_S
    (body,) = proxy.bodies
    assert (body["logprobs"], body["top_logprobs"]) == (True, 20)
