"""Wraps two methods of vLLM for figures that its interface of stat loggers lacks: requests whose
clients left, and the time to the first token of a request.

No wrapper changes the arguments, the work or the result of its method. A method with other
parameters than in the tested versions is not wrapped, and its figures are unknown.
"""

import functools
import inspect
from collections.abc import Iterator
from typing import Any

from goodput_agent_vllm.reporting import Reporter

_ABORT = ("self", "request_ids", "internal")
_FINISHED = (
    "self", "finish_reason", "request_id", "num_prompt_tokens", "max_tokens_param", "req_stats",
    "num_cached_tokens",
)  # fmt: skip
_MIDDLEWARE = ("args", "app", "supported_tasks")
_MARK = "goodput_agent_wraps"


def watch_aborts(processor: type, reporter: Reporter) -> bool:
    """Report every request that `OutputProcessor.abort_requests` drops: no `IterationStats` has it.

    Returns False where the method is unknown.
    """
    original: Any = getattr(processor, "abort_requests", None)
    if not _has_parameters(original, _ABORT):
        return False

    @functools.wraps(original)
    def abort_requests(self: Any, request_ids: Any, internal: bool) -> Any:
        request_ids, dropped = _looked_up(self, request_ids, internal, reporter)
        returned = original(self, request_ids, internal)
        for state in dropped:
            reporter.aborted(state)
        return returned

    setattr(abort_requests, _MARK, True)
    processor.abort_requests = abort_requests  # type: ignore[attr-defined]
    return True


def watch_first_tokens(statistics: type, reporter: Reporter) -> bool:
    """Add `goodput_ttft_s` to each `FinishedRequestStats`; returns False for an unknown method."""
    original: Any = getattr(statistics, "update_from_finished_request", None)
    if not _has_parameters(original, _FINISHED):
        return False

    @functools.wraps(original)
    def update_from_finished_request(self: Any, *args: Any, **kwargs: Any) -> Any:
        returned = original(self, *args, **kwargs)
        try:
            latency_s = kwargs["req_stats"].first_token_latency
            self.finished_requests[-1].goodput_ttft_s = latency_s
        except Exception:
            reporter.failed()
        return returned

    setattr(update_from_finished_request, _MARK, True)
    statistics.update_from_finished_request = (  # type: ignore[attr-defined]
        update_from_finished_request
    )
    return True


def add_middleware(launcher: Any, middleware: type, reporter: Reporter) -> bool:
    """Add a middleware outside of all others when vLLM makes its application.

    `launcher` is vLLM's module that makes it. Returns False for an unknown function.
    """
    original: Any = getattr(launcher, "init_entrypoints_middleware", None)
    if not _has_parameters(original, _MIDDLEWARE):
        return False

    @functools.wraps(original)
    def init_entrypoints_middleware(args: Any, app: Any, *others: Any, **named: Any) -> Any:
        returned = original(args, app, *others, **named)
        try:
            app.add_middleware(middleware)
        except Exception:
            reporter.failed()
        return returned

    setattr(init_entrypoints_middleware, _MARK, True)
    launcher.init_entrypoints_middleware = init_entrypoints_middleware
    return True


def _has_parameters(method: Any, names: tuple[str, ...]) -> bool:
    """Whether the method has exactly these parameters and was not wrapped before."""
    if method is None or hasattr(method, _MARK):
        return False
    return tuple(inspect.signature(method).parameters) == names


def _looked_up(
    processor: Any, request_ids: Any, internal: bool, reporter: Reporter
) -> tuple[Any, list[Any]]:
    """The same ids, and the states of the requests that vLLM drops for these ids.

    Requests with several choices are dropped by a further call for each parent, which the wrapper
    also gets.
    """
    try:
        ids = list(request_ids)
    except Exception:
        reporter.failed()
        return request_ids, []
    try:
        return ids, list(_states(processor, ids, internal))
    except Exception:
        reporter.failed()
        return ids, []


def _states(processor: Any, ids: list[str], internal: bool) -> Iterator[Any]:
    for each in ids:
        for request_id in (each,) if internal else processor.external_req_ids.get(each, ()):
            state = processor.request_states.get(request_id)
            if state is not None and state.stats is not None:
                yield state
