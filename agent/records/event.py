"""Events: failures and changes of an engine or a GPU."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class EventKind(StrEnum):
    """Kinds of events, worst first. Each value is a label of `llm_engine_events_total`."""

    HOST_OOM = "HOST_OOM"
    CUDA_OOM = "CUDA_OOM"
    SIZING_ERROR = "SIZING_ERROR"
    GPU_FAULT = "GPU_FAULT"
    PROXY_WORKER_DIED = "PROXY_WORKER_DIED"
    ENGINE_DEAD = "ENGINE_DEAD"
    HANG = "HANG"
    ENGINE_EJECTED = "ENGINE_EJECTED"
    KV_PRESSURE = "KV_PRESSURE"
    ADMISSION_LIMIT = "ADMISSION_LIMIT"
    RESTART = "RESTART"
    STARTED = "STARTED"
    SLEEP = "SLEEP"
    UNREACHABLE = "UNREACHABLE"
    ENGINE_RETURNED = "ENGINE_RETURNED"


class Confidence(StrEnum):
    """The confidence in an event's kind."""

    CERTAIN = "certain"
    PROBABLE = "probable"
    SUSPECTED = "suspected"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event, with its evidence."""

    at: float
    engine: str | None
    kind: EventKind
    confidence: Confidence
    gpu: str | None = None
    evidence: Mapping[str, str | float | None] = field(default_factory=dict)
