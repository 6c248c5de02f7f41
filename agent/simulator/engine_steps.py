"""Records of the simulated engine: requests, tokens, and the results of each step.

All times are seconds since the engine started.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineRequest:
    """One request with its planned output length; equal only to itself.

    `leaves_after_tokens` is the token after which its client leaves; None for a client that stays.
    It joins the queue after `front_s` and is not scheduled before it has waited `deferred_s` there.
    The prefix cache has `cached_tokens` of its prompt. If it `fails`, it gets an error. `tenant` is
    whom it is for.
    """

    request_id: str
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    leaves_after_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    deferred_s: float = 0.0
    front_s: float = 0.0
    cached_tokens: int = 0
    fails: bool = False
    tenant: str | None = None

    @property
    def queued_s(self) -> float:
        """When it joins the queue."""
        return self.arrived_s + self.front_s

    @property
    def ready_s(self) -> float:
        """When it can be scheduled."""
        return self.queued_s + self.deferred_s

    @property
    def finish_reason(self) -> FinishReason:
        """Why generation ends after `output_tokens`."""
        return "length" if self.output_tokens >= self.max_tokens else "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One generated token. `waited_s` counts from the token before it, or from the arrival."""

    request: EngineRequest
    position: int
    waited_s: float

    @property
    def is_first(self) -> bool:
        """Whether this is the first output token."""
        return self.position == 1

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why generation ended with this token; None if it goes on."""
        done = self.position == self.request.output_tokens
        return self.request.finish_reason if done else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The times of one finished request; they include its preemptions.

    `waits` are the waits for its tokens after the first: a time, and how many equal ones in a row.
    """

    request: EngineRequest
    scheduled_s: float
    first_token_s: float
    last_token_s: float
    preemptions: int
    waits: tuple[tuple[float, int], ...] = ()

    @property
    def ttft_s(self) -> float:
        """Arrival to the first token."""
        return self.first_token_s - self.request.arrived_s

    @property
    def e2e_s(self) -> float:
        """Arrival to the last token."""
        return self.last_token_s - self.request.arrived_s

    @property
    def queue_s(self) -> float:
        """From its place in the queue to the step that first took the request up."""
        return self.scheduled_s - self.request.queued_s

    @property
    def prefill_s(self) -> float:
        """From there to the first token."""
        return self.first_token_s - self.scheduled_s

    @property
    def decode_s(self) -> float:
        """First to last token."""
        return self.last_token_s - self.first_token_s

    @property
    def inference_s(self) -> float:
        """Taken up to the last token."""
        return self.last_token_s - self.scheduled_s

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first; 0 for a single token, as vLLM records it."""
        later_tokens = self.request.output_tokens - 1
        return self.decode_s / later_tokens if later_tokens else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLoad:
    """How full the engine is. `kv_usage` is the share of KV blocks in use, 0 to 1.

    `deferred` of the waiting requests cannot be scheduled yet, whatever room there is.
    """

    running: int
    waiting: int
    kv_usage: float
    deferred: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The results of one step, and the load after it.

    `failed` is the number of requests that got an error since the last step. `prefill_tokens` are
    all that the step computed of prompts, again after a preemption, too. The step is the last of
    `times` equal ones in a row. FLOPs and bytes are of all of them, and 0 if the scenario has no
    GPU. `lost` requests got an error.
    """

    load: BatchLoad
    tokens: tuple[Token, ...] = ()
    finished: tuple[Finished, ...] = ()
    admitted: tuple[EngineRequest, ...] = ()
    preemptions: int = 0
    failed: int = 0
    prefill_tokens: int = 0
    began_s: float = 0.0
    ended_s: float = 0.0
    times: int = 1
    flops: float = 0.0
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    lost: tuple[EngineRequest, ...] = ()
