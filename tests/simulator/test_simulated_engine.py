import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from itertools import islice

import pytest

from agent.simulator.batching import Batch
from agent.simulator.engine_steps import EngineRequest, Step, Token
from agent.simulator.simulated_engine import Clock, Engine
from tests.simulator.stepping import PLAIN, asked, finished, numbered_requests, steps

FAST = PLAIN.model_copy(update={"time_scale": 200.0}).in_real_time()


class _LateClock(Clock):
    """A clock whose sleepers are always woken up late, by a second of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0

    def now_s(self) -> float:
        return self._now_s

    async def sleep_until(self, at_s: float) -> None:
        self._now_s = max(self._now_s, at_s + 1.0)
        await asyncio.sleep(0)


@asynccontextmanager
async def _running(engine: Engine) -> AsyncIterator[None]:
    running = asyncio.create_task(engine.run())
    try:
        yield
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


def _engine(seen: list[Step], *planned: EngineRequest) -> Engine:
    return Engine(Batch(FAST, planned), Clock(), [seen.append])


async def _all_tokens(engine: Engine, request: EngineRequest) -> list[Token]:
    return [token async for token in engine.generate(request)]


def test_a_request_gets_its_tokens_in_order_and_the_last_one_says_why() -> None:
    async def tokens() -> list[Token]:
        engine = _engine([])
        async with _running(engine):
            request = asked(output_tokens=4, arrived_s=engine.now_s())
            return await _all_tokens(engine, request)

    got = asyncio.run(tokens())
    assert [token.position for token in got] == [1, 2, 3, 4]
    assert [token.finish_reason for token in got] == [None, None, None, "stop"]


def test_requests_share_the_batch() -> None:
    seen: list[Step] = []

    async def answer_together() -> None:
        engine = _engine(seen)
        requests = [asked(output_tokens=50, arrived_s=engine.now_s()) for _ in range(5)]
        async with _running(engine):
            await asyncio.gather(*(_all_tokens(engine, request) for request in requests))

    asyncio.run(answer_together())
    assert max(len(step.tokens) for step in seen) == 5


def test_a_request_wakes_an_idle_engine_before_its_next_planned_one() -> None:
    async def answered() -> list[Token]:
        engine = _engine([], asked(arrived_s=3600.0))
        async with _running(engine):
            await asyncio.sleep(0)
            async with asyncio.timeout(60):
                return await _all_tokens(engine, asked(arrived_s=engine.now_s()))

    assert len(asyncio.run(answered())) == 5


def test_a_client_that_stops_reading_aborts_its_request() -> None:
    seen: list[Step] = []

    async def read_two_tokens() -> None:
        engine = _engine(seen)
        request = asked(output_tokens=100, arrived_s=engine.now_s())
        async with _running(engine), aclosing(engine.generate(request)) as tokens:
            await anext(tokens)
            await anext(tokens)

    asyncio.run(read_two_tokens())
    assert finished(seen) == []
    # The load of the abort itself is seen, although no step follows.
    assert (seen[-1].load.running, seen[-1].load.kv_usage) == (0, 0.0)


def test_late_wake_ups_enter_no_latency() -> None:
    requests = list(islice(numbered_requests(FAST), 100))
    planned = finished(steps(Batch(FAST, requests)))
    seen: list[Step] = []

    async def run_late() -> None:
        all_done = asyncio.Event()

        def watch(step: Step) -> None:
            seen.append(step)
            if len(finished(seen)) == len(planned):
                all_done.set()

        async with _running(Engine(Batch(FAST, requests), _LateClock(), [watch])):
            await all_done.wait()

    asyncio.run(run_late())
    assert finished(seen) == planned


def test_the_clock_places_its_seconds_in_calendar_time() -> None:
    clock = Clock()
    assert clock.unix_ns(2.5) - clock.unix_ns(0.0) == 2_500_000_000
    assert math.floor(clock.unix_ns(0.0) / 1e18) == 1


def test_the_clock_never_goes_backwards() -> None:
    clock = Clock()
    readings = [clock.now_s() for _ in range(1000)]
    assert readings == sorted(readings)
    assert readings[0] >= 0


def test_a_broken_observer_stops_the_engine_instead_of_going_unseen() -> None:
    def broken(step: Step) -> None:
        raise ArithmeticError("no such step")

    engine = Engine(Batch(FAST, [asked()]), Clock(), [broken])
    with pytest.raises(ArithmeticError):
        asyncio.run(engine.run())
