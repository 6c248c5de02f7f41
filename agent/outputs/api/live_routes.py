"""The API route `/live`: the newest figures, again and again, for pages that stay open."""

import asyncio
from collections.abc import AsyncIterator, Callable

from fastapi import APIRouter, Request
from fastapi.sse import EventSourceResponse, ServerSentEvent

from agent.errors import StoreUnavailable
from agent.outputs.api import responses
from agent.outputs.api.agent_routes import AgentResponse
from agent.outputs.api.base_response import BaseResponse
from agent.outputs.api.objective_routes import ObjectiveResponse
from agent.settings.access import Door

EVERY_S = 2.0
# Each has a connection, and a place among the queries that may run at once.
MOST_VIEWERS = 50


class LiveResponse(BaseResponse):
    """What a page shows of now."""

    summary: responses.SummaryResponse
    objectives: list[ObjectiveResponse]
    engines: list[responses.EngineResponse]
    gpus: list[responses.GpuResponse]
    agents: list[AgentResponse]


class LiveFigures:
    """The newest figures as JSON, read once in a while for all viewers together.

    They are read in a thread, and only while there is a viewer. `stop` ends every stream.
    """

    def __init__(self, read: Callable[[], LiveResponse]) -> None:
        self._read = read
        self._reading = asyncio.Lock()
        self._stopped = asyncio.Event()
        self._read_at = float("-inf")
        self._newest = ServerSentEvent()
        self._viewers = 0

    def stop(self) -> None:
        """End every stream, and those to come at once."""
        self._stopped.set()

    async def stream(self, may_read: Callable[[], bool]) -> AsyncIterator[ServerSentEvent]:
        """Figures until the viewer leaves or may no longer read.

        A viewer beyond the limit gets an error.
        """
        if self._viewers >= MOST_VIEWERS:
            yield _problem(f"{MOST_VIEWERS} pages are open already; this one is not live")
            return
        self._viewers += 1
        try:
            while not self._stopped.is_set() and may_read():
                yield await self._event()
                await self._pause()
        finally:
            self._viewers -= 1

    async def _event(self) -> ServerSentEvent:
        async with self._reading:
            now = asyncio.get_running_loop().time()
            if now - self._read_at >= EVERY_S / 2:
                self._newest = await asyncio.to_thread(self._read_event)
                self._read_at = now
            return self._newest

    def _read_event(self) -> ServerSentEvent:
        try:
            return ServerSentEvent(event="figures", raw_data=self._read().model_dump_json())
        except StoreUnavailable as error:
            return _problem(error.public)

    async def _pause(self) -> None:
        waiting = asyncio.create_task(self._stopped.wait())
        await asyncio.wait({waiting}, timeout=EVERY_S)
        waiting.cancel()


def _problem(sentence: str) -> ServerSentEvent:
    return ServerSentEvent(event="problem", data=sentence)


def live_routes(live: LiveFigures, door: Door) -> APIRouter:
    """The route of the live figures."""
    router = APIRouter(tags=["figures"])

    # OpenAPI cannot say what the data of the events is.
    @router.get("/live", response_class=EventSourceResponse, include_in_schema=False)
    async def figures(request: Request) -> AsyncIterator[ServerSentEvent]:
        """Server-sent events: `figures` every two seconds, or a `problem` in one sentence."""
        token = request.headers.get("authorization")
        # The door was passed once, and the token may be removed from its file since.
        async for event in live.stream(lambda: door.lets_in(token)):
            yield event

    return router
