"""The running agent pushes its metrics to a real VictoriaMetrics, as to any OTLP receiver."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from random import Random
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from prometheus_client.parser import text_string_to_metric_families

from agent.analysis.quantiles import relative_error
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.ports import free_port
from tests.real_parts.span_sender import SpanSender, request_span
from tests.real_parts.victoria_metrics import VictoriaMetrics
from tests.real_parts.waiting import eventually

pytestmark = pytest.mark.slow

WITHIN_S = 120.0
REQUESTS, LATER = 400, 20
TTFT = "gen_ai_server_time_to_first_token_seconds"
# The TTFTs below span six doublings, which have at most 160 buckets from scale 4 on.
ERROR = relative_error(4)
OF_AGENT = {"service_name": "goodput-agent", "service_instance_id": "fleet-7", "cluster": "eu-1"}


@dataclass
class PushingAgent:
    """The agent, what it pushes to, the TTFTs of its requests, and its sender."""

    agent: AgentProcess
    to: VictoriaMetrics
    sender: SpanSender
    ttfts_s: list[float]

    def pushed(self, expression: str) -> float:
        """The value of an expression with one series; NaN where it has none yet."""
        found = self.to.query(expression)
        return float(found[0]["value"][1]) if found else float("nan")


def span_with(number: int, ttft_s: float) -> Span:
    """A request of half a second with this TTFT."""
    span = request_span(f"r{number}")
    for attribute in span.attributes:
        if attribute.key == "gen_ai.latency.time_to_first_token":
            attribute.value.double_value = ttft_s
    return span


@pytest.fixture(scope="module")
def pushing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PushingAgent]:
    """An agent whose first requests have arrived in VictoriaMetrics."""
    folder, ports = tmp_path_factory.mktemp("pushing"), AgentPorts.free()
    seeded = Random(3)
    ttfts_s = [min(max(seeded.lognormvariate(-3, 0.7), 0.007), 0.45) for _ in range(REQUESTS)]
    with VictoriaMetrics(folder, prometheus_naming=True) as to:
        settings = {
            "name": "fleet-7",
            "engines": [{"name": "chat-0", "url": f"http://127.0.0.1:{free_port()}"}],
            "otlp_metrics": {
                "endpoint": to.otlp,
                "interval": "2s",
                "resource": {"cluster": "eu-1"},
            },
        }
        with AgentProcess.with_settings(folder, ports, settings) as agent:
            pushing = PushingAgent(agent, to, SpanSender(ports.grpc), ttfts_s)
            sent = [span_with(number, ttft_s) for number, ttft_s in enumerate(ttfts_s)]
            assert pushing.sender.export(sent)
            await_requests(pushing, REQUESTS)
            yield pushing


def await_requests(pushing: PushingAgent, requests: int) -> None:
    """Return when VictoriaMetrics has this many requests."""
    eventually(
        lambda: pushing.pushed('sum(llm_requests_total{status="ok"})') == requests,
        within_s=WITHIN_S,
        what=f"{requests} pushed requests",
    )


def labels_of(series: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    """The labels of a series in VictoriaMetrics, less those of the resource."""
    own = {"__name__", "service_version", "goodput_engine", *OF_AGENT}
    return frozenset((k, v) for k, v in series["metric"].items() if k not in own)


def pushed_series(pushing: PushingAgent) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every series of the agent in VictoriaMetrics, but for the buckets of histograms."""
    of = ",".join(f'{name}="{value}"' for name, value in OF_AGENT.items())
    return {
        (series["metric"]["__name__"], labels_of(series)): float(series["value"][1])
        for series in pushing.to.query(f'{{{of},vmrange=""}}')
    }


def shown_series(pushing: PushingAgent) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """The same of its exposition."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(pushing.agent.api.exposition())
        for sample in family.samples
        if "le" not in sample.labels
    }


def test_the_pushed_series_are_those_of_the_exposition_and_counters_are_equal(
    pushing: PushingAgent,
) -> None:
    # Some gauges come late, and then with the next push.
    eventually(
        lambda: pushed_series(pushing).keys() == shown_series(pushing).keys(),
        within_s=WITHIN_S,
        what="all series of the exposition",
    )
    found, shown = pushed_series(pushing), shown_series(pushing)
    steady = ("llm_requests_total", "llm_slo_", "llm_input_tokens", "llm_output_tokens", TTFT)
    compared = {key: value for key, value in shown.items() if key[0].startswith(steady)}
    assert len(compared) > 10
    for key, value in compared.items():
        assert found[key] == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("q", [0.5, 0.99])
def test_a_pushed_quantile_is_the_exact_one_and_that_of_the_api_within_the_error_of_its_buckets(
    pushing: PushingAgent, q: float
) -> None:
    pushed = pushing.pushed(f"histogram_quantile({q}, sum({TTFT}_bucket) by (vmrange))")
    exact = sorted(pushing.ttfts_s)[ceil(q * REQUESTS) - 1]
    # VictoriaMetrics interpolates within a bucket: at most its whole width away.
    assert pushed == pytest.approx(exact, rel=2.1 * ERROR)
    by_api = pushing.agent.api.summary(window="1h")["ttft_ms"][f"p{q * 100:.0f}"] / 1000
    assert pushed == pytest.approx(by_api, rel=2.1 * ERROR)


def test_the_last_values_arrive_when_the_agent_stops(pushing: PushingAgent) -> None:
    assert pushing.sender.export([span_with(REQUESTS + n, 0.1) for n in range(LATER)])
    pushing.agent.stop()
    await_requests(pushing, REQUESTS + LATER)
    pushing.agent.start()


def test_another_backends_dashboards_find_latencies_under_the_names_of_the_conventions(
    pushing: PushingAgent, tmp_path: Path
) -> None:
    ports = AgentPorts.free()
    settings = {
        "name": "fleet-8",
        "engines": [{"name": "chat-0", "url": f"http://127.0.0.1:{free_port()}"}],
        "otlp_metrics": {"endpoint": pushing.to.otlp, "interval": "1s", "names": "opentelemetry"},
    }
    variables = {"OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=production"}
    with AgentProcess.with_settings(tmp_path, ports, settings, variables):
        sender = SpanSender(ports.grpc)
        assert sender.export([span_with(number, 0.1) for number in range(5)])
        chosen = 'service_instance_id="fleet-8",deployment_environment_name="production"'
        sums = "sum(%s{%s}) by (gen_ai_operation_name, gen_ai_provider_name, service_name)"
        asked = sums % (f"{TTFT}_count", chosen)

        def found() -> Any:
            return [(one["metric"], float(one["value"][1])) for one in pushing.to.query(asked)]

        attributes = {
            "gen_ai_operation_name": "generate_content",
            "gen_ai_provider_name": "vllm",
            "service_name": "goodput-agent",
        }
        eventually(lambda: found() == [(attributes, 5.0)], within_s=WITHIN_S, what="five requests")
        # The same requests under two names would be twice as many.
        assert pushing.pushed(f"sum({TTFT}_count{{{chosen}}})") == 5.0
