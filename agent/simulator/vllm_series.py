"""The gauges and counters of vLLM 0.32's exposition: name, help, labels, values of a step.

Names, help texts and labels are those of `vllm/v1/metrics/loggers.py` and
`vllm/v1/metrics/perf.py` in vLLM 0.32.0. Features that the simulator lacks (other
tiers of cache, images, sleep) have the values of an engine that does not use them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from agent.simulator.engine_steps import Step

ENGINE_LABELS = ("model_name", "engine")

Read = Callable[[Step], float]


def _always(value: float) -> Read:
    return lambda step: value


def _none_of(*values: str) -> Mapping[tuple[str, ...], Read]:
    return {(value,): _always(0) for value in values}


@dataclass(frozen=True, slots=True)
class GaugeRow:
    """A gauge: `reads` has a function for each label set that returns its value after a step."""

    name: str
    help: str
    reads: Mapping[tuple[str, ...], Read]
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CounterRow:
    """A counter: `reads` has a function for each label set that returns its increase of a step."""

    name: str
    help: str
    reads: Mapping[tuple[str, ...], Read] = field(default_factory=lambda: {(): _always(0)})
    labels: tuple[str, ...] = ()
    engine_labels: tuple[str, ...] = ENGINE_LABELS


def prompt_tokens(step: Step) -> int:
    """Prompt tokens of a step: vLLM counts a prompt at the first token of its output."""
    return sum(token.request.prompt_tokens for token in step.tokens if token.is_first)


def generated_tokens(step: Step) -> int:
    """Tokens that a step generated, each of equal steps."""
    return len(step.tokens)


def _all_generated(step: Step) -> int:
    return generated_tokens(step) * step.times


def computed_prompt_tokens(step: Step) -> int:
    """Those of the prompt tokens that the prefix cache did not have."""
    firsts = [token.request for token in step.tokens if token.is_first]
    return sum(request.prompt_tokens - request.cached_tokens for request in firsts)


def _cached_prompt_tokens(step: Step) -> int:
    return prompt_tokens(step) - computed_prompt_tokens(step)


def _queried_tokens(step: Step) -> int:
    return sum(request.prompt_tokens for request in step.admitted)


def _hit_tokens(step: Step) -> int:
    return sum(request.cached_tokens for request in step.admitted)


def _failed(step: Step) -> float:
    return step.failed


def _finished_with(reason: str) -> Read:
    return lambda step: sum(done.request.finish_reason == reason for done in step.finished)


GAUGES = (
    GaugeRow(
        "vllm:num_requests_running",
        "Number of requests in model execution batches.",
        {(): lambda step: step.load.running},
    ),
    GaugeRow(
        "vllm:num_requests_waiting",
        "Number of requests waiting to be processed.",
        {(): lambda step: step.load.waiting},
    ),
    GaugeRow(
        "vllm:num_requests_waiting_by_reason",
        "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for "
        "scheduling capacity; 'deferred' = deferred by transient constraints "
        "(LoRA budget, KV transfer, blocked status). "
        "Sum of all reasons equals vllm:num_requests_waiting.",
        {
            ("capacity",): lambda step: step.load.waiting - step.load.deferred,
            ("deferred",): lambda step: step.load.deferred,
        },
        labels=("reason",),
    ),
    GaugeRow(
        "vllm:engine_sleep_state",
        "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake; "
        "weights_offloaded = 1 means sleep level 1; discard_all = 1 means sleep level 2.",
        {("awake",): _always(1), **_none_of("weights_offloaded", "discard_all")},
        labels=("sleep_state",),
    ),
    GaugeRow(
        "vllm:kv_cache_usage_perc",
        "KV-cache usage. 1 means 100 percent usage.",
        {(): lambda step: step.load.kv_usage},
    ),
)

COUNTERS = (
    CounterRow(
        "vllm:prefix_cache_queries",
        "Prefix cache queries, in terms of number of queried tokens.",
        {(): _queried_tokens},
    ),
    CounterRow(
        "vllm:prefix_cache_hits",
        "Prefix cache hits, in terms of number of cached tokens.",
        {(): _hit_tokens},
    ),
    CounterRow(
        "vllm:external_prefix_cache_queries",
        "External prefix cache queries from KV connector cross-instance cache sharing, "
        "in terms of number of queried tokens.",
    ),
    CounterRow(
        "vllm:external_prefix_cache_hits",
        "External prefix cache hits from KV connector cross-instance cache sharing, "
        "in terms of number of cached tokens.",
    ),
    CounterRow(
        "vllm:mm_cache_queries", "Multi-modal cache queries, in terms of number of queried items."
    ),
    CounterRow("vllm:mm_cache_hits", "Multi-modal cache hits, in terms of number of cached items."),
    CounterRow(
        "vllm:num_preemptions",
        "Cumulative number of preemption from the engine.",
        {(): lambda step: step.preemptions},
    ),
    CounterRow("vllm:prompt_tokens", "Number of prefill tokens processed.", {(): prompt_tokens}),
    CounterRow(
        "vllm:prompt_tokens_by_source",
        "Number of prompt tokens by source.",
        {
            ("local_compute",): computed_prompt_tokens,
            ("local_cache_hit",): _cached_prompt_tokens,
            **_none_of("external_kv_transfer"),
        },
        labels=("source",),
    ),
    CounterRow(
        "vllm:prompt_tokens_cached",
        "Number of cached prompt tokens (local + external).",
        {(): _cached_prompt_tokens},
    ),
    CounterRow(
        "vllm:prompt_tokens_cached_by_source",
        "Prefix-cache hit tokens by the cache tier that supplied them: device (local HBM), "
        "host (offloaded to DRAM), disk, p2p (transferred from another vLLM instance) or "
        "external_unspecified. Counted at admission; sums to "
        "vllm:prefix_cache_hits + vllm:external_prefix_cache_hits.",
        {("device",): _hit_tokens, **_none_of("host", "p2p", "disk", "external_unspecified")},
        labels=("source",),
    ),
    CounterRow(
        "vllm:generation_tokens", "Number of generation tokens processed.", {(): _all_generated}
    ),
    CounterRow(
        "vllm:request_success",
        "Count of successfully processed requests.",
        {
            ("stop",): _finished_with("stop"),
            ("length",): _finished_with("length"),
            # A client that leaves is counted nowhere in vLLM, not even as an abort.
            **_none_of("abort", "error", "repetition"),
        },
        labels=("finished_reason",),
    ),
    CounterRow(
        "vllm:admission_rejections",
        "Number of admission attempts rejected by a queue limit, by reason.",
        _none_of("max_num_queued_reqs", "max_num_queued_tokens"),
        labels=("reason",),
        engine_labels=("model_name",),
    ),
    # By prometheus-fastapi-instrumentator, in vLLM's API server.
    CounterRow(
        "http_requests",
        "Total number of requests by method, status and handler.",
        {
            ("/v1/chat/completions", "POST", "2xx"): lambda step: len(step.finished),
            ("/v1/chat/completions", "POST", "5xx"): _failed,
        },
        labels=("handler", "method", "status"),
        engine_labels=(),
    ),
    CounterRow(
        "vllm:estimated_flops_per_gpu_total",
        "Estimated number of floating point operations per GPU "
        "(for Model Flops Utilization calculations).",
        {(): lambda step: step.flops},
    ),
    CounterRow(
        "vllm:estimated_read_bytes_per_gpu_total",
        "Estimated number of bytes read from memory per GPU "
        "(for Model Flops Utilization calculations).",
        {(): lambda step: step.read_bytes},
    ),
    CounterRow(
        "vllm:estimated_write_bytes_per_gpu_total",
        "Estimated number of bytes written to memory per GPU "
        "(for Model Flops Utilization calculations).",
        {(): lambda step: step.written_bytes},
    ),
)
