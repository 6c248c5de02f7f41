"""The simulated engine in real time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import islice

import pytest

from agent.simulator.batching import Batch, EngineRequest, Step, Token
from agent.simulator.simulated_engine import Clock, Engine
from tests.simulator.kit import PLAIN, SetClock, engine_request, finished, numbered_requests, steps

FAST = PLAIN.model_copy(update={"time_scale": 200.0}).in_real_time()


@asynccontextmanager
async def _running(engine: Engine) -> AsyncIterator[None]:
    running = asyncio.create_task(engine.run())
    try:
        yield
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


def _engine(observed: list[Step], *planned: EngineRequest) -> Engine:
    return Engine(Batch(FAST, planned), Clock(), [observed.append])


async def _all_tokens(engine: Engine, request: EngineRequest) -> list[Token]:
    return [token async for token in engine.generate(request)]


def test_a_request_wakes_an_idle_engine_before_its_next_planned_one() -> None:
    async def generated() -> list[Token]:
        engine = _engine([], engine_request(arrived_s=3600.0))
        async with _running(engine):
            await asyncio.sleep(0)
            async with asyncio.timeout(60):
                return await _all_tokens(engine, engine_request(arrived_s=engine.now_s()))

    assert len(asyncio.run(generated())) == 5


def test_late_wake_ups_do_not_change_latencies() -> None:
    requests = list(islice(numbered_requests(FAST), 100))
    planned = finished(steps(Batch(FAST, requests)))
    observed: list[Step] = []

    async def run_late() -> None:
        all_done = asyncio.Event()

        def watch(step: Step) -> None:
            observed.append(step)
            if len(finished(observed)) == len(planned):
                all_done.set()

        async with _running(Engine(Batch(FAST, requests), SetClock(late_s=1.0), [watch])):
            await all_done.wait()

    asyncio.run(run_late())
    assert finished(observed) == planned


def test_an_error_in_an_observer_stops_the_engine() -> None:
    def broken(step: Step) -> None:
        raise ArithmeticError("no such step")

    engine = Engine(Batch(FAST, [engine_request()]), Clock(), [broken])
    with pytest.raises(ArithmeticError):
        asyncio.run(engine.run())
