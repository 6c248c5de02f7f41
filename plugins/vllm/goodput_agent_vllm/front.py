"""vLLM's front: its open requests, what it reports of each that ended, and its other routes."""

import logging
import math
import os
import time
from asyncio import AbstractEventLoop, get_running_loop
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from goodput_agent_vllm.core import (
    PROTOCOLS,
    Arrival,
    Ending,
    MeasuredExchange,
    MeasuringOptions,
    RequestMeasuring,
    RequestRecord,
    Status,
    TokenUsage,
    record_bytes,
)
from goodput_agent_vllm.datagrams import count_record, open_record, served_record
from goodput_agent_vllm.deferred import DeferredWork
from goodput_agent_vllm.held_figures import WAIT_S, Figures, HeldFigures, Key, Waiting, key_of
from goodput_agent_vllm.middleware import App, Message, Receive, Scope, Send
from goodput_agent_vllm.open_requests import NO_SLOT, OpenRequests, Slot
from goodput_agent_vllm.reporting import MAX_ERRORS, Reporter, shared_reporter
from goodput_agent_vllm.watched_request import (
    ENGINE_REQUEST,
    WATCHED,
    ShortWaits,
    Trace,
    WatchedRequest,
    path_of,
)

_LOG = logging.getLogger("vllm.goodput_agent")

# Headers that say whom a request is for, as the settings of the agent's proxy name them.
HEADER_VARIABLES = {
    "tenant_header": "GOODPUT_AGENT_TENANT_HEADER",
    "user_header": "GOODPUT_AGENT_USER_HEADER",
    "workload_header": "GOODPUT_AGENT_WORKLOAD_HEADER",
    "session_header": "GOODPUT_AGENT_SESSION_HEADER",
}

# After these the process may end soon.
_URGENT = frozenset((Status.ERROR, Status.TIMEOUT, Status.CANCELLED))

# The status of a response that vLLM computes in the background: the request goes on without its
# client, so the engine's figures alone are its row.
_IN_BACKGROUND = "queued"

# What a row says whose front died before the request ended.
_FRONT_DIED = "front_died"
_OTHER_ROUTE = "other"
# Mounted applications have no route.
_MOUNTED = frozenset(("/metrics", "/docs", "/redoc", "/openapi.json"))
# A scanner's methods and paths make no routes of their own, so there are not many.
_MAX_ROUTES = 256
_COUNTS_EVERY_S = 1.0

Serve = Callable[[App], Awaitable[None]]


