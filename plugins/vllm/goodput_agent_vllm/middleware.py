"""An ASGI middleware that measures each request inside vLLM's front, as its client sees it.

`vllm serve --middleware goodput_agent_vllm.middleware.GoodputMiddleware`; the stat logger adds it
without that. It is a class, because vLLM wraps a function in a way that hides disconnects.

vLLM does not start if this import fails, so all that may fail is imported when the class is made.
"""

import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

_LOG = logging.getLogger("vllm.goodput_agent")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class GoodputMiddleware:
    """Passes every call on unchanged, and reports requests. It never raises an error of its own."""

    def __init__(self, app: App) -> None:
        self.app = app
        self._front: Any = None
        try:
            from goodput_agent_vllm.front import shared_front

            self._front = shared_front()
        except Exception:
            _LOG.exception("goodput-agent-vllm cannot measure requests in this vLLM")

    # Not a coroutine function: what is not measured costs no frame of its own.
    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        front = self._front
        if front is None:
            return self.app(scope, receive, send)
        try:
            serve = front.serving(scope, receive, send)
        except Exception:
            front.failed()
            serve = None
        if serve is None:
            return self.app(scope, receive, send)
        served: Awaitable[None] = serve(self.app)
        return served
