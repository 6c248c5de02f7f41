"""Causes: what made a request miss its objective."""

from enum import StrEnum


class RequestPart(StrEnum):
    """The part of a request in which the time was lost."""

    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"
    FRONT = "front"
    FAILURE = "failure"
    UNKNOWN = "unknown"


class Cause(StrEnum):
    """Why time was lost. The values are stored, and are labels of metrics."""

    KV_PRESSURE = "kv_pressure"
    SEQUENCE_CAP = "sequence_cap"
    DEFERRED = "deferred"
    GRAMMAR = "grammar"
    PREFILL_BACKLOG = "prefill_backlog"
    ADMISSION = "admission"
    BURST = "burst"
    LONG_PROMPT = "long_prompt"
    CACHE_MISS = "cache_miss"
    PREFILL_CONTENTION = "prefill_contention"
    PREEMPTION = "preemption"
    PREFILL_INTERFERENCE = "prefill_interference"
    BATCH_LOAD = "batch_load"
    SPECULATION = "speculation"
    GPU_THROTTLED = "gpu_throttled"
    TOKENISING = "tokenising"
    PARSER_HOLDBACK = "parser_holdback"
    SLOW_CLIENT = "slow_client"
    NETWORK = "network"
    CPU_STARVED = "cpu_starved"
    ENGINE_FAILURE = "engine_failure"
    COLD_START = "cold_start"
    UNEXPLAINED = "unexplained"