class Front:
    """Watches the requests of this process. For the thread of its event loop."""

    def __init__(self, reporter: Reporter) -> None:
        self.short_waits = ShortWaits()
        self.deferred = DeferredWork()
        self._reporter = reporter
        self._errors = 0
        self._held = HeldFigures()
        self._open: set[WatchedRequest] = set()
        self._open_requests: OpenRequests | None = None
        self._planned = False
        # Responses by route and class of status, and failures of measuring by reason, which have
        # no class, since they were sent; and all of these that there were.
        self._counts: dict[tuple[str, int], int] = {}
        self._known: set[tuple[str, int]] = set()
        headers: dict[str, Any] = {
            option: os.environ.get(name) or None for option, name in HEADER_VARIABLES.items()
        }
        options = MeasuringOptions(count_tokens=False, return_request_id=False, **headers)
        self._measuring = RequestMeasuring("", None, None, self._count_failure, options)
        reporter.take_figures = self._take_figures

    def serving(self, scope: Scope, receive: Receive, send: Send) -> Serve | None:
        """How to serve a call; None where the application serves it as if this was not there."""
        if scope["type"] == "lifespan":
            return partial(_serve, scope, receive, self._until_shutdown(send))
        if scope["type"] != "http" or self._errors >= MAX_ERRORS or WATCHED in scope:
            return None
        if scope["method"] == "POST" and path_of(scope) in PROTOCOLS:
            watched = WatchedRequest(self, scope, receive, send)
            self._open.add(watched)
            return watched.run
        scope[WATCHED] = True
        return partial(_serve, scope, receive, self._counted(scope, send))

    def failed(self) -> None:
        """Count an error of the measuring itself; after too many, nothing is measured."""
        self._errors += 1
        if self._errors <= MAX_ERRORS:
            _LOG.exception("goodput-agent-vllm: a request could not be measured")
        if self._errors == MAX_ERRORS:
            _LOG.error("goodput-agent-vllm: %d errors; requests are measured no more", MAX_ERRORS)
            # The agent gets the figures as if there was no middleware.
            self._reporter.take_figures = None

    def begin(self, arrival: Arrival, trace: Trace) -> MeasuredExchange:
        """Begin to measure a request."""
        return self._measuring.begin(arrival, trace)

    def opened(self, exchange: MeasuredExchange, trace: Trace, at: float, at_s: float) -> Slot:
        """Keep an open request where it outlives this process; NO_SLOT where that cannot be."""
        path = self._reporter.path
        if self._open_requests is None and path is not None:
            self._open_requests = OpenRequests.beside(path)
        if self._open_requests is None:
            return NO_SLOT
        sent = record_bytes(exchange.open_record(_FRONT_DIED))
        return (
            self._open_requests.open(open_record(sent, proxied=trace.proxied), at, at_s) or NO_SLOT
        )

    def forget(self, request: WatchedRequest) -> None:
        """The request is open no more, whether it could be measured or not."""
        self._open.discard(request)

    def ended(
        self, request: WatchedRequest, exchange: MeasuredExchange, ending: Ending, at_s: float
    ) -> None:
        """Report a request that ended, as soon as the engine's figures of it have come."""
        engine_id, usage = _engine_request(request.scope)
        if usage is not None:
            exchange.counted(usage)
        exchange.identified(engine_id)
        record = exchange.record(ending, at_s)
        if record.finish_reason == _IN_BACKGROUND:
            self._count(path_of(request.scope), 2)
            return
        served = partial(self._send, record, proxied=request.trace.proxied)
        # The engine got no request that was refused.
        if engine_id is None or 400 <= (record.http_status or 0) < 500:
            served([])
        else:
            self._join(_key_of(request.scope, engine_id), record, served, ending)
        if record.status in _URGENT:
            self._reporter.flush()

    def _join(
        self, key: Key, record: RequestRecord, served: Callable[[Figures], None], ending: Ending
    ) -> None:
        proxied = record.proxied
        choices = (proxied and proxied.choices) or 1
        waiting = Waiting(key, choices, record.started_at, record.ended_at, served)
        self._held.take(waiting)
        # The figures of a client that left follow. After an error this process may end soon.
        failed = ending is not Ending.CLIENT_GONE and proxied is not None and proxied.error
        if waiting.is_complete or failed:
            served(waiting.figures)
        else:
            self._held.wait(waiting, time.monotonic())
            self._plan()

    def _send(self, record: RequestRecord, figures: Figures, *, proxied: bool) -> None:
        self._reporter.add(served_record(record_bytes(record), figures, proxied=proxied))

    def _take_figures(self, engine_id: str, figures: bytes) -> None:
        """Keep the engine's figures of a request that ended, for its HTTP request."""
        try:
            complete = self._held.hold(engine_id, figures, time.monotonic())
            if complete is not None:
                complete.served(complete.figures)
            elif self._held.is_full:
                self.check()
            else:
                self._plan()
        except Exception:
            self.failed()

    def check(self) -> None:
        """Send what has waited for long enough, and plan the next look at the rest."""
        self._send_held(time.monotonic())
        counts, self._counts = self._counts, {}
        for (name, status_class), count in counts.items():
            self._reporter.add(count_record(name, status_class, count))
        self._plan()

    def _send_held(self, now_s: float) -> None:
        for waiting in self._held.due(now_s):
            try:
                waiting.served(waiting.figures)
            except Exception:
                # The others are sent all the same.
                self.failed()
        for figures in self._held.overdue(now_s, self._open_keys):
            self._reporter.add(figures)

    def _plan(self) -> None:
        if not self._planned and self._held.waits:
            self._plan_in(WAIT_S, get_running_loop())

    def _plan_in(self, delay_s: float, loop: AbstractEventLoop) -> None:
        self._planned = True
        loop.call_later(delay_s, self._check_again)

    def _check_again(self) -> None:
        self._planned = False
        try:
            self.check()
        except Exception:
            self.failed()

    def _open_keys(self) -> set[Key]:
        scopes = [(each.scope, _engine_request(each.scope)[0]) for each in self._open]
        return {_key_of(scope, found) for scope, found in scopes if found is not None}

    # Counts

    def _count_failure(self, reason: str) -> None:
        self._count(str(reason), 0)

    def _counted(self, scope: Scope, send: Send) -> Send:
        """A `send` that also counts the status of the response."""

        def counting(message: Message) -> Awaitable[None]:
            try:
                if message["type"] == "http.response.start":
                    self._count_response(scope, message["status"])
            except Exception:
                self.failed()
            return send(message)

        return counting

    def _count_response(self, scope: Scope, status: int) -> None:
        route = getattr(scope.get("route"), "path", None)
        if route is None:
            path = path_of(scope)
            route = path if path in _MOUNTED else _OTHER_ROUTE
        self._count(route, status // 100)

    def _count(self, name: str, status_class: int) -> None:
        place = (name, status_class)
        if place not in self._known and len(self._known) >= _MAX_ROUTES:
            place = (_OTHER_ROUTE, status_class)
        self._known.add(place)
        self._counts[place] = self._counts.get(place, 0) + 1
        if not self._planned:
            self._plan_in(_COUNTS_EVERY_S, get_running_loop())

    # The end

    def _until_shutdown(self, send: Send) -> Send:
        def sending(message: Message) -> Awaitable[None]:
            if message["type"] == "lifespan.shutdown.complete":
                self.close()
            return send(message)

        return sending

    def close(self) -> None:
        """Send everything, at the end of the process."""
        try:
            self.deferred.finish()
            self.check()
            self._send_held(math.inf)
            self._reporter.flush()
            if self._open_requests is not None and not self._open:
                self._open_requests.close()
        except Exception:
            self.failed()


def _serve(scope: Scope, receive: Receive, send: Send, app: App) -> Awaitable[None]:
    return app(scope, receive, send)


def _engine_request(scope: Scope) -> tuple[str | None, TokenUsage | None]:
    """The engine's id of a request, and the counts that its client did not ask for."""
    noted = scope[ENGINE_REQUEST]
    if noted is not None:
        return noted.request_id, noted.usage
    # vLLM keeps them by itself.
    metadata = scope.get("state", {}).get("request_metadata")
    usage = getattr(metadata, "final_usage_info", None)
    return getattr(metadata, "request_id", None), usage and _counts_in(usage)


def _key_of(scope: Scope, engine_id: str) -> Key:
    # Hooks give the figures of all choices by the id that they noted.
    return key_of(engine_id, path_of(scope) if scope[ENGINE_REQUEST] is None else None)


def _counts_in(usage: Any) -> TokenUsage:
    of_input = getattr(usage, "prompt_tokens_details", None)
    of_output = getattr(usage, "completion_tokens_details", None)
    return TokenUsage(
        input_tokens=getattr(usage, "prompt_tokens", None),
        cached_tokens=getattr(of_input, "cached_tokens", None),
        output_tokens=getattr(usage, "completion_tokens", None),
        reasoning_tokens=getattr(of_output, "reasoning_tokens", None),
    )


_front: Front | None = None


def shared_front() -> Front:
    """The front of this process."""
    global _front
    if _front is None:
        _front = Front(shared_reporter())
    return _front
