"""The plugin's figures on the real engine: those of its spans, its responses and its counters."""

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import requests
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from agent.catalog.reasons import PluginDropped
from agent.records.engine import EndedRequest, EngineStep, ServedRequest
from agent.sources.engine_plugin import PluginReceiver
from agent.sources.plugin_sockets import PluginSocket
from tests.real_engine.watching import ENGINE, SPANS_ARRIVE_WITHIN_S
from tests.real_parts.agent_process import AgentPorts
from tests.real_parts.collector import Collector
from tests.real_parts.metric_pages import total
from tests.real_parts.vllm import ANSWER_WITHIN_S, PLUGIN, Vllm
from tests.real_parts.waiting import eventually

pytestmark = pytest.mark.timeout(1500)

SAME_S = 0.001
PROMPT = "bacade" * 60
# Of one prompt each, at the same time; the last has three choices.
REQUESTS = [
    *({"prompt": f"{'dace' * (1 + number)}", "max_tokens": 4 + 8 * number} for number in range(6)),
    {"prompt": "face", "max_tokens": 12, "n": 3},
]
COUNTERS = {
    "prefill": ("prompt_tokens_by_source_total", {"source": "local_compute"}),
    "generated": ("generation_tokens_total", {}),
    "prompts": ("time_to_first_token_seconds_count", {}),
    "preempted": ("num_preemptions_total", {}),
}


class Recorder:
    """Keeps what the engine's plugin sends."""

    def __init__(self) -> None:
        self.steps: list[EngineStep] = []
        self.ended: list[EndedRequest] = []
        self.served: list[ServedRequest] = []
        self.dropped: list[tuple[str, PluginDropped, int]] = []

    def on_step(self, step: EngineStep) -> None:
        self.steps.append(step)

    def on_ended(self, ended: EndedRequest) -> None:
        self.ended.append(ended)

    def on_served(self, served: ServedRequest) -> None:
        self.served.append(served)
        self.ended += served.choices

    def plugin_received(self, engine: str, steps: int, requests: int) -> None:
        """Count nothing."""

    def plugin_dropped(self, engine: str, reason: PluginDropped, count: int) -> None:
        self.dropped.append((engine, reason, count))

    def plugin_counted(self, engine: str, name: str, status_class: int, count: int) -> None:
        """Count nothing."""


def counters(engine: Vllm) -> dict[str, float]:
    page = engine.exposition()
    return {key: total(page, f"vllm:{name}", **of) for key, (name, of) in COUNTERS.items()}


def complete(engine: Vllm, body: Mapping[str, Any], request_id: str) -> dict[str, Any]:
    response = requests.post(
        f"{engine.url}/v1/completions",
        json={"model": engine.model, "ignore_eos": True, **body},
        headers={"X-Request-Id": request_id},
        timeout=ANSWER_WITHIN_S,
    )
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


class Told:
    """What was asked, and what the engine told of it in four ways."""

    def __init__(
        self, engine: Vllm, collector: Collector, socket: Path, first: dict[str, float]
    ) -> None:
        self.recorder = Recorder()
        began_at = time.time()
        sockets = [PluginSocket((socket,), ENGINE)]
        with closing(PluginReceiver(sockets, [self.recorder], self.recorder)) as receiver:
            receiver.start()
            self.responses = {
                f"cmpl-{name}-0": complete(engine, {"prompt": PROMPT, "max_tokens": 5}, name)
                for name in ("cold", "warm")
            }
            with ThreadPoolExecutor(len(REQUESTS)) as pool:
                names = [f"figure-{number}" for number in range(len(REQUESTS))]
                list(pool.map(lambda body, name: complete(engine, body, name), REQUESTS, names))
            self.ids = {*self.responses, *(f"cmpl-{name}-0" for name in names)}
            expected = len(self.ids) + 2
            eventually(
                lambda: len(self.spans(collector)) == len(self.ended) == expected,
                within_s=SPANS_ARRIVE_WITHIN_S,
                what=f"{expected} spans and ended requests",
            )
        # The plugin had kept older records, which no agent had read.
        self.steps = [step for step in self.recorder.steps if step.ended_at >= began_at]
        after = counters(engine)
        self.grown = {name: after[name] - first[name] for name in first}

    @property
    def ended(self) -> list[EndedRequest]:
        return [each for each in self.recorder.ended if each.request_id in self.ids]

    def spans(self, collector: Collector) -> list[dict[str, Any]]:
        found = [_attributes(span) for span in collector.received() if span.name == "llm_request"]
        return [span for span in found if span["gen_ai.request.id"] in self.ids]


