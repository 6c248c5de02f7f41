"""What vLLM's interface of stat loggers does not show: requests whose clients left, and the time to
the first token of a request. Two methods of vLLM are wrapped for them.

Neither wrapper changes what the method gets, does or returns. Where a method has other parameters
than in the versions that the tests know, it is left as it is, and the figures are unknown.
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
_MARK = "goodput_agent_wraps"


def watch_aborts(processor: type, reporter: Reporter) -> bool:
    """Report every request that `OutputProcessor.abort_requests` drops; whether that is possible.

    `IterationStats` never contains these.
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
    """Add `goodput_ttft_s` to each `FinishedRequestStats`; whether that is possible."""
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


def _has_parameters(method: Any, names: tuple[str, ...]) -> bool:
    """Whether it takes these parameters and was not wrapped before."""
    if method is None or hasattr(method, _MARK):
        return False
    return tuple(inspect.signature(method).parameters) == names


def _looked_up(
    processor: Any, request_ids: Any, internal: bool, reporter: Reporter
) -> tuple[Any, list[Any]]:
    """The same ids, and the states of the requests that are dropped under them.

    Those of several choices are dropped by a further call for each parent, which is seen as well.
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
