"""Makes records of the values that vLLM gives to stat loggers; stops after repeated errors."""

import asyncio
import logging
import math
import re
import time
from collections.abc import Callable
from typing import Any

from goodput_agent_vllm.datagrams import (
    UNKNOWN,
    UNKNOWN_COUNT,
    RequestFigures,
    StepFigures,
    hello_record,
    request_record,
    step_record,
)
from goodput_agent_vllm.sending import Sender

_LOG = logging.getLogger("vllm.goodput_agent")

# After a change of vLLM's classes, every step would fail.
MAX_ERRORS = 10

# A beam search asks the engine for each token of each beam
# (vllm/entrypoints/generate/beam_search/online.py): these are no requests.
_BEAM = re.compile(r"-[0-9a-f]{16}-beam-[0-9]+\Z")


class Reporter:
    """Reports steps and ended requests to the agent. It never raises into the engine.

    `whole_steps` is false where several API servers share an engine: each gets the counts of some
    steps only, so no steps are reported.
    """

    def __init__(self, sender: Sender, now: Callable[[], float] = time.time) -> None:
        self.whole_steps = True
        # Gets the engine's id and the record of each ended request in place of the agent: the
        # front joins it with the HTTP request.
        self.take_figures: Callable[[str, bytes], None] | None = None
        self._sender = sender
        self._now = now
        self._errors = 0
        self._off = False
        self._planned = False
        # By rank: the Unix time when its last step ended, if requests were left for the next step.
        self._busy_since: dict[int, float] = {}

    def step(self, scheduler: Any, iteration: Any, rank: int) -> None:
        """Report one call of `StatLoggerBase.record`."""
        if self._off:
            return
        try:
            if scheduler is not None and self.whole_steps:
                self._sender.add(step_record(self._figures(scheduler, iteration, rank)))
            if iteration is not None:
                for finished in iteration.finished_requests:
                    record = _finished(finished, iteration.iteration_timestamp)
                    self._add_request(finished.request_id or "", record)
            self._send()
        except Exception:
            self.failed()

    def aborted(self, state: Any) -> None:
        """Report a request that was dropped before its end; `state` is the front's state of it."""
        if self._off:
            return
        try:
            self._add_request(state.external_req_id, _aborted(state, self._now()))
            self._send()
        except Exception:
            self.failed()

    def _add_request(self, engine_id: str, record: bytes) -> None:
        if "-beam-" in engine_id and _BEAM.search(engine_id):
            return
        if self.take_figures is None:
            self._sender.add(record)
        else:
            self.take_figures(engine_id, record)

    @property
    def path(self) -> str | None:
        """Where the agent's socket is; None while it is looked for."""
        return self._sender.path

    def add(self, record: bytes) -> None:
        """Send a record soon."""
        if not self._off:
            self._sender.add(record)
            self._send()

    def flush(self) -> None:
        """Send all records now."""
        if not self._off:
            self._send(self._sender.flush)

    def hello(self) -> None:
        """Report that the plugin is there."""
        if self._off:
            return
        try:
            self._sender.add(hello_record())
            self._send()
        except Exception:
            self.failed()

    def _send(self, send: Callable[[], float | None] | None = None) -> None:
        """Send the waiting records; plan another attempt for the rest, as no step may follow."""
        again_s = (send or self._sender.send)()
        if again_s is None or self._planned:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        self._planned = True
        loop.call_later(again_s, self._send_again)

    def _send_again(self) -> None:
        self._planned = False
        if self._off:
            return
        try:
            self._send()
        except Exception:
            self.failed()

    def failed(self) -> None:
        """Count an error of the plugin itself, and switch off after too many."""
        self._errors += 1
        if self._errors >= MAX_ERRORS and not self._off:
            self._off = True
            _LOG.exception("goodput-agent-vllm failed %d times and is now off", self._errors)

    def _figures(self, scheduler: Any, iteration: Any, rank: int) -> StepFigures:
        ended_at = self._now() if iteration is None else iteration.iteration_timestamp
        duration_s = self._since_last_step(scheduler, ended_at, rank)
        prefill, decode, preempted = _tokens(iteration)
        details = getattr(scheduler, "iteration_details", None)
        if details is not None:
            duration_s = details.elapsed_ms / 1000
            prefill, decode = details.num_ctx_tokens, details.num_generation_tokens
        # By position: keywords would take as long as all the rest of this method.
        return StepFigures(
            rank,
            ended_at,
            duration_s,
            prefill,
            decode,
            scheduler.num_running_reqs,
            scheduler.num_waiting_reqs,
            scheduler.num_skipped_waiting_reqs,
            sum(scheduler.num_kv_fetch_reqs_by_stage.values()),
            scheduler.kv_cache_usage,
            preempted,
            details is not None,
        )

    def _since_last_step(self, scheduler: Any, ended_at: float, rank: int) -> float:
        """Seconds since the last step ended; UNKNOWN where the engine was idle in between."""
        began_at = self._busy_since.pop(rank, None)
        if scheduler.num_running_reqs or scheduler.num_waiting_reqs:
            self._busy_since[rank] = ended_at
        # `ended_at` is before `began_at` where the clock was set back.
        return UNKNOWN if began_at is None or ended_at < began_at else ended_at - began_at


