"""The plugin for SGLang: adds the middleware, and hooks for the engine's figures of each request.

SGLang calls `install` by the entry point `sglang.srt.plugins` before it makes its server, and again
in each child process. Nothing of vLLM is imported.
"""

import asyncio
import logging
import math
import multiprocessing
import os
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from goodput_agent_vllm.core import TokenUsage
from goodput_agent_vllm.datagrams import UNKNOWN, RequestFigures, request_record
from goodput_agent_vllm.middleware import App, GoodputMiddleware, Receive, Scope, Send
from goodput_agent_vllm.reporting import shared_reporter
from goodput_agent_vllm.watched_request import ENGINE_REQUEST

_LOG = logging.getLogger(__name__)

# With `off`, requests are not measured: then there is nothing to report.
_MIDDLEWARE_VARIABLE = "GOODPUT_AGENT_MIDDLEWARE"
# With `off`, no method of SGLang is wrapped: rows have the user's view alone.
_HOOKS_VARIABLE = "GOODPUT_AGENT_HOOKS"
# With several tokenizer processes, each imports the application by this name.
_APP_PATH_VARIABLE = "SGLANG_HTTP_SERVER_APP_PATH"
_APP_PATH = "goodput_agent_vllm.sglang_worker:app"
_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
# The attribute of SGLang's state of a choice for its SglangRequest.
_NOTED = "goodput_agent_request"
# SGLang has nothing that calls a plugin while it is idle.
_HELLO_EVERY_S = 10.0

# The scope of the measured request whose task this is: SGLang makes the states of its choices in
# it, and gives most of them no scope.
_scope: ContextVar[Scope | None] = ContextVar("goodput_agent_scope", default=None)


def install() -> None:
    """Prepare the process that serves HTTP."""
    if multiprocessing.parent_process() is not None:
        return
    if _is_off(_MIDDLEWARE_VARIABLE):
        return
    from sglang.srt.entrypoints.http_server import app  # type: ignore[import-not-found]

    os.environ.setdefault(_APP_PATH_VARIABLE, _APP_PATH)
    watch(app)


def _is_off(variable: str) -> bool:
    return os.environ.get(variable) == "off"


def watch(app: Any) -> None:
    """Put the middleware around SGLang's application, outside of the check of the key, and register
    the hooks, which SGLang applies."""
    build = app.build_middleware_stack
    app.build_middleware_stack = lambda: _watched(build())
    if _is_off(_HOOKS_VARIABLE):
        return
    from sglang.srt.plugins.hook_registry import (  # type: ignore[import-not-found]
        HookRegistry,
        HookType,
    )

    HookRegistry.register(f"{_MANAGER}._init_req_state", _note_states, HookType.AFTER)
    HookRegistry.register(f"{_MANAGER}._handle_batch_output", _report_ended, HookType.AROUND)


