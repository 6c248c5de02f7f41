"""Alerts on a real Prometheus: of a real agent with a slow database, and of vLLM alone."""

import re
import sqlite3
import textwrap
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest
import yaml

from agent.render.alerts import Timings, render_alerts
from agent.render.alerts.agent_alerts import agent_alerts
from agent.render.alerts.alert_files import VLLM_ALONE
from agent.settings.settings_model import ObjectiveSettings
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.ports import free_port
from tests.real_parts.prometheus import Prometheus, scrape_of
from tests.real_parts.span_sender import SpanSender, request_span
from tests.real_parts.waiting import eventually
from tests.render.alerts.cases import expressions, series_of
from tests.sources.engines.wire import EngineServer

WITHIN_S = 60.0
# A window of five seconds; how long a row may wait stays the same.
FAST = Timings(speed=60, scrape_interval_s=1, evaluation_interval_s=1)
(BEHIND,) = (
    alert.expression for alert in agent_alerts(FAST) if alert.name == "LlmAgentStoreBehind"
)


@contextmanager
def one_sender(port: int) -> Iterator[None]:
    """Few spans at a time, and no more before these were taken, for as long as this lasts."""
    done = Event()

    def send() -> None:
        sender = SpanSender(port)
        while not done.is_set():
            sender.export([request_span("r") for _ in range(5)])

    thread = Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_a_locked_database_is_reported_with_the_rows_of_one_sender_alone(
    tmp_path: Path,
) -> None:
    ports = AgentPorts.free()
    # The engine itself is away: its spans are what matters.
    engine = {"name": "chat-0", "url": f"http://127.0.0.1:{free_port()}"}
    settings = {"nvml": {"enabled": False}, "engines": [engine]}
    with (
        AgentProcess.with_settings(tmp_path, ports, settings) as agent,
        Prometheus(tmp_path, scrape_of("agents", agent.url)) as prometheus,
        one_sender(ports.grpc),
        closing(sqlite3.connect(tmp_path / "goodput.db", isolation_level=None)) as other,
    ):
        stored = "sum(rate(llm_requests_total[5s])) > 0"
        eventually(lambda: prometheus.query(stored), within_s=WITHIN_S, what="stored requests")
        assert prometheus.query(BEHIND) == []
        other.execute("PRAGMA busy_timeout=30000")
        other.execute("BEGIN IMMEDIATE")
        eventually(lambda: prometheus.query(BEHIND), within_s=WITHIN_S, what="the alert")
        other.execute("ROLLBACK")
        eventually(lambda: not prometheus.query(BEHIND), within_s=WITHIN_S, what="its end")


PAGE = Path(__file__).parents[2] / "sources/engines/pages/vllm-0.32.0.txt"
RUNBOOK = Path(__file__).parents[3] / "docs/runbooks/VllmMissing.md"
# What releases before 0.11 call it.
OLDER = {'vllm:gpu_cache_usage_perc{engine!=""}'}


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that scrapes a vLLM and a Ray, that one also by the runbook's relabelling."""
    block = re.search(r"^ +```yaml\n(.*?)```", RUNBOOK.read_text(encoding="utf-8"), re.M | re.S)
    assert block is not None
    with EngineServer() as vllm, EngineServer() as ray:
        vllm.answers("/metrics", PAGE.read_bytes())
        ray.answers("/metrics", (PAGE.parent / "vllm-0.32.0-ray.txt").read_bytes())
        config, (scrape,) = scrape_of("vllm", vllm.url), scrape_of("ray", ray.url)["scrape_configs"]
        renamed = {**scrape, "job_name": "renamed", **yaml.safe_load(textwrap.dedent(block[1]))}
        config["scrape_configs"] += [scrape, renamed]
        with Prometheus(tmp_path_factory.mktemp("vllm"), config) as running:
            scraped = "count(up == 1) == 3"
            eventually(lambda: running.query(scraped), within_s=WITHIN_S, what="three scrapes")
            yield running


def test_each_selector_finds_its_series_in_an_exposition_of_the_real_vllm(
    prometheus: Prometheus,
) -> None:
    promised = ObjectiveSettings(name="chat", ttft_ms=200, tpot_ms=120, e2e_ms=10_000).objective()
    rules = yaml.safe_load(render_alerts([promised])[VLLM_ALONE])
    asked = {
        series
        for expression in expressions(rules)
        for series in series_of(expression)
        if not series.startswith("ALERTS{")
    }
    of_vllm = "{} and on (job) up{{job='vllm'}}"
    assert {series for series in asked if not prometheus.query(of_vllm.format(series))} == OLDER
    assert len(asked) > 10


def test_an_exposition_of_ray_is_read_with_the_relabelling_of_the_runbook(
    prometheus: Prometheus,
) -> None:
    """Its series get vLLM's own names; without that the rules see no engine at all."""
    seen = prometheus.query('vllm:num_requests_running{engine!=""}')
    assert {row["metric"]["job"] for row in seen} == {"vllm", "renamed"}
    steps = 'rate(vllm:iteration_tokens_total_count{engine!="",job="renamed"}[1m])'
    eventually(lambda: prometheus.query(steps), within_s=WITHIN_S, what="steps")