def _attributes(span: Span) -> dict[str, Any]:
    return {
        pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "")
        for pair in span.attributes
    }


@pytest.fixture(scope="module")
def collector(ports: AgentPorts) -> Iterator[Collector]:
    """It gets the engine's spans itself."""
    with Collector(ports.grpc) as running:
        yield running


@pytest.fixture(scope="module")
def told(engine: Vllm, collector: Collector, plugin_socket: Path) -> Told:
    """There is no agent."""
    return Told(engine, collector, plugin_socket, counters(engine))


# What both have of a request: the id and counts, then times.
OF_SPAN = (
    "gen_ai.request.id",
    "gen_ai.usage.completion_tokens",
    "gen_ai.usage.prompt_tokens",
    "gen_ai.latency.e2e",
    "gen_ai.latency.time_to_first_token",
    "gen_ai.latency.time_in_model_prefill",
    "gen_ai.latency.time_in_model_decode",
    "gen_ai.latency.time_in_queue",
)


def figures_of(ended: EndedRequest) -> tuple[Any, ...]:
    counts = (ended.request_id, ended.output_tokens, ended.input_tokens)
    phases = (ended.prefill_s, ended.decode_s, ended.queue_s)
    return (*counts, ended.e2e_s, ended.ttft_s, *phases)


def in_order(figures: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """By id and, of the choices of one request, by queue time."""
    return sorted(figures, key=lambda values: (values[0], values[-1]))


def test_each_figure_is_that_of_the_span_within_a_millisecond(
    told: Told, collector: Collector
) -> None:
    spans = [tuple(span[name] for name in OF_SPAN) for span in told.spans(collector)]
    ended = [figures_of(each) for each in told.ended]
    for of_span, of_plugin in zip(in_order(spans), in_order(ended), strict=True):
        assert of_plugin[:3] == of_span[:3]
        assert of_plugin[3:] == pytest.approx(of_span[3:], abs=SAME_S)


def test_cached_tokens_and_finish_reasons_are_those_of_the_responses(told: Told) -> None:
    cached: dict[str, int] = {}
    for each in told.ended:
        if each.request_id in told.responses:
            response = told.responses[each.request_id]
            details = response["usage"]["prompt_tokens_details"] or {"cached_tokens": 0}
            cached[each.request_id] = each.cached_tokens or 0
            assert each.cached_tokens == details["cached_tokens"]
            assert each.finish_reason == response["choices"][0]["finish_reason"]
            assert each.preemptions == 0
    assert cached["cmpl-warm-0"] > 0


def test_the_steps_together_are_what_the_engine_counted(told: Told) -> None:
    assert sum(step.prefill_tokens for step in told.steps) == told.grown["prefill"]
    decoded = sum(step.decode_tokens for step in told.steps)
    assert decoded + told.grown["prompts"] == told.grown["generated"]
    assert sum(step.preempted for step in told.steps) == told.grown["preempted"]
    assert max(step.running for step in told.steps) > 1
    assert all(0 <= step.kv_usage <= 1 for step in told.steps)
    # Steps follow each other, so their durations are those between their ends.
    known = [step for step in told.steps if step.duration_s is not None]
    assert len(known) > len(told.steps) / 2
    assert sum(step.duration_s or 0 for step in known) <= (
        told.steps[-1].ended_at - told.steps[0].ended_at + SAME_S
    )


def test_nothing_was_dropped_and_the_plugin_knows_this_engine(told: Told, engine: Vllm) -> None:
    # What no agent read before may have been dropped.
    reasons = {reason for _, reason, _ in told.recorder.dropped}
    assert reasons <= {PluginDropped.AGENT_BEHIND}
    log = engine.log.read_text(encoding="utf-8", errors="replace")
    assert "goodput-agent-vllm does not know" not in log
    assert "goodput-agent-vllm failed" not in log


def test_the_plugin_names_the_version_that_it_is_tested_with(engine: Vllm) -> None:
    version = requests.get(f"{engine.url}/version", timeout=ANSWER_WITHIN_S).json()["version"]
    assert f"Tested with vLLM {version}." in (PLUGIN / "README.md").read_text(encoding="utf-8")
