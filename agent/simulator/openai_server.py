"""The simulated engine's HTTP server, and the coroutine that runs a whole simulator."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, suppress
from random import Random
from typing import Protocol
from uuid import uuid4

from aiohttp import web
from aiohttp.log import access_logger
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import ValidationError

from agent.errors import SettingsInvalid
from agent.simulator.batching import Batch, EngineRequest, Token
from agent.simulator.completions import (
    VERSION,
    Body,
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    RefusalError,
    TextCompletion,
    TextRequest,
    model_card,
    parsed,
)
from agent.simulator.scenario import Fault, Faults, Scenario
from agent.simulator.simulated_engine import Clock, Engine, EngineDiedError
from agent.simulator.simulated_metrics import MetricsPage
from agent.simulator.span_sender import TRACE_HEADERS, SpanSender, SpanTarget
from agent.simulator.traffic import EvenShare, cached_tokens, planned_requests

# How long a stop waits for open streams; the engine has stopped by then.
DRAIN_S = 0.1
_MAX_BODY_BYTES = 64 * 1024 * 1024
# Routes of the simulation, which answer while the engine is dead.
_CONTROLS = "/simulator/"
# As uvicorn writes it for vLLM.
_ACCESS_LINE = 'INFO:     %a - "%r" %s'
_FAILED: Body = {
    "error": {
        "message": "The server had an error while processing your request.",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }
}


def _new_id() -> str:
    """A random id in the form of vLLM's: 32 hexadecimal digits."""
    return uuid4().hex


class ServedMetrics(Protocol):
    """What `/metrics` serves."""

    def render(self) -> bytes:
        """The exposition now."""


class OpenAiRoutes:
    """The routes of one simulated engine. Output lengths are drawn from the scenario."""

    def __init__(
        self, scenario: Scenario, engine: Engine, page: ServedMetrics, faults: Faults
    ) -> None:
        self._faults = faults
        self._scenario = scenario
        self._engine = engine
        self._page = page
        self._random = Random(f"{scenario.seed}: answers")
        # Separate, so that a fault does not change the output lengths.
        self._luck = Random(f"{scenario.seed}: faulty answers")
        self._deferring = EvenShare()
        self._started_unix_s = int(time.time())

    def app(self) -> web.Application:
        """The routes as an application."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[self._while_alive])
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/v1/models", self._models)
        app.router.add_put("/simulator/fault", self._fault)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat_completions)
        return app

    @web.middleware
    async def _while_alive(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Break the connections of a dead engine, as when its process ends."""
        if not self._engine.is_dead or request.path.startswith(_CONTROLS):
            with suppress(EngineDiedError):
                return await handler(request)
        if request.transport is not None:
            request.transport.abort()
        return web.Response()

    async def _metrics(self, request: web.Request) -> web.Response:
        headers = {"Content-Type": CONTENT_TYPE_LATEST}
        return web.Response(body=self._page.render(), headers=headers)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": VERSION})

    async def _models(self, request: web.Request) -> web.Response:
        card = model_card(self._scenario.model, self._scenario.max_model_len, self._started_unix_s)
        return web.json_response({"object": "list", "data": [card]})

    async def _fault(self, request: web.Request) -> web.Response:
        """Set a fault in the format of a scenario, without its times."""
        try:
            self._faults.set(Fault.model_validate_json(await request.read()))
        except ValidationError as error:
            return web.json_response({"error": str(error)}, status=400)
        return web.Response(status=204)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._respond(request, TextRequest, TextCompletion)

    async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
        return await self._respond(request, ChatRequest, ChatCompletion)

    async def _respond(
        self,
        request: web.Request,
        request_type: type[CompletionRequest],
        response_type: type[Completion],
    ) -> web.StreamResponse:
        try:
            body = parsed(request_type, await request.read(), self._scenario)
        except RefusalError as refusal:
            return web.json_response(refusal.body, status=refusal.status)
        if self._luck.random() < self._faults.at(self._engine.now_s()).error_ratio:
            self._engine.fail()
            return web.json_response(_FAILED, status=500)
        completion = self._completion(body, response_type, request.headers.get("X-Request-Id"))
        engine_request = self._engine_request(body, completion, request)
        # An early end of this block, such as by a client that leaves, aborts the request.
        async with aclosing(self._engine.generate(engine_request)) as tokens:
            if body.stream:
                return await _streamed(request, completion, tokens)
            return await _whole(completion, tokens)

    def _completion(
        self, body: CompletionRequest, kind: type[Completion], given_id: str | None
    ) -> Completion:
        options = body.stream_options
        include_usage = bool(options and options.include_usage)
        return kind(
            id=kind.id_prefix + (_new_id() if given_id is None else given_id),
            created=int(time.time()),
            model=self._scenario.model,
            prompt_tokens=body.prompt_tokens(),
            include_usage=include_usage,
            continuous_usage=include_usage and bool(options and options.continuous_usage_stats),
            alternatives=body.alternatives(),
        )

    def _engine_request(
        self, body: CompletionRequest, completion: Completion, request: web.Request
    ) -> EngineRequest:
        room = self._scenario.max_model_len - completion.prompt_tokens
        max_tokens = min(body.token_limit() or room, room)
        stops_after = self._scenario.output_tokens.draw(self._random)
        headers = {name: request.headers[name] for name in TRACE_HEADERS if name in request.headers}
        fault = self._faults.at(self._engine.now_s())
        return EngineRequest(
            request_id=completion.engine_id,
            arrived_s=self._engine.now_s(),
            prompt_tokens=completion.prompt_tokens,
            output_tokens=max_tokens if body.ignore_eos else min(stops_after, max_tokens),
            max_tokens=max_tokens,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            trace_headers=headers,
            cached_tokens=cached_tokens(self._scenario, fault, completion.prompt_tokens),
            front_s=fault.front_s,
            deferred_s=fault.defer_s if self._deferring.strikes(fault.defer_ratio) else 0.0,
        )


