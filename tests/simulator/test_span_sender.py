"""Spans of the simulator."""

import asyncio
import math
import threading
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from agent.simulator import span_sender
from agent.simulator.batching import Batch, EngineRequest, Finished
from agent.simulator.simulated_metrics import MetricsPage
from agent.simulator.span_sender import SpanSender, SpanTarget, attributes
from tests.simulator.kit import (
    PLAIN,
    RECEIVERS,
    Received,
    engine_request,
    grpc_receiver,
    numbered_requests,
    steps,
    totals,
    values,
)

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
ORIGIN_UNIX_NS = 1_800_000_000_000_000_000


def _unix_ns(at_s: float) -> int:
    return ORIGIN_UNIX_NS + round(at_s * 1e9)


async def _sent(requests: Iterable[EngineRequest], protocol: str = "grpc") -> Received:
    async with RECEIVERS[protocol]() as received:
        sender = SpanSender(received.target, _unix_ns)
        for step in steps(Batch(PLAIN, requests)):
            sender.observe(step)
        await sender.close()
        return received


def _finished(**changes: float) -> Finished:
    request = replace(engine_request(prompt_tokens=30, output_tokens=11, arrived_s=2.0), **changes)  # type: ignore[arg-type]
    return Finished(
        request=request, scheduled_s=2.5, first_token_s=3.0, last_token_s=5.0, preemptions=0
    )


def test_a_span_has_exactly_the_attributes_of_vllm() -> None:
    assert attributes(_finished(temperature=0.7, top_p=0.9)) == {
        "gen_ai.latency.time_to_first_token": 1.0,
        "gen_ai.latency.e2e": 3.0,
        "gen_ai.latency.time_in_queue": 0.5,
        "gen_ai.latency.time_in_model_prefill": 0.5,
        "gen_ai.latency.time_in_model_decode": 2.0,
        "gen_ai.latency.time_in_model_inference": 2.5,
        "gen_ai.usage.prompt_tokens": 30,
        "gen_ai.usage.completion_tokens": 11,
        "gen_ai.request.id": "chatcmpl-test",
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.max_tokens": 200,
        "gen_ai.request.temperature": 0.7,
        "gen_ai.request.n": 1,
    }


@pytest.mark.parametrize("protocol", RECEIVERS)
def test_spans_arrive_over_either_protocol(protocol: str) -> None:
    # As in vLLM, a trace that is not sampled gets no span.
    unsampled = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}
    requests = [
        engine_request(prompt_tokens=30),
        engine_request(arrived_s=0.2),
        replace(engine_request(), trace_headers=unsampled),
    ]
    received = asyncio.run(_sent(requests, protocol))
    assert [span.name for span in received.spans()] == ["llm_request"] * 2
    assert {span.kind for span in received.spans()} == {Span.SPAN_KIND_SERVER}
    assert values(received.spans()[0].attributes)["gen_ai.usage.prompt_tokens"] == 30
    resource = received.resources()[0]
    assert (resource["service.name"], resource["goodput.simulated"]) == ("sim-0", True)
    assert resource["vllm.instrumenting_module_name"] == "vllm.llm_engine"
    assert resource["vllm.process_id"].isdigit()
    assert received.scopes() == {"vllm.tracing.otel"}


def test_a_span_reaches_from_the_arrival_to_the_last_token() -> None:
    # The second arrives during the first step and waits for its end.
    requests = [engine_request(arrived_s=1.0), engine_request(prompt_tokens=90, arrived_s=1.04)]
    _, span = asyncio.run(_sent(requests)).spans()
    sent = values(span.attributes)
    assert sent["gen_ai.latency.time_in_queue"] == pytest.approx(0.06)
    assert span.start_time_unix_nano == ORIGIN_UNIX_NS + 1_040_000_000
    took_s = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    assert took_s == pytest.approx(sent["gen_ai.latency.e2e"])


def test_spans_and_counters_agree() -> None:
    requests = list(islice(numbered_requests(PLAIN), 100))
    sent = [values(span.attributes) for span in asyncio.run(_sent(requests)).spans()]
    metrics = MetricsPage(PLAIN)
    for step in steps(Batch(PLAIN, requests)):
        metrics.observe(step)
    sums = totals(metrics.render().decode())
    left = [request for request in requests if request.leaves_after_tokens]
    assert len(sent) == sums["vllm:request_success_total"] == 100 - len(left)
    assert {span["gen_ai.request.id"] for span in sent} == {
        request.request_id for request in requests if request not in left
    }

    def total(attribute: str) -> float:
        return math.fsum(span[attribute] for span in sent)

    prompt_tokens = total("gen_ai.usage.prompt_tokens")
    assert prompt_tokens == sums["vllm:request_prompt_tokens_sum"]
    output_tokens = total("gen_ai.usage.completion_tokens")
    assert output_tokens == sums["vllm:request_generation_tokens_sum"]
    assert sums["vllm:prompt_tokens_total"] == prompt_tokens + sum(r.prompt_tokens for r in left)
    assert sums["vllm:generation_tokens_total"] == output_tokens + sum(
        request.leaves_after_tokens or 0 for request in left
    )
    e2e_s = total("gen_ai.latency.e2e")
    assert e2e_s == pytest.approx(sums["vllm:e2e_request_latency_seconds_sum"])


def test_closing_leaves_no_thread_behind() -> None:
    before = set(threading.enumerate())
    asyncio.run(_sent([engine_request()]))
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert not any("Otel" in name for name in left)


def test_closing_stops_waiting_for_a_receiver_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_sender, "FLUSH_WITHIN_S", 0.05)

    async def close_with_a_span_left() -> None:
        async with grpc_receiver() as received:
            target: SpanTarget = received.target
        sender = SpanSender(target, _unix_ns)
        for step in steps(Batch(PLAIN, [engine_request()])):
            sender.observe(step)
        # Less than the ten seconds for which the exporter retries.
        async with asyncio.timeout(5):
            await sender.close()

    asyncio.run(close_with_a_span_left())