def _watched(app: App) -> App:
    def keep_scope(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if ENGINE_REQUEST in scope:
            _scope.set(scope)
        return app(scope, receive, send)

    middleware = GoodputMiddleware(keep_scope)

    def serve(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "lifespan":
            _say_hello()
        elif _is_starting():
            # SGLang's own requests, before it is ready.
            return app(scope, receive, send)
        return middleware(scope, receive, send)

    return serve


def _say_hello() -> None:
    shared_reporter().hello()
    asyncio.get_running_loop().call_later(_HELLO_EVERY_S, _say_hello)


_has_started = False


def _is_starting() -> bool:
    global _has_started
    if not _has_started:
        try:
            from sglang.srt.entrypoints.http_server import get_global_state
            from sglang.srt.managers.tokenizer_manager import ServerStatus  # type: ignore[import-not-found]

            status = get_global_state().tokenizer_manager.server_status
            _has_started = status is not ServerStatus.Starting
        except Exception:
            shared_reporter().failed()
            _has_started = True
    return not _has_started


@dataclass(slots=True, eq=False)
class SglangRequest:
    """An HTTP request by what SGLang knows of its choices; there are `samples` of each prompt."""

    request_id: str
    choices: int
    samples: int
    ended: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def add(self, batch: Any, place: int) -> None:
        """Add a choice that ended."""
        self.ended += 1
        self.input_tokens += batch.prompt_tokens[place]
        self.cached_tokens += batch.cached_tokens[place]
        self.output_tokens += batch.completion_tokens[place]
        self.reasoning_tokens += batch.reasoning_tokens[place]

    @property
    def usage(self) -> TokenUsage | None:
        """The counts as SGLang reports them to a client that asks; None before the end."""
        if self.ended < self.choices:
            return None
        return TokenUsage(
            input_tokens=self.input_tokens // self.samples,
            # Of several choices, all but the first find the prompt in the cache.
            cached_tokens=self.cached_tokens if self.choices == 1 else None,
            output_tokens=self.output_tokens,
            reasoning_tokens=self.reasoning_tokens,
        )


def _note_states(returned: None, manager: Any, requested: Any, *_: Any, **__: Any) -> None:
    """Note in the states of choices to which HTTP request they belong.

    Several samples are first requested together, and then each by itself with another id.
    """
    scope = _scope.get()
    if scope is None:
        return
    try:
        ids = requested.rid if isinstance(requested.rid, list) else [requested.rid]
        if scope[ENGINE_REQUEST] is None:
            samples = getattr(requested, "parallel_sample_num", None) or 1
            scope[ENGINE_REQUEST] = SglangRequest(ids[0], len(ids), samples)
        for each in ids:
            setattr(manager.rid_to_state[each], _NOTED, scope[ENGINE_REQUEST])
    except Exception:
        shared_reporter().failed()


async def _report_ended(original: Callable[..., Awaitable[None]], manager: Any, batch: Any) -> None:
    """Report the choices that ended with this output of the engine.

    They are counted first: their responses may end while SGLang handles the output.
    """
    ended: list[tuple[int, Any, SglangRequest]] = []
    try:
        ended = _ended_in(manager, batch)
    except Exception:
        shared_reporter().failed()
    await original(manager, batch)
    for place, state, request in ended:
        try:
            _report(request, request_record(_figures(batch, place, state.time_stats)))
        except Exception:
            shared_reporter().failed()


def _ended_in(manager: Any, batch: Any) -> list[tuple[int, Any, SglangRequest]]:
    found = []
    for place, reason in enumerate(batch.finished_reasons):
        if reason is None:
            continue
        state = manager.rid_to_state.get(batch.rids[place])
        request = getattr(state, _NOTED, None)
        if request is None or _is_no_choice(reason, batch.completion_tokens[place]):
            continue
        request.add(batch, place)
        if request.ended <= request.choices:
            found.append((place, state, request))
    return found


def _is_no_choice(reason: Any, output_tokens: int) -> bool:
    """Whether this is no choice of a response: SGLang computes the prompt of several samples by a
    request without output, and aborts a request that it refuses, with a status."""
    computes_prompt = reason["type"] == "length" and output_tokens == 0
    return computes_prompt or reason.get("status_code") is not None


def _report(request: SglangRequest, figures: bytes) -> None:
    reporter = shared_reporter()
    if reporter.take_figures is None:
        # The front measures no more.
        reporter.add(figures)
    else:
        reporter.take_figures(request.request_id, figures)


def _figures(batch: Any, place: int, front: Any) -> RequestFigures:
    """The engine's figures of a choice; `front` has the times of its front.

    Without SGLang's metrics its scheduler sends no times: they are 0.
    """
    tokens = batch.completion_tokens[place]
    scheduler = None if batch.time_stats is None else batch.time_stats[place]
    queued_s = getattr(scheduler, "wait_queue_entry_time", 0.0)
    begun_s = getattr(scheduler, "forward_entry_time", 0.0)
    prefilled_s = getattr(scheduler, "prefill_finished_time", 0.0)
    # The tokens of a response in one piece come at once.
    streamed = tokens == 1 or 0.0 < front.first_token_time < front.finished_time
    first_s = front.first_token_time if tokens and streamed else 0.0
    return RequestFigures(
        ended_at=time.time(),
        input_tokens=batch.prompt_tokens[place],
        output_tokens=tokens,
        cached_tokens=batch.cached_tokens[place],
        preemptions=batch.retraction_counts[place],
        queue_s=_between(queued_s, begun_s),
        prefill_s=_between(begun_s, prefilled_s),
        decode_s=_between(first_s, front.finished_time),
        e2e_s=_between(front.created_time, front.finished_time),
        ttft_s=_between(front.created_time, first_s),
        finish_reason=batch.finished_reasons[place]["type"],
        request_id=batch.rids[place],
    )


def _between(start_s: float, end_s: float) -> float:
    """Seconds between two events; UNKNOWN if one of them did not happen."""
    return end_s - start_s if start_s and end_s and math.isfinite(end_s - start_s) else UNKNOWN
