"""Result files of GuideLLM: the JSON of `guidellm run`, which may hold several benchmarks."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import msgspec

from agent.records.request import RequestRecord, Status
from agent.sources.result_files.benched import (
    PERCENTILES,
    BenchedFigures,
    BenchedRun,
    benched_request,
    known,
    texts,
)

TOOL = "GuideLLM"

# Its inter-token latency is our TPOT; its time per output token includes the first token.
_LATENCIES = {
    "TTFT": ("time_to_first_token_ms", 1000),
    "TPOT": ("inter_token_latency_ms", 1000),
    "end to end": ("request_latency", 1),
}
_LENGTHS = {"input tokens": "prompt_token_count", "output tokens": "output_token_count"}


class _GuidellmRequest(msgspec.Struct):
    """One request; it has no times if it was never sent."""

    request_start_time: float | None = None
    request_end_time: float | None = None
    time_to_first_token_ms: float | None = None
    inter_token_latency_ms: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None


class _GuidellmRequests(msgspec.Struct):
    """Requests by how they ended."""

    successful: list[_GuidellmRequest] | None = None
    errored: list[_GuidellmRequest] | None = None
    incomplete: list[_GuidellmRequest] | None = None

    @property
    def number(self) -> int:
        return sum(len(each or ()) for each in (self.successful, self.errored, self.incomplete))


class _GuidellmTotals(msgspec.Struct):
    successful: int = 0
    errored: int = 0
    total: int = 0


class _GuidellmStrategy(msgspec.Struct):
    type_: str | None = None
    streams: float | None = None
    rate: float | None = None
    max_concurrency: float | None = None


class _GuidellmConfig(msgspec.Struct):
    strategy: _GuidellmStrategy


class _GuidellmBenchmark(msgspec.Struct):
    config: _GuidellmConfig
    metrics: dict[str, Any]
    requests: _GuidellmRequests
    duration: float

    @property
    def totals(self) -> _GuidellmTotals:
        """The counts of its requests, also if only a sample of them was kept."""
        return msgspec.convert(self.metrics.get("request_totals") or {}, _GuidellmTotals)

    def figure(self, metric: str, *path: str) -> float | None:
        """A figure of the successful requests; None if it is unknown."""
        found = (self.metrics.get(metric) or {}).get("successful") or {}
        for key in path:
            found = found.get(key) or {}
        return float(found) if isinstance(found, (int, float)) else None


class _GuidellmFile(msgspec.Struct):
    benchmarks: list[_GuidellmBenchmark]


def is_guidellm(content: Mapping[str, Any]) -> bool:
    """Whether a file looks like GuideLLM's."""
    metadata = content.get("metadata")
    return isinstance(metadata, dict) and "guidellm_version" in metadata


def read_guidellm(content: Mapping[str, Any]) -> list[BenchedRun | BenchedFigures]:
    """All benchmarks of a file, in order. Raises msgspec.ValidationError."""
    return [_benchmark(each) for each in msgspec.convert(content, _GuidellmFile).benchmarks]


def _benchmark(benchmark: _GuidellmBenchmark) -> BenchedRun | BenchedFigures:
    strategy, totals = benchmark.config.strategy, benchmark.totals
    load = texts(
        {
            "arrivals": strategy.type_,
            "request rate": strategy.rate,
            "concurrency": strategy.streams or strategy.max_concurrency,
        }
    )
    records = _records(benchmark.requests)
    # A sample says nothing of rates.
    if not records or benchmark.requests.number < totals.total:
        return BenchedFigures(
            tool=TOOL,
            requests=totals.total,
            length_s=benchmark.duration,
            figures=_figures(benchmark),
            load=load,
        )
    return BenchedRun(tool=TOOL, records=records, load=load)


def _records(kept: _GuidellmRequests) -> tuple[RequestRecord, ...]:
    by_status = (
        (Status.OK, kept.successful),
        (Status.ERROR, kept.errored),
        (Status.CANCELLED, kept.incomplete),
    )
    sent = chain.from_iterable(((status, each) for each in of or ()) for status, of in by_status)
    return tuple(
        benched_request(
            number,
            status,
            (each.request_start_time, each.request_end_time),
            latencies_s=(
                _seconds(each.time_to_first_token_ms),
                _seconds(each.inter_token_latency_ms) if (each.output_tokens or 0) > 1 else None,
                each.request_end_time - each.request_start_time,
            ),
            tokens=(each.prompt_tokens, each.output_tokens),
        )
        for number, (status, each) in enumerate(sent)
        if each.request_start_time is not None and each.request_end_time is not None
    )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _figures(benchmark: _GuidellmBenchmark) -> dict[str, float]:
    figures: dict[str, float | None] = {}
    for name, (metric, unit) in _LATENCIES.items():
        for percentile in PERCENTILES:
            found = benchmark.figure(metric, "percentiles", percentile)
            figures[f"{name} {percentile}"] = None if found is None else found / unit
    for name, metric in _LENGTHS.items():
        figures[f"{name}, mean"] = benchmark.figure(metric, "mean")
        for percentile in PERCENTILES[:2]:
            figures[f"{name} {percentile}"] = benchmark.figure(metric, "percentiles", percentile)
    totals = benchmark.totals
    ended = totals.successful + totals.errored
    figures["output tokens/s"] = benchmark.figure("output_tokens_per_second", "mean")
    figures["requests/s"] = totals.total / benchmark.duration if benchmark.duration else None
    figures["error ratio"] = totals.errored / ended if ended else None
    return known(figures)
