"""The histograms of vLLM 0.32's exposition: name, help, bucket edges, observations of a step.

Names and help texts are those of `vllm/v1/metrics/loggers.py`, bounds those of
`vllm/v1/metrics/buckets.py` in vLLM 0.32.0.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from agent.catalog.engines.vllm_buckets import DURATION_EDGES_S, TPOT_EDGES_S, TTFT_EDGES_S
from agent.simulator.engine_steps import Finished, Step
from agent.simulator.vllm_series import computed_prompt_tokens, generated_tokens

# The family of buckets that depends on the model.
REQUEST_TOKENS = "request_tokens"
FAMILIES: Mapping[str, tuple[float, ...]] = {
    "time_to_first_token": TTFT_EDGES_S,
    "inter_token_latency": TPOT_EDGES_S,
    "request_latency": DURATION_EDGES_S,
    "iteration_tokens": (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    "request_params_n": (1, 2, 5, 10, 20),
    "request_num_preemptions": (1, 2, 3, 4, 5, 10, 20),
}


def bounds(family: str, max_model_len: int) -> tuple[float, ...]:
    """The bucket edges of a family; those of token counts end at the model's length."""
    if family in FAMILIES:
        return FAMILIES[family]
    decades = range(len(str(max_model_len)))
    steps = (digit * 10**decade for decade in decades for digit in (1, 2, 5))
    return tuple(step for step in steps if step <= max_model_len)


@dataclass(frozen=True, slots=True)
class HistogramRow:
    """A histogram: `read` returns the values of one step, and how often each was observed."""

    name: str
    help: str
    family: str
    read: Callable[[Step], Iterable[tuple[float, int]]]


def _each_finished(read: Callable[[Finished], float]) -> Callable[[Step], list[tuple[float, int]]]:
    return lambda step: [(read(done), 1) for done in step.finished]


def _first_waits(step: Step) -> Iterable[tuple[float, int]]:
    return ((token.waited_s, 1) for token in step.tokens if token.is_first)


def _later_waits(step: Step) -> Iterable[tuple[float, int]]:
    return ((token.waited_s, step.times) for token in step.tokens if not token.is_first)


def _iteration_tokens(step: Step) -> Iterable[tuple[float, int]]:
    tokens = computed_prompt_tokens(step) + generated_tokens(step)
    return ((tokens, step.times),) if step.tokens else ()


HISTOGRAMS = (
    HistogramRow(
        "vllm:request_prompt_tokens",
        "Number of prefill tokens processed.",
        REQUEST_TOKENS,
        _each_finished(lambda done: done.request.prompt_tokens),
    ),
    HistogramRow(
        "vllm:request_generation_tokens",
        "Number of generation tokens processed.",
        REQUEST_TOKENS,
        _each_finished(lambda done: done.request.output_tokens),
    ),
    HistogramRow(
        "vllm:iteration_tokens_total",
        "Histogram of number of tokens per engine_step.",
        "iteration_tokens",
        _iteration_tokens,
    ),
    HistogramRow(
        "vllm:request_max_num_generation_tokens",
        "Histogram of maximum number of requested generation tokens.",
        REQUEST_TOKENS,
        _each_finished(lambda done: done.request.output_tokens),
    ),
    HistogramRow(
        "vllm:request_params_n",
        "Histogram of the n request parameter.",
        "request_params_n",
        _each_finished(lambda done: 1),
    ),
    HistogramRow(
        "vllm:request_params_max_tokens",
        "Histogram of the max_tokens request parameter.",
        REQUEST_TOKENS,
        _each_finished(lambda done: done.request.max_tokens),
    ),
    HistogramRow(
        "vllm:time_to_first_token_seconds",
        "Histogram of time to first token in seconds.",
        "time_to_first_token",
        _first_waits,
    ),
    HistogramRow(
        "vllm:inter_token_latency_seconds",
        "Histogram of inter-token latency in seconds.",
        "inter_token_latency",
        _later_waits,
    ),
    HistogramRow(
        "vllm:request_time_per_output_token_seconds",
        "Histogram of time_per_output_token_seconds per request.",
        "inter_token_latency",
        _each_finished(lambda done: done.tpot_s),
    ),
    HistogramRow(
        "vllm:e2e_request_latency_seconds",
        "Histogram of e2e request latency in seconds.",
        "request_latency",
        _each_finished(lambda done: done.e2e_s),
    ),
    HistogramRow(
        "vllm:request_queue_time_seconds",
        "Histogram of time spent in WAITING phase for request.",
        "request_latency",
        _each_finished(lambda done: done.queue_s),
    ),
    HistogramRow(
        "vllm:request_inference_time_seconds",
        "Histogram of time spent in RUNNING phase for request.",
        "request_latency",
        _each_finished(lambda done: done.inference_s),
    ),
    HistogramRow(
        "vllm:request_prefill_time_seconds",
        "Histogram of time spent in PREFILL phase for request.",
        "request_latency",
        _each_finished(lambda done: done.prefill_s),
    ),
    HistogramRow(
        "vllm:request_decode_time_seconds",
        "Histogram of time spent in DECODE phase for request.",
        "request_latency",
        _each_finished(lambda done: done.decode_s),
    ),
    HistogramRow(
        "vllm:request_num_preemptions",
        "Histogram of the number of times a request was preempted.",
        "request_num_preemptions",
        _each_finished(lambda done: done.preemptions),
    ),
    HistogramRow(
        "vllm:request_prefill_kv_computed_tokens",
        "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
        REQUEST_TOKENS,
        _each_finished(lambda done: done.request.prompt_tokens - done.request.cached_tokens),
    ),
)
