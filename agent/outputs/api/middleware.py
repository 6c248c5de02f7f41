"""ASGI middleware: who may come in, how many queries run at once, and how long one may take."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from agent.outputs.api.problems import overloaded, problem
from agent.settings.access import AccessPolicy, AccessRefusal

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
# They hold no figures: the page asks for a token before it queries any.
_OPEN_PATHS = frozenset(("/", "/docs", "/openapi.json", "/healthz", "/readyz"))
# Kubelets and load balancers send no token: below /engines/ are probes alone.
_OPEN_FOLDERS = ("/docs/", "/runbooks/", "/assets/", "/engines/")
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
)
_UNLESS_GIVEN = (
    # For responses that are not pages.
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    # A browser asks whether its copy is the newest: modules of two versions are no page.
    (b"cache-control", b"no-cache"),
)
_REFUSED: dict[AccessRefusal, tuple[int, dict[str, str]]] = {
    # Misdirected Request, RFC 9110, 15.5.20.
    AccessRefusal.HOST: (421, {}),
    AccessRefusal.TOKEN: (401, {"WWW-Authenticate": "Bearer"}),
}


class AccessGuard:
    """ASGI middleware around the whole API."""

    def __init__(self, app: Application, access: AccessPolicy) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI call."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = _with_headers(message.get("headers", ()))
            await send(message)

        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, guarded)
        else:
            status, headers = _REFUSED[refusal]
            response = problem(status, refusal.value, headers)
            await response(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> AccessRefusal | None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        path = scope["path"]
        if not self._access.allows_host(headers.get(b"host")):
            return AccessRefusal.HOST
        if path in _OPEN_PATHS or path.startswith(_OPEN_FOLDERS):
            return None
        return (
            None
            if self._access.is_authorized(headers.get(b"authorization"))
            else AccessRefusal.TOKEN
        )


def _with_headers(headers: Any) -> list[tuple[bytes, bytes]]:
    given = [(name.lower(), value) for name, value in headers]
    names = {name for name, _ in given}
    own = [pair for pair in _UNLESS_GIVEN if pair[0] not in names]
    return [*given, *_HEADERS, *own]


# More than twice as many as the framework has threads: the others wait for one.
MOST_QUERIES = 100
_TOO_MANY = f"{MOST_QUERIES} queries run already; ask again in a moment"
_TOO_LONG = "the database did not answer in time; ask again in a moment"


class QueryGate:
    """ASGI middleware: a query beyond the most, or without response in time, gets a 503.

    A thread cannot be stopped. A query that is too late counts as running until its thread ends.
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
    # asyncio logs an exception that is not retrieved.
    if not running.cancelled():
        running.exception()


class _FirstResponse:
    """Passes on a response unless its client was refused meanwhile."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False
        self.refused = False

    async def send(self, message: Message) -> None:
        if not self.refused:
            self.begun = True
            await self._send(message)
