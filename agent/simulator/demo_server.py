"""The server of an engine with a past: it gives its frames, and then runs in real time."""

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from uuid import uuid4

from aiohttp import web

from agent.simulator.openai_server import DRAIN_S, OpenAiRoutes, listen
from agent.simulator.past_engine import Frame, PastEngine
from agent.simulator.scenario import Scenario
from agent.simulator.simulated_engine import Clock, Engine
from agent.simulator.span_sender import SpanSender, SpanTarget
from agent.simulator.traffic import Clients, planned_requests


class PastRoutes:
    """The routes by which a demo reads the past, and makes the engine live."""

    def __init__(self, past: PastEngine, clock: Clock, origin: float) -> None:
        self._past = past
        self._origin = origin
        self._clock = clock
        self.live: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def add_to(self, app: web.Application) -> None:
        """Add the routes to an application."""
        app.router.add_get("/simulator/past", self._frames)
        app.router.add_get("/simulator/gpu", self._gpu)
        app.router.add_post("/simulator/live", self._live)

    async def _frames(self, request: web.Request) -> web.StreamResponse:
        """The frames up to now, a line of JSON each; with `last` those that end the past.

        With `since`, a Unix time, the engine starts then.
        """
        if "since" in request.query:
            self._past.start(float(request.query["since"]) - self._origin)
        response = web.StreamResponse(headers={"Content-Type": "application/jsonl"})
        await response.prepare(request)
        for frame in self._past.frames(self._clock.now_s()):
            await response.write(_line(frame))
        if "last" in request.query:
            await response.write(_line(self._past.end()))
        await response.write_eof()
        return response

    async def _gpu(self, request: web.Request) -> web.Response:
        return web.json_response(self._past.gpu(self._clock.now_s()))

    async def _live(self, request: web.Request) -> web.Response:
        """Run in real time from now on; the body is the URL of the proxy."""
        if not self.live.done():
            self.live.set_result(await request.text())
        return web.Response(status=204)


def _line(frame: Frame) -> bytes:
    return json.dumps(frame.plain()).encode() + b"\n"


async def run_with_past(
    scenario: Scenario,
    origin: float,
    *,
    announce: Callable[[str], None],
    host: str,
    port: int,
    spans: SpanTarget,
) -> None:
    """Serve an engine until cancelled, then flush its spans.

    Its scenario starts at `origin`, in Unix time.
    """
    clock = Clock(lead_s=time.time() - origin)
    past = PastEngine(scenario, spans.service_name or "", clock.unix_ns)
    sender = SpanSender(spans, clock.unix_ns)
    engine = Engine(past.batch, clock, [past.observe, sender.observe], past.faults)
    routes = PastRoutes(past, clock, origin)
    app = OpenAiRoutes(scenario, engine, past, past.faults).app()
    routes.add_to(app)
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=DRAIN_S
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(sender.close)
        stack.push_async_callback(runner.cleanup)
        announce(await listen(runner, host, port))
        proxy = await routes.live
        clients = Clients(proxy, scenario.model, clock)
        planned = planned_requests(scenario, lambda: f"chatcmpl-{uuid4().hex}", past.faults)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(engine.run())
            tasks.create_task(clients.send(planned))
