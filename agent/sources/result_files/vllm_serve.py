"""Result files of `vllm bench serve --save-result`, with and without `--save-detailed`.

And of two benchmarks that began as copies of it: SGLang's `bench_serving` and InferenceX.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class _Tool:
    """The name of a tool, how it writes a latency in its file, and how many of these are a second.

    `own` are keys that only its files have.
    """

    name: str
    latency: str
    per_s: float
    e2e: str = "e2el"
    own: frozenset[str] = frozenset()


_VLLM = _Tool(TOOL, "{word}_{key}_ms", 1000)
# The first with one of its own keys; sglang/bench_serving.py of 0.4 and 0.5.
_TOOLS = (
    _Tool(
        "SGLang bench_serving",
        "{word}_{key}_ms",
        1000,
        e2e="e2e_latency",
        own=frozenset(("median_e2e_latency_ms", "total_output_tokens_retokenized")),
    ),
    _Tool("InferenceX", "{word}_{key}", 1, own=frozenset(("median_ttft", "median_tpot"))),
)
KNOWN = ", ".join((TOOL, *(tool.name for tool in _TOOLS)))

_PERCENTILES = {"p50": "median", "p95": "p95", "p99": "p99"}


class _VllmResult(msgspec.Struct):
    duration: float
    completed: int
    output_throughput: float
    request_throughput: float
    failed: int | None = None
    num_prompts: int | None = None
    total_input_tokens: int | None = None
    total_output_tokens: int | None = None
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
    def sent(self) -> int | None:
        """How many requests there were; None where the file does not tell how many failed."""
        if self.failed is not None:
            return self.completed + self.failed
        return self.num_prompts

    @property
    def latencies_s(self) -> Sequence[float] | None:
        """From begin to end; earlier versions of vLLM leave them out."""
        if self.latencies is not None:
            return self.latencies
        if self.ttfts is None or self.itls is None:
            return None
        return [first + sum(gaps) for first, gaps in zip(self.ttfts, self.itls, strict=True)]


def is_vllm(content: Mapping[str, Any]) -> bool:
    """Whether a run looks like one of these tools'."""
    return {"duration", "completed", "output_throughput"} <= content.keys()


def read_vllm(content: Mapping[str, Any]) -> BenchedRun | BenchedFigures:
    """The requests of a detailed run, else the figures. Raises msgspec.ValidationError."""
    tool = next((each for each in _TOOLS if each.own & content.keys()), _VLLM)
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
        return BenchedRun(tool=tool.name, records=records, load=load)
    return BenchedFigures(
        tool=tool.name,
        requests=result.completed if result.sent is None else result.sent,
        length_s=result.duration,
        figures=_figures(tool, result, content),
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


def _figures(tool: _Tool, result: _VllmResult, content: Mapping[str, Any]) -> dict[str, float]:
    sent, completed = result.sent, result.completed
    return known(
        {
            **_latencies(tool, content),
            "input tokens, mean": _per(result.total_input_tokens, completed),
            "output tokens, mean": _per(result.total_output_tokens, completed),
            "goodput": result.request_goodput,
            "output tokens/s": result.output_throughput,
            "requests/s": _per(sent, result.duration),
            "error ratio": None if sent is None else _per(sent - completed, sent),
        }
    )


def _latencies(tool: _Tool, content: Mapping[str, Any]) -> dict[str, float]:
    keys = {"TTFT": "ttft", "TPOT": "tpot", "end to end": tool.e2e}
    found = {
        f"{name} {percentile}": content.get(tool.latency.format(word=word, key=key))
        for name, key in keys.items()
        for percentile, word in _PERCENTILES.items()
    }
    # No request takes no time: 0 is a latency that was not measured.
    return {name: value / tool.per_s for name, value in known(found).items() if value > 0}


def _per(number: float | None, of: float) -> float | None:
    return None if number is None or not of else number / of
