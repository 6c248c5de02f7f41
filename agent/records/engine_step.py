"""What an engine tells of itself through its plugin: each step, and each request that ended."""

from typing import NamedTuple


class EngineStep(NamedTuple):
    """One step of an engine. Times in Unix seconds, durations in seconds, unknown None.

    `prefill_tokens` and `decode_tokens` were computed in the step. `waiting_capacity` and
    `waiting_deferred` are the requests that waited at its end, `kv_usage` is from 0 to 1.
    """

    engine: str
    ended_at: float
    duration_s: float
    prefill_tokens: int
    decode_tokens: int
    running: int
    waiting_capacity: int
    waiting_deferred: int
    kv_usage: float
    preempted: int


class EndedRequest(NamedTuple):
    """A request that the engine finished or dropped, with the engine's own figures.

    `request_id` is that of the request's span. Durations in seconds, unknown None.
    """

    engine: str
    request_id: str
    ended_at: float
    finish_reason: str
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None
    preemptions: int
    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None
    e2e_s: float | None
