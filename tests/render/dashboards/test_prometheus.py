"""Every panel on a real Prometheus that scraped a running agent, with GPUs and a proxy in use."""

import json
import math
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import requests
import yaml
from goodput_agent_vllm.datagrams import count_record
from goodput_agent_vllm.open_requests import OpenRequests
from goodput_agent_vllm.reporting import Reporter
from goodput_agent_vllm.sending import Sender

from agent.settings import load
from tests.plugins.vllm_counts import iteration, scheduler
from tests.real_parts.agent_process import AgentPorts, HastyAgent
from tests.real_parts.alertmanager import program
from tests.real_parts.ports import free_port
from tests.real_parts.prometheus import Prometheus, scrape_of
from tests.real_parts.span_sender import SpanSender, request_span
from tests.real_parts.waiting import eventually
from tests.render.dashboards.answering import (
    EVERYTHING,
    GRAFANA,
    every_question,
    never_answered,
    unanswered,
)
from tests.render.dashboards.reading import (
    SERIES,
    Asked,
    Json,
    dashboards,
    filled,
    panels,
    selectors,
)
from tests.simulated import MODEL, Simulator
from tests.sources.nvml.fake_driver import build
from tests.test_app_gpu_jobs import DriverPipe

QUESTIONS = every_question()


def everything() -> list[str]:
    found = [question.expression for question in QUESTIONS]
    for dashboard in dashboards():
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query" and variable["datasource"]["type"] == "prometheus":
                query = variable["query"]["query"]
                found.append(re.sub(r"^label_values\((.+), \w+\)$", r"\1", query))
        found += [mark["expr"] for mark in dashboard["annotations"]["list"] if "expr" in mark]
    return found


