"""The simulated engine's exposition, with the metrics of vLLM 0.32.

Names, help texts, labels and bounds are those of `vllm/v1/metrics/{loggers,perf,buckets}.py` in
vLLM 0.32.0. Features that the simulator lacks (other tiers of cache, images, sleep) have the values
of an engine that does not use them."""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from agent.catalog.engines.vllm import DURATION_EDGES_S, TPOT_EDGES_S, TTFT_EDGES_S
from agent.simulator.batching import BatchLoad, Finished, Step
from agent.simulator.scenario import Scenario

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

# Fields of `CacheConfig` in vLLM 0.32's `vllm/config/cache.py` with the values of a default engine;
# each is a label of `vllm:cache_config_info`.
CACHE_CONFIG_DEFAULTS: Mapping[str, object] = {
    "user_specified_block_size": False,
    "kv_cache_layout": None,
    "prefix_match_unit": None,
    "gpu_memory_utilization": 0.92,
    "cache_dtype": "auto",
    "is_attention_free": False,
    "num_gpu_blocks_override": None,
    "sliding_window": None,
    "enable_prefix_caching": True,
    "prefix_caching_hash_algo": "sha256",
    "prefix_cache_retention_interval": 0,
    "kv_cache_dtype_skip_layers": [],
    "mamba_page_size_padded": None,
    "skip_page_size_padded": None,
    "mamba_block_size": None,
    "mamba_cache_dtype": "auto",
    "mamba_ssm_cache_dtype": "auto",
    "mamba_cache_mode": "none",
    "enable_mamba_shared_prefix_checkpoint": False,
    "replayssm_buffer_len": 16,
    "use_replayssm": False,
    "use_kda_recoverssm": False,
    "num_cpu_blocks": None,
    "hash_block_size": None,
    "cache_hit_alignment_tokens": None,
    "kv_sharing_fast_prefill": False,
    "swa_bounded_replay": True,
    "kv_cache_memory_bytes": None,
    "kv_offloading_size": None,
    "kv_offloading_backend": "native",
    "_block_size_resolved": True,
}


def _cache_config(scenario: Scenario) -> dict[str, str]:
    blocks, block_tokens = scenario.kv_cache.blocks, scenario.kv_cache.block_tokens
    own = {
        "block_size": block_tokens,
        "num_gpu_blocks": blocks,
        "effective_attention_block_size": block_tokens,
        "kv_cache_size_tokens": blocks * block_tokens,
        "kv_cache_max_concurrency": blocks * block_tokens / scenario.max_model_len,
    }
    return {name: str(value) for name, value in {**CACHE_CONFIG_DEFAULTS, **own}.items()}


class RepeatedHistogram(Collector):
    """A histogram that counts a value that was observed many times at once.

    The steps of a full batch are alike, and prometheus_client's own takes one value after another.
    """

    def __init__(
        self, row: HistogramRow, labels: Mapping[str, str], edges: Sequence[float]
    ) -> None:
        self._row = row
        self._labels = labels
        self._edges = (*map(float, edges), inf)
        self._counts = [0] * len(self._edges)
        self._sum = 0.0
        self._created = time.time()

    def observe(self, value: float, times: int) -> None:
        """Count a value."""
        self._counts[bisect_left(self._edges, value)] += times
        self._sum += value * times

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """The family, with the time of its creation as in vLLM."""
        family = HistogramMetricFamily(self._row.name, self._row.help, labels=tuple(self._labels))
        bounds = map(floatToGoString, self._edges)
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        family.add_metric(tuple(self._labels.values()), buckets, self._sum)
        family.add_sample(f"{self._row.name}_created", dict(self._labels), self._created)
        yield family


class MetricsPage:
    """One engine's exposition in its own registry; it changes only when a step is observed."""

    def __init__(self, scenario: Scenario, started_at: float | None = None) -> None:
        """`started_at` is when the engine started, by its own clock; else by this process."""
        self._scenario = scenario
        self._max_model_len = scenario.max_model_len
        self._labels = {"model_name": scenario.model, "engine": "0"}
        self._begin(started_at)

    def restart(self) -> None:
        """Begin anew, as the page of a process that starts now."""
        self._begin(time.time())

    def _begin(self, started_at: float | None) -> None:
        self._registry = CollectorRegistry()
        if started_at is None:
            ProcessCollector(registry=self._registry)
        else:
            name, text = "process_start_time_seconds", "Start time of the process."
            Gauge(name, text, registry=self._registry).set(started_at)
        self._gauges = [(row, self._gauge(row)) for row in GAUGES]
        self._counters = [(row, self._counter(row)) for row in COUNTERS]
        self._histograms = [(row, self._histogram(row)) for row in HISTOGRAMS]
        self._declare_cache_config(_cache_config(self._scenario))
        self.observe(Step(load=BatchLoad(running=0, waiting=0, kv_usage=0.0)))

    def observe(self, step: Step) -> None:
        """Add one step of the engine."""
        for gauge_row, gauges in self._gauges:
            for labels, read in gauge_row.reads.items():
                gauges[labels].set(read(step))
        for counter_row, counters in self._counters:
            for labels, read in counter_row.reads.items():
                if increase := read(step):
                    counters[labels].inc(increase)
        for histogram_row, histogram in self._histograms:
            for value, times in histogram_row.read(step):
                histogram.observe(value, times)

    def render(self) -> bytes:
        """The Prometheus text format with `_created` series, as in vLLM."""
        return generate_latest(self._registry)

    def _gauge(self, row: GaugeRow) -> Mapping[tuple[str, ...], Gauge]:
        names = (*ENGINE_LABELS, *row.labels)
        family = Gauge(row.name, row.help, names, registry=self._registry)
        return {labels: family.labels(*self._engine(), *labels) for labels in row.reads}

    def _counter(self, row: CounterRow) -> Mapping[tuple[str, ...], Counter]:
        names = (*row.engine_labels, *row.labels)
        family = Counter(row.name, row.help, names, registry=self._registry)
        engine = self._engine(row.engine_labels)
        return {labels: family.labels(*engine, *labels) for labels in row.reads}

    def _histogram(self, row: HistogramRow) -> RepeatedHistogram:
        labels = dict(zip(ENGINE_LABELS, self._engine(), strict=True))
        histogram = RepeatedHistogram(row, labels, bounds(row.family, self._max_model_len))
        self._registry.register(histogram)
        return histogram

    def _engine(self, names: tuple[str, ...] = ENGINE_LABELS) -> tuple[str, ...]:
        return tuple(self._labels[name] for name in names)

    def _declare_cache_config(self, config: Mapping[str, str]) -> None:
        labels = {**config, "engine": self._labels["engine"]}
        name, text = "vllm:cache_config_info", "Information of the LLMEngine CacheConfig"
        Gauge(name, text, tuple(labels), registry=self._registry).labels(**labels).set(1)
