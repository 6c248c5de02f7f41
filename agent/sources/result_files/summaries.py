"""Summaries that have only figures of all requests: inference-perf, LLMPerf and GenAI-Perf.

Each tool is a row: where its file has a figure, and how many of the file's unit are ours. Names:
inference-perf `reportgen/base.py` (0.2), LLMPerf `token_benchmark_ray.py` (2.0) and GenAI-Perf
`export_data/json_exporter.py` (0.0.16).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent.sources.result_files.benched import PERCENTILES, BenchedFigures, known, texts

Content = Mapping[str, Any]


def _at(content: Content, path: str) -> float | None:
    """The number at a path of keys; None without one."""
    found: Any = content
    for key in path.split("/"):
        found = found.get(key) if isinstance(found, dict) else None
    is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
    return float(found) if is_number else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Summary:
    """One tool: its keys, paths of figures, and paths with a percentile, whose names are its own.

    `per_s` are its units in a second. `counts` gives requests that were sent and that failed.
    """

    tool: str
    has: Sequence[str]
    latencies: Mapping[str, str]
    percentiles: Mapping[str, str]
    per_s: float
    figures: Mapping[str, str]
    counts: Callable[[Content], tuple[float | None, float | None]]
    load: Mapping[str, str] = field(default_factory=dict)

    def read(self, content: Content) -> BenchedFigures:
        """The figures of a file."""
        sent, failed = self.counts(content)
        figures = {name: _at(content, path) for name, path in self.figures.items()}
        for name, path in self.latencies.items():
            for percentile in PERCENTILES:
                value = _at(content, path.format(self.percentiles[percentile]))
                figures[f"{name} {percentile}"] = None if value is None else value / self.per_s
        if sent and failed is not None:
            figures["error ratio"] = failed / sent
        rate = figures.get("requests/s")
        load = {name: _at(content, path) for name, path in self.load.items()}
        return BenchedFigures(
            tool=self.tool,
            requests=round(sent or 0),
            length_s=sent / rate if sent and rate else 0.0,
            figures=known(figures),
            load=texts(load),
        )


def _inference_perf_counts(content: Content) -> tuple[float | None, float | None]:
    succeeded, failed = _at(content, "successes/count"), _at(content, "failures/count")
    return None if succeeded is None or failed is None else succeeded + failed, failed


def _llmperf_counts(content: Content) -> tuple[float | None, float | None]:
    sent, ratio = _at(content, "results_num_requests_started"), _at(content, "results_error_rate")
    return sent, None if sent is None or ratio is None else sent * ratio


def _genai_perf_counts(content: Content) -> tuple[float | None, float | None]:
    return _at(content, "request_count/avg"), None


_SUMMARIES = (
    _Summary(
        tool="inference-perf",
        has=("load_summary", "successes", "failures"),
        latencies={
            "TTFT": "successes/latency/time_to_first_token/{}",
            # Over the tokens after the first; its `normalized` time is over all of them.
            "TPOT": "successes/latency/time_per_output_token/{}",
            "end to end": "successes/latency/request_latency/{}",
        },
        percentiles={"p50": "median", "p95": "p95", "p99": "p99"},
        per_s=1,
        figures={
            "input tokens, mean": "successes/prompt_len/mean",
            "output tokens, mean": "successes/output_len/mean",
            "output tokens/s": "successes/throughput/output_tokens_per_sec",
            "requests/s": "successes/throughput/requests_per_sec",
        },
        counts=_inference_perf_counts,
    ),
    _Summary(
        tool="LLMPerf",
        has=("results_num_requests_started", "results_ttft_s_quantiles_p50"),
        latencies={
            "TTFT": "results_ttft_s_quantiles_{}",
            # Its inter-token latency is a request's time over all its tokens, so it is no TPOT.
            "end to end": "results_end_to_end_latency_s_quantiles_{}",
        },
        percentiles={each: each for each in PERCENTILES},
        per_s=1,
        figures={
            "input tokens, mean": "results_number_input_tokens_mean",
            "output tokens, mean": "results_number_output_tokens_mean",
            "output tokens/s": "results_mean_output_throughput_token_per_s",
        },
        counts=_llmperf_counts,
        load={"concurrency": "num_concurrent_requests"},
    ),
    _Summary(
        tool="GenAI-Perf",
        has=("request_throughput", "request_latency", "output_sequence_length"),
        latencies={
            "TTFT": "time_to_first_token/{}",
            "TPOT": "inter_token_latency/{}",
            "end to end": "request_latency/{}",
        },
        percentiles={each: each for each in PERCENTILES},
        per_s=1000,
        figures={
            "input tokens, mean": "input_sequence_length/avg",
            "output tokens, mean": "output_sequence_length/avg",
            "output tokens/s": "output_token_throughput/avg",
            "requests/s": "request_throughput/avg",
            "goodput": "request_goodput/avg",
        },
        counts=_genai_perf_counts,
    ),
)
KNOWN = "inference-perf, LLMPerf and GenAI-Perf"


def read_summary(content: Content) -> BenchedFigures | None:
    """The figures of a file; None of another tool's."""
    for summary in _SUMMARIES:
        if all(key in content for key in summary.has):
            return summary.read(content)
    return None
