"""The simulated engine's exposition, with the metrics of vLLM 0.32."""

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
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

from agent.simulator.engine_steps import BatchLoad, Step
from agent.simulator.scenario import Scenario
from agent.simulator.vllm_histograms import HISTOGRAMS, HistogramRow, bounds
from agent.simulator.vllm_series import COUNTERS, ENGINE_LABELS, GAUGES, CounterRow, GaugeRow

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
        self._registry = CollectorRegistry()
        self._max_model_len = scenario.max_model_len
        self._labels = {"model_name": scenario.model, "engine": "0"}
        if started_at is None:
            ProcessCollector(registry=self._registry)
        else:
            name, text = "process_start_time_seconds", "Start time of the process."
            Gauge(name, text, registry=self._registry).set(started_at)
        self._gauges = [(row, self._gauge(row)) for row in GAUGES]
        self._counters = [(row, self._counter(row)) for row in COUNTERS]
        self._histograms = [(row, self._histogram(row)) for row in HISTOGRAMS]
        self._declare_cache_config(_cache_config(scenario))
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
