"""Computes clients' time per output token of streams. The engine's own Python runs this script.

Reads a JSON list of streams from stdin: the client, the endpoint, the events with their times in
seconds, and the output tokens. Writes the seconds per token of each stream to stdout.
"""

# mypy: disable-error-code="import-not-found"

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping
from typing import Any
from unittest.mock import AsyncMock, MagicMock, patch

Stream = Mapping[str, Any]


def aiperf(stream: Stream) -> float:
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


def vllm(stream: Stream) -> float:
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


CLIENTS = {"aiperf": aiperf, "vllm": vllm}

if __name__ == "__main__":
    streams = json.load(sys.stdin)
    # The clients print, too.
    results, sys.stdout = sys.stdout, sys.stderr
    json.dump([CLIENTS[stream["client"]](stream) for stream in streams], results)
