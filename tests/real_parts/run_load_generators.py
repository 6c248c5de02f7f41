"""Scores requests with the code of load generators. The engine's own Python runs this script.

Reads a JSON object from stdin: sets of limits in ms, groups of requests, and streams. Writes to
stdout: of each tool, for each set of limits and each group, the good requests and those that count;
and the seconds per token of each stream. A stream has the client, the endpoint, the events with
their times in seconds, and the output tokens.
"""

# mypy: disable-error-code="import-not-found"

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock, patch

Request = Mapping[str, Any]
Limits = Mapping[str, float | None]
Stream = Mapping[str, Any]
Score = Callable[[Sequence[Request]], tuple[int, int]]


def vllm(limits: Limits) -> Score:
    """The benchmark's `calculate_metrics`."""
    from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput
    from vllm.benchmarks.serve import calculate_metrics

    names = {"ttft": "ttft", "tpot": "tpot", "e2e": "e2el"}
    goodput = {names[name]: limit for name, limit in limits.items() if limit is not None}

    def tokenizer(text: str, **_: object) -> SimpleNamespace:
        return SimpleNamespace(input_ids=text.split())

    def output(request: Request) -> object:
        first_s = request["first_s"]
        return RequestFuncOutput(
            success=request["ending"] == "ok",
            # Its client takes the first event for the first token, with text or without.
            ttft=request["first_byte_s"] if first_s is None else first_s,
            latency=request["end_s"],
            output_tokens=request["tokens"] or 0,
            generated_text="" if first_s is None else "a " * request["tokens"],
        )

    def score(requests: Sequence[Request]) -> tuple[int, int]:
        outputs = [output(request) for request in requests]
        metrics, _ = calculate_metrics([], outputs, 1.0, tokenizer, [], goodput)
        return round(metrics.request_goodput), metrics.completed

    return score


def aiperf(limits: Limits) -> Score:
    """The record processor and the fraction of good requests."""
    from aiperf.common.models.record_models import MetricRecordMetadata
    from aiperf.metrics.metric_dicts import MetricResultsDict
    from aiperf.metrics.types.good_request_fraction_metric import GoodRequestFractionMetric
    from aiperf.post_processors.metric_record_processor import MetricRecordProcessor

    tags = {"ttft": "time_to_first_token", "tpot": "inter_token_latency", "e2e": "request_latency"}
    settings = SimpleNamespace(
        endpoint=SimpleNamespace(type="chat", streaming=True, use_server_token_count=True),
        get_profiling_phases=list,
        slos={tags[name]: limit for name, limit in limits.items() if limit is not None},
        accuracy=None,
    )
    processor = MetricRecordProcessor(run=SimpleNamespace(cfg=settings))
    metadata = MetricRecordMetadata.model_construct()

    def score(requests: Sequence[Request]) -> tuple[int, int]:
        sums = MetricResultsDict()
        for request in requests:
            data = asyncio.run(processor.process_record(_aiperf_record(request), metadata))
            for tag in ("good_request_count", "request_count", "error_request_count"):
                sums[tag] = sums.get(tag, 0) + data.metrics.get(tag, 0)
        attempted = sums["request_count"] + sums["error_request_count"]
        return round(GoodRequestFractionMetric().derive_value(sums) * attempted), attempted

    return score


def _aiperf_record(request: Request) -> Any:
    from aiperf.common.models import ErrorDetails, ParsedResponse, RequestRecord, TextResponseData
    from aiperf.common.models.record_models import ParsedResponseRecord, TokenCounts

    # As aiperf/transports/aiohttp_client.py records them.
    errors = {
        "cancelled": ErrorDetails(type="RequestCancellationError", message="", code=499),
        "error": ErrorDetails(type="InternalServerError", message="", code=500),
        "ok": None,
    }
    record = RequestRecord(
        start_perf_ns=0,
        end_perf_ns=round(request["end_s"] * 1e9),
        error=errors[request["ending"]],
    )
    times_s = [] if request["first_s"] is None else [request["first_s"], request["end_s"]]
    responses = [ParsedResponse(round(time_s * 1e9), TextResponseData("a")) for time_s in times_s]
    tokens = TokenCounts(output=request["tokens"])
    # As aiperf/records/inference_result_parser.py does.
    ParsedResponseRecord(record, responses, tokens).create_error_from_invalid()
    return ParsedResponseRecord(record, responses, tokens)


def guidellm(limits: Limits) -> Score:
    """The accumulator, which sorts requests by their status, and the compiled goodput."""
    sys.meta_path.insert(0, _UnusedLibraries())
    from guidellm.benchmark.schemas import GenerativeMetrics
    from guidellm.schemas.benchmark import GoodputSLO

    slo = GoodputSLO(ttft_ms=limits["ttft"], tpot_ms=limits["tpot"], e2el_ms=limits["e2e"])

    def score(requests: Sequence[Request]) -> tuple[int, int]:
        lists: dict[str, list[Any]] = {name: [] for name in _GUIDELLM_LISTS}
        for request in requests:
            lists[_guidellm_list(request["ending"])].append(_guidellm_stats(request))
        attainment, counted, _ = GenerativeMetrics._compile_goodput(
            slo, lists["completed"], lists["errored"], 0.0, 100.0
        )
        return round((attainment or 0.0) * counted), counted

    return score