async def _streamed(
    request: web.Request, completion: Completion, tokens: AsyncIterator[Token]
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    async for token in tokens:
        await response.write(b"".join(_event(chunk) for chunk in completion.chunks(token)))
    await response.write(b"data: [DONE]\n\n")
    return response


async def _whole(completion: Completion, tokens: AsyncIterator[Token]) -> web.Response:
    async for token in tokens:
        last = token
    return web.json_response(completion.whole(last))


def _event(chunk: Body) -> bytes:
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


async def run_simulator(
    scenario: Scenario,
    *,
    announce: Callable[[str], None],
    host: str = "127.0.0.1",
    port: int = 8000,
    traffic: bool = True,
    spans: SpanTarget | None = None,
    access_log: bool = False,
) -> None:
    """Serve a simulated engine until cancelled, then flush its spans.

    `announce` gets the server's URL once it listens; port 0 takes a free port. With `traffic` the
    scenario's own requests run besides those of HTTP clients. Raises SettingsInvalid if the port
    is not free.
    """
    scenario = scenario.in_real_time()
    clock = Clock()
    page = MetricsPage(scenario)
    sender = None if spans is None else SpanSender(spans, clock.unix_ns)
    faults = Faults(scenario.faults)
    batch = Batch(scenario, planned_requests(scenario, _chat_id, faults) if traffic else (), faults)
    observers = [page.observe] if sender is None else [page.observe, sender.observe]
    engine = Engine(batch, clock, observers, faults)
    runner = web.AppRunner(
        OpenAiRoutes(scenario, engine, page, faults).app(),
        handler_cancellation=True,
        access_log=access_logger if access_log else None,
        access_log_format=_ACCESS_LINE,
        shutdown_timeout=DRAIN_S,
    )
    async with AsyncExitStack() as stack:
        if sender is not None:
            stack.push_async_callback(sender.close)
        stack.push_async_callback(runner.cleanup)
        announce(await listen(runner, host, port))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(engine.run())
            tasks.create_task(engine.die_and_return(page.restart))


def _chat_id() -> str:
    return ChatCompletion.id_prefix + _new_id()


async def listen(runner: web.AppRunner, host: str, port: int) -> str:
    """Listen, and return the URL. Raises SettingsInvalid if the port is not free."""
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        problem = f"port {port} of {host} cannot be listened on: {error.strerror or error}"
        raise SettingsInvalid([f"{problem}; choose another --port, or 0 for a free one"]) from error
    return f"http://{host}:{runner.addresses[0][1]}"