def test_prometheus_accepts_every_expression(tmp_path: Path) -> None:
    rules = [
        {"record": f"question:{number}", "expr": filled(expression, {**GRAFANA, **EVERYTHING})}
        for number, expression in enumerate(everything())
    ]
    path = tmp_path / "expressions.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "questions", "rules": rules}]}))
    checked = subprocess.run(
        [program("promtool"), "check", "rules", "--lint=none", path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(rules)} rules found" in checked.stdout


def test_every_series_and_label_is_published() -> None:
    seen = set()
    for expression in everything():
        for name, matchers in selectors(expression):
            seen.add(name)
            if name != "ALERTS":
                assert name in SERIES, f"{name} in {expression}"
                assert {label for label, _, _ in matchers} <= SERIES[name], expression
    assert len(seen) > 100


def test_aggregations_and_legends_keep_labels_that_the_series_have() -> None:
    for question in QUESTIONS:
        known = {"point"}
        for name, _ in selectors(question.expression):
            known |= SERIES.get(name, {"alertname"})
        kept = {
            label.strip()
            for found in re.findall(r"\b(?:by|on) \(([\w, ]*)\)", question.expression)
            for label in found.split(",")
        }
        shown = set(re.findall(r"\{\{(\w+)\}\}", question.target["legendFormat"]))
        assert kept - {""} <= known, question.expression
        assert shown <= kept, question.name


pytestmark = pytest.mark.timeout(400)

# The first minute must end before its cost is published, and the second before the cost grows.
ANSWERED_WITHIN_S = 240.0
# Those that an engine holds back must be there when its window is counted.
SPANS_EVERY = {"OTEL_BSP_SCHEDULE_DELAY": "500"}
PUBLISHED = Path(__file__).parents[2] / "data" / "model_configs" / "llama-3.1-8b.json"

# Prefixes of series that need not exist here.
NOT_HERE = (
    # An engine like vLLM tells no limits and no type that it chose itself, counts none given up,
    # and drafts, transfers and estimates nothing; no fact of it was renamed.
    *("llm_engine_max_", "llm_engine_kv_value_bytes", "llm_engine_requests_aborted_total"),
    *("llm_engine_spec_decode_", "llm_engine_kv_transfer", "llm_engine_kv_offload_"),
    *("llm_engine_external_cache_", "llm_engine_estimated_", "llm_engine_fact_missing"),
    # It has one rank, and no log.
    *("llm_engine_rank_", "llm_engine_expert_balance_"),
    # The engine was up before the agent.
    "llm_engine_start_seconds",
    # Pages are retired before Ampere only; the scripted GPU is a Hopper.
    *("gpu_page_retirement_pending", "gpu_retired_pages"),
    # The agent publishes nothing, runs in no cluster, has objectives, and a proxy of one engine. It
    # reads no router.
    "llm_router_",
    *("llm_agent_unpublished_", "llm_agent_publish", "llm_agent_file_", "llm_agent_lost_"),
    *("llm_agent_discover", "llm_slo_configured", "llm_proxy_engine_", "llm_proxy_requests_"),
    # Nobody asks its proxy for another route.
    "llm_proxy_responses_total",
    # A minute is judged five minutes later.
    "llm_slo_held_rate",
    # What hangs on the machine of the test: whether its kernel tells the memory of a control
    # group, and whether it is so slow that a request misses.
    *("llm_engine_memory_", "llm_engine_oom_kills_total", "llm_slo_missed_seconds_total"),
)

# An engine that is away with a GPU that is not there; the engine once more, as one of a pool; the
# destination of spans and metrics is none.
SETTINGS = """
name: agent-0
engines:
  - {{name: engine-0, url: '{engine}', scrape_interval: 0.5s, gpus: [0], gpu_hour_usd: 3,
      model_config: '{model}', plugin_socket: '{plugin}'}}
  - {{name: decode-0, url: '{engine}', scrape_interval: 0.5s, role: decode}}
  - {{name: away, url: '{nowhere}', scrape_interval: 0.5s, gpus: [9]}}
proxy: {{listen: '127.0.0.1:{proxy}', engine: engine-0, join_wait: 2s}}
otlp: {{forward_to: '{engine}'}}
otlp_metrics: {{endpoint: '{engine}', interval: 1s}}
objectives:
  - {{name: chat, preset: chat}}
  - {{name: answers, match: {{model: 'simulated*'}}, e2e_ms: 10000, target: 0.9}}
  - {{name: strict, match: {{tenant: acme}}, ttft_ms: 500, target: 0.999}}
"""


def send_odd_spans(ports: AgentPorts) -> None:
    """A body that is none, a span without a trace, and one with a time that cannot be."""
    requests.post(
        f"http://127.0.0.1:{ports.http}/v1/traces",
        data=b"no protobuf",
        headers={"Content-Type": "application/x-protobuf"},
        timeout=ANSWERED_WITHIN_S,
    )
    homeless, hasty = request_span("homeless"), request_span("hasty")
    homeless.trace_id = b""
    for attribute in hasty.attributes:
        if attribute.key == "gen_ai.latency.time_in_queue":
            attribute.value.double_value = -1.0
    SpanSender(ports.grpc).export([homeless, hasty])


@dataclass(frozen=True, slots=True)
class Watched:
    """A Prometheus that scrapes an agent, the agent's proxy, and a plugin of its engine."""

    prometheus: Prometheus
    proxy: str
    settings: Path
    plugin: Reporter

    def ask(self) -> None:
        """One streamed request through the proxy, read to its end, a step, and another route."""
        asked = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
        answer = requests.post(
            f"{self.proxy}/v1/chat/completions",
            json={"model": MODEL, "stream": True, **asked},
            timeout=ANSWERED_WITHIN_S,
        )
        answer.raise_for_status()
        self.plugin.step(scheduler(), iteration(at=time.time()), 0)
        self.plugin.add(count_record("/v1/embeddings", 2, 1))


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """An agent with traffic, a GPU that had a fault, and a Prometheus."""
    folder = tmp_path_factory.mktemp("watched")
    build(folder)
    pipe, ports, proxy = DriverPipe(folder), AgentPorts.free(), free_port()
    environment = {
        "GOODPUT_LISTEN__PORT": str(ports.listen),
        "GOODPUT_OTLP__GRPC": f"127.0.0.1:{ports.grpc}",
        "GOODPUT_OTLP__HTTP": f"127.0.0.1:{ports.http}",
        "GOODPUT_STORAGE__FILE": str(folder / "goodput.db"),
        "GOODPUT_NVML__POLL_INTERVAL": "0.2s",
        "LD_LIBRARY_PATH": str(folder),
        "STANDIN_PIPE": str(pipe.path),
    }
    with Simulator(folder, grpc=ports.grpc, rate=0.2, environment=SPANS_EVERY) as engine:
        settings = folder / "agent.yml"
        model = folder / "config.json"
        model.write_text(json.dumps(json.loads(PUBLISHED.read_text())["config"]))
        nowhere = f"http://127.0.0.1:{free_port()}"
        settings.write_text(
            SETTINGS.format(
                engine=engine.url,
                proxy=proxy,
                nowhere=nowhere,
                model=model,
                plugin=folder / "plugin.sock",
            )
        )
        with (
            HastyAgent(["run", "--config", settings], folder, ports.listen, environment) as agent,
            Prometheus(folder, scrape_of("goodput-agent", agent.url)) as prometheus,
            closing(Sender(str(folder / "plugin.sock"), pause_s=0.0)) as sender,
        ):
            front = OpenRequests.beside(str(folder / "plugin.sock"))
            assert front is not None
            front.open(b"a request", time.time(), time.monotonic())
            pipe.do("xid 0 13 -1 -1")
            send_odd_spans(ports)
            yield Watched(prometheus, f"http://127.0.0.1:{proxy}", settings, Reporter(sender))


def test_every_panel_has_data_except_for_missing_series(watched: Watched) -> None:
    questions = every_question(load(watched.settings, {}).all_objectives())
    here = [question for question in questions if not is_missing(question)]
    never = never_answered(
        watched.prometheus, here, meanwhile=watched.ask, within_s=ANSWERED_WITHIN_S
    )
    assert sorted(never) == []
    assert len(here) > 0.75 * len(questions)


@pytest.mark.parametrize("label", ["cluster", "namespace"])
def test_a_chosen_place_hides_all_agents_elsewhere(watched: Watched, label: str) -> None:
    questions = [question for question in QUESTIONS if "ALERTS{" not in question.expression]
    chosen = {**EVERYTHING, label: "elsewhere"}
    assert unanswered(watched.prometheus, questions, chosen) == questions


def test_the_fleet_has_a_line_with_all_figures_of_each_engine(watched: Watched) -> None:
    (fleet,) = (each for each in dashboards() if each["uid"] == "goodput-fleet")
    (table,) = (panel for panel in panels(fleet) if panel["type"] == "table")

    def whole() -> dict[str, dict[str, float]]:
        watched.ask()
        found = merged(watched.prometheus, table)
        return found if len(found["engine-0"]) == len(table["targets"]) else {}

    found = eventually(whole, within_s=ANSWERED_WITHIN_S, what="every figure of the engine")
    assert list(found["engine-0"]) == [
        *("up", "req/s", "waiting", "KV", "TTFT p95", "attainment", "$/h"),
    ]
    assert (found["engine-0"]["up"], found["away"]["up"]) == (1, 0)
    assert found["engine-0"]["$/h"] == 3


def merged(prometheus: Prometheus, table: Json) -> dict[str, dict[str, float]]:
    """The lines of a table by engine, as Grafana's transformations make them of its queries."""
    merge, organize = table["transformations"]
    assert (merge["id"], organize["id"]) == ("merge", "organize")
    found: dict[str, dict[str, float]] = {}
    for target in table["targets"]:
        column = organize["options"]["renameByName"][f"Value #{target['refId']}"]
        for series in prometheus.query(filled(target["expr"], {**GRAFANA, **EVERYTHING})):
            figure = float(series["value"][1])
            if not math.isnan(figure):
                found.setdefault(series["metric"]["engine"], {})[column] = figure
    return found


def is_missing(question: Asked) -> bool:
    return any(name.startswith(NOT_HERE) for name, _ in selectors(question.expression))


def test_graphs_with_traces_get_trace_ids(watched: Watched) -> None:
    """Queried like Grafana: with the whole expression; Prometheus selects its series."""
    traced = [question for question in every_question() if question.target["exemplar"]]
    assert len(traced) >= 4
    for question in traced:
        # Prometheus stores exemplars of buckets, and Grafana queries them over a range only.
        assert "_bucket{" in question.expression
        assert question.target["range"] is True
        expression = filled(question.expression, {**GRAFANA, **EVERYTHING})
        ask = partial(watched.prometheus.exemplars, expression)
        for exemplar in eventually(ask, within_s=ANSWERED_WITHIN_S, what="a trace"):
            assert re.fullmatch("[0-9a-f]{32}", exemplar["labels"]["trace_id"])
