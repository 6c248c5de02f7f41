"""Result files of `vllm bench serve --save-result`, with and without `--save-detailed`."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from agent.records.request import RequestRecord, Status
from agent.sources.result_files.benched import (
    BenchedFigures,
    BenchedRun,
    benched_request,
    known,
    texts,
)

TOOL = "vllm bench serve"

# The file's own names of latencies and of percentiles.
_LATENCIES = {"TTFT": "ttft", "TPOT": "tpot", "end to end": "e2el"}
_PERCENTILES = {"p50": "median", "p95": "p95", "p99": "p99"}


class _VllmResult(msgspec.Struct):
    duration: float
    completed: int
    output_throughput: float
    request_throughput: float
    failed: int = 0
    request_goodput: float | None = None
    request_rate: float | str | None = None
    burstiness: float | None = None
    max_concurrency: int | None = None
    ramp_up_strategy: str | None = None
    ramp_up_start_rps: float | None = None
    ramp_up_end_rps: float | None = None
    input_lens: list[int] | None = None
    output_lens: list[int] | None = None
    start_times: list[float] | None = None
    ttfts: list[float] | None = None
    itls: list[list[float]] | None = None
    latencies: list[float] | None = None
    errors: list[str | None] | None = None

    @property
    def latencies_s(self) -> Sequence[float] | None:
        """From begin to end; earlier versions of vLLM leave them out."""
        if self.latencies is not None:
            return self.latencies
        if self.ttfts is None or self.itls is None:
            return None
        return [first + sum(gaps) for first, gaps in zip(self.ttfts, self.itls, strict=True)]


def is_vllm(content: Mapping[str, Any]) -> bool:
    """Whether a file looks like vLLM's."""
    return {"duration", "completed", "output_throughput"} <= content.keys()


def read_vllm(content: Mapping[str, Any]) -> BenchedRun | BenchedFigures:
    """The requests of a detailed file, else the figures. Raises msgspec.ValidationError."""
    result = msgspec.convert(content, _VllmResult)
    rate = result.request_rate
    load = texts(
        {
            "request rate": "no limit" if rate == "inf" else rate,
            # Without a rate all requests are sent at once.
            "burstiness": None if rate == "inf" else result.burstiness,
            "concurrency": result.max_concurrency or "no limit",
            "ramp-up": result.ramp_up_strategy,
            "ramp-up from": result.ramp_up_start_rps,
            "ramp-up to": result.ramp_up_end_rps,
        }
    )
    records = _records(result)
    if records:
        return BenchedRun(tool=TOOL, records=records, load=load)
    return BenchedFigures(
        tool=TOOL,
        requests=result.completed + result.failed,
        length_s=result.duration,
        figures=_figures(result, content),
        load=load,
    )


def _records(result: _VllmResult) -> tuple[RequestRecord, ...]:
    columns = (
        *(result.start_times, result.latencies_s, result.ttfts),
        *(result.input_lens, result.output_lens, result.errors),
    )
    if any(column is None for column in columns):
        return ()
    return tuple(
        benched_request(
            number,
            Status.ERROR if error else Status.OK,
            (started_at, started_at + latency_s),
            latencies_s=(ttft_s, _tpot_s(ttft_s, latency_s, output), latency_s),
            tokens=(prompt, output),
        )
        for number, (started_at, latency_s, ttft_s, prompt, output, error) in enumerate(
            zip(*(column or () for column in columns), strict=True)
        )
    )


def _tpot_s(ttft_s: float, latency_s: float, tokens: int) -> float | None:
    """As the benchmark computes it."""
    return (latency_s - ttft_s) / (tokens - 1) if tokens > 1 else None


def _figures(result: _VllmResult, content: Mapping[str, Any]) -> dict[str, float]:
    latencies = {
        f"{name} {percentile}": content.get(f"{word}_{key}_ms")
        for name, key in _LATENCIES.items()
        for percentile, word in _PERCENTILES.items()
    }
    sent = result.completed + result.failed
    return known(
        {
            **{name: value / 1000 for name, value in known(latencies).items()},
            "goodput": result.request_goodput,
            "output tokens/s": result.output_throughput,
            "requests/s": sent / result.duration if result.duration else None,
            "error ratio": result.failed / sent if sent else None,
        }
    )