_GUIDELLM_LISTS = ("completed", "errored", "incomplete")


@cache
def _guidellm_list(ending: str) -> str:
    """The list that GuideLLM's own code chooses."""
    from guidellm.benchmark.schemas import GenerativeBenchmarkAccumulator

    accumulator = MagicMock()
    stats = _guidellm_stats({"ending": ending, "first_s": None, "end_s": 1.0, "tokens": None})
    GenerativeBenchmarkAccumulator.update_estimate(accumulator, None, None, stats.info, MagicMock())
    (chosen,) = [n for n in _GUIDELLM_LISTS if getattr(accumulator, n).update_estimate.called]
    return chosen


def _guidellm_stats(request: Request) -> Any:
    from guidellm.schemas import GenerativeRequestStats, RequestInfo, UsageMetrics

    statuses = {"ok": "completed", "error": "errored", "cancelled": "cancelled"}
    info = RequestInfo(status=statuses[request["ending"]])
    timings = info.timings
    timings.resolve_start = timings.request_start = 0.0
    timings.resolve_end = timings.request_end = request["end_s"]
    if request["first_s"] is not None:
        timings.first_token_iteration = request["first_s"]
        timings.last_token_iteration = request["end_s"]
    return GenerativeRequestStats(
        request_id="",
        info=info,
        input_metrics=UsageMetrics(),
        output_metrics=UsageMetrics(text_tokens=request["tokens"]),
    )


class _UnusedLibraries(MetaPathFinder, Loader):
    """Stands in for libraries that GuideLLM imports only to load data sets."""

    def find_spec(
        self, name: str, path: object, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        unused = name.partition(".")[0] in ("datasets", "faker")
        return ModuleSpec(name, self, is_package=True) if unused else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module: ModuleType = MagicMock(__spec__=spec, __path__=[])
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: a mock has every attribute."""


# Time per output token


def aiperf_tpot_s(stream: Stream) -> float:
    """AIPerf's inter-token latency."""
    from aiperf.common.models import RequestRecord, SSEMessage
    from aiperf.common.models.record_models import ParsedResponseRecord, TokenCounts
    from aiperf.endpoints.anthropic_messages import MessagesEndpoint
    from aiperf.endpoints.openai_responses import ResponsesEndpoint
    from aiperf.metrics.metric_dicts import MetricRecordDict
    from aiperf.metrics.types.inter_token_latency_metric import InterTokenLatencyMetric
    from aiperf.metrics.types.output_sequence_length_metric import OutputSequenceLengthMetric
    from aiperf.metrics.types.request_latency_metric import RequestLatencyMetric
    from aiperf.metrics.types.ttft_metric import TTFTMetric

    messages = [SSEMessage.parse(event, round(at_s * 1e9)) for event, at_s in stream["events"]]
    record = RequestRecord(start_perf_ns=0, responses=messages)
    kind = {"responses": ResponsesEndpoint, "messages": MessagesEndpoint}[stream["endpoint"]]
    # Its settings are those of requests, which it does not send here.
    responses = kind.__new__(kind).extract_response_data(record)
    parsed = ParsedResponseRecord(record, responses, TokenCounts(output=stream["tokens"]))
    values = MetricRecordDict()
    for metric in (
        TTFTMetric,
        RequestLatencyMetric,
        OutputSequenceLengthMetric,
        InterTokenLatencyMetric,
    ):
        values[metric.tag] = metric().parse_record(parsed, values)
    return float(values[InterTokenLatencyMetric.tag]) / 1e9


def vllm_tpot_s(stream: Stream) -> float:
    """The TPOT of the client of vLLM's benchmark, which serve.py computes of its result."""
    from vllm.benchmarks.lib import endpoint_request_func as client

    clock = MagicMock(return_value=0.0)

    async def pieces() -> AsyncIterator[bytes]:
        for event, at_s in stream["events"]:
            clock.return_value = at_s
            yield event.encode()

    response = MagicMock(status=200)
    response.content.iter_any = pieces
    session = MagicMock()
    session.post.return_value.__aenter__ = AsyncMock(return_value=response)
    request = client.RequestFuncInput("a", "http://engine/v1/responses", 1, 1, "model")
    with patch.object(client.time, "perf_counter", clock):
        output = asyncio.run(client.async_request_openai_responses(request, session))
    assert output.success, output.error
    return float((output.latency - output.ttft) / (output.output_tokens - 1))


# GuideLLM comes last: what stands in for libraries then hides them from nobody else.
TOOLS: Mapping[str, Callable[[Limits], Score]] = {
    "vllm": vllm,
    "aiperf": aiperf,
    "guidellm": guidellm,
}
CLIENTS = {"aiperf": aiperf_tpot_s, "vllm": vllm_tpot_s}

if __name__ == "__main__":
    plan = json.load(sys.stdin)
    # The tools print, too.
    results, sys.stdout = sys.stdout, sys.stderr
    tpot_s = [CLIENTS[stream["client"]](stream) for stream in plan["streams"]]
    scored = {
        name: [[score(group) for group in plan["groups"]] for score in map(tool, plan["limits"])]
        for name, tool in TOOLS.items()
    }
    json.dump({"scores": scored, "tpot_s": tpot_s}, results)
