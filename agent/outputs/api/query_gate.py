"""Limits the number of queries at once, and the time that a client waits for one."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from agent.outputs.api.refusals import overloaded

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

# More than twice as many as the framework has threads: the others wait for one.
MOST_QUERIES = 100

_TOO_MANY = f"{MOST_QUERIES} queries run already; ask again in a moment"
_TOO_LONG = "the database did not answer in time; ask again in a moment"


class QueryGate:
    """ASGI middleware: a query beyond the most, or without response in time, gets a 503.

    A thread cannot be stopped. A query that is too late keeps its place until its thread ends.
    """

    def __init__(self, app: Application, *, within_s: float, most: int = MOST_QUERIES) -> None:
        self._app = app
        self._within_s = within_s
        self._most = most
        self._running: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI call."""
        if scope["type"] != "http" or not scope["path"].startswith("/api/"):
            await self._app(scope, receive, send)
        elif len(self._running) >= self._most:
            await overloaded(_TOO_MANY)(scope, receive, send)
        else:
            await self._query(scope, receive, send)

    async def _query(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = _FirstResponse(send)
        running = asyncio.create_task(_run(self._app(scope, receive, response.send)))
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        await asyncio.wait({running}, timeout=self._within_s)
        if running.done() or response.begun:
            await running
        else:
            response.refused = True
            running.add_done_callback(_forget)
            await overloaded(_TOO_LONG)(scope, receive, send)


async def _run(call: Awaitable[None]) -> None:
    await call


def _forget(running: "asyncio.Task[None]") -> None:
    # asyncio logs an exception that nobody retrieves.
    if not running.cancelled():
        running.exception()


class _FirstResponse:
    """Passes on a response unless its client was refused meanwhile."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False
        self.refused = False

    async def send(self, message: Message) -> None:
        """Pass on one message of the response."""
        if not self.refused:
            self.begun = True
            await self._send(message)