def _tokens(iteration: Any) -> tuple[int, int, int]:
    """Tokens of the prefills that ended in a step, tokens decoded in it, and preemptions."""
    if iteration is None:
        return 0, 0, 0
    # The first token of a request comes from its prefill, not from decoding.
    decoded = iteration.num_generation_tokens - len(iteration.time_to_first_tokens_iter)
    prefilled = iteration.prompt_token_stats.computed
    return prefilled, max(decoded, 0), iteration.num_preempted_reqs


def _finished(finished: Any, ended_at: float) -> bytes:
    has_output = finished.num_generation_tokens > 0
    # A request that never ran has 0 as its time of scheduling, and vLLM subtracts from it.
    ran = finished.queued_time >= 0 and finished.prefill_time <= finished.e2e_latency + 1
    return request_record(
        RequestFigures(
            ended_at=ended_at,
            input_tokens=finished.num_prompt_tokens,
            output_tokens=finished.num_generation_tokens,
            cached_tokens=finished.num_cached_tokens if ran else UNKNOWN_COUNT,
            preemptions=finished.num_preemptions,
            queue_s=finished.queued_time if ran else UNKNOWN,
            prefill_s=finished.prefill_time if ran and has_output else UNKNOWN,
            decode_s=finished.decode_time if ran and has_output else UNKNOWN,
            e2e_s=finished.e2e_latency,
            ttft_s=getattr(finished, "goodput_ttft_s", UNKNOWN) if has_output else UNKNOWN,
            finish_reason=str(finished.finish_reason),
            request_id=finished.request_id or "",
        )
    )


def _aborted(state: Any, ended_at: float) -> bytes:
    stats = state.stats
    # The times of queue and scheduling come to the front with the first token.
    begun = stats.num_generation_tokens > 0
    return request_record(
        RequestFigures(
            ended_at=ended_at,
            input_tokens=state.prompt_len,
            output_tokens=stats.num_generation_tokens,
            cached_tokens=state.num_cached_tokens if begun else UNKNOWN_COUNT,
            preemptions=stats.num_preemptions,
            queue_s=_between(stats.queued_ts, stats.scheduled_ts),
            prefill_s=_between(stats.scheduled_ts, stats.first_token_ts),
            decode_s=_between(stats.first_token_ts, stats.last_token_ts),
            e2e_s=ended_at - stats.arrival_time,
            ttft_s=stats.first_token_latency if begun else UNKNOWN,
            finish_reason="abort",
            request_id=state.external_req_id,
        )
    )


def _between(start: float, end: float) -> float:
    """Seconds between two events; UNKNOWN where one of them did not happen."""
    return end - start if start and end and math.isfinite(end - start) else UNKNOWN


_reporter: Reporter | None = None


def shared_reporter() -> Reporter:
    """The reporter of this process: an abort and an HTTP request belong to no rank."""
    global _reporter
    if _reporter is None:
        _reporter = Reporter(Sender())
    return _reporter
