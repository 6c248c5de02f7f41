"""Runs tests that are coroutines in the agent's kind of event loop."""

import asyncio
import inspect

import pytest
import uvloop

from tests.sources.proxy.wire import WITHIN_S


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the test, if it is a coroutine, in a new loop and for a limited time."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    async def run() -> None:
        async with asyncio.timeout(WITHIN_S):
            await pyfuncitem.obj(**arguments)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
    return True
