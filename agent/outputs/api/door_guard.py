"""Lets in who may come in, and adds the headers by which browsers restrict a page."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi.responses import JSONResponse

from agent.settings.access import Door, DoorRefusal

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

# They hold no figures: the page asks for a token before it queries any.
_OPEN_PATHS = frozenset(("/", "/docs", "/openapi.json", "/healthz", "/readyz"))
_OPEN_FOLDERS = ("/runbooks/", "/assets/")

_POLICY = b"content-security-policy"
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
)
# For responses that are no page.
_NOTHING = b"default-src 'none'; frame-ancestors 'none'"

_REFUSED: dict[DoorRefusal, tuple[int, dict[str, str]]] = {
    # Misdirected Request, RFC 9110, 15.5.20.
    DoorRefusal.HOST: (421, {}),
    DoorRefusal.TOKEN: (401, {"WWW-Authenticate": "Bearer"}),
}


class DoorGuard:
    """ASGI middleware around the whole API."""

    def __init__(self, app: Application, door: Door) -> None:
        self._app = app
        self._door = door

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
            response = JSONResponse({"detail": refusal.value}, status, headers)
            await response(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> DoorRefusal | None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        path = scope["path"]
        if not self._door.is_known(headers.get(b"host")):
            return DoorRefusal.HOST
        if path in _OPEN_PATHS or path.startswith(_OPEN_FOLDERS):
            return None
        return None if self._door.lets_in(headers.get(b"authorization")) else DoorRefusal.TOKEN


def _with_headers(headers: Any) -> list[tuple[bytes, bytes]]:
    given = [(name.lower(), value) for name, value in headers]
    own = [] if any(name == _POLICY for name, _ in given) else [(_POLICY, _NOTHING)]
    return [*given, *_HEADERS, *own]
