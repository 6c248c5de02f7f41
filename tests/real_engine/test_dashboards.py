"""Every panel and every alert on a real Prometheus that scrapes the real engine and its agent."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from agent.catalog.efficiency_metrics import EFFICIENCY_METRICS
from agent.settings.settings_model import Settings
from tests.real_engine.watching import ENGINE, engine_away
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.collector import Collector
from tests.real_parts.ports import free_port
from tests.real_parts.prometheus import Prometheus, scrape_of
from tests.real_parts.vllm import PROMPT, Vllm
from tests.real_parts.waiting import eventually
from tests.render.alerts.cases import expressions, series_of
from tests.render.dashboards.answering import every_question, never_answered
from tests.render.dashboards.reading import selectors

pytestmark = pytest.mark.timeout(1500)

ALERTS = Path(__file__).parents[2] / "alerts"
WITH_AGENT, ALONE = "goodput-agent.yml", "vllm-alone.yml"
ANSWERED_WITHIN_S = 180.0

# Prefixes of series that do not exist here, by the reason.
NO_GPU = ("gpu_",)
NO_DRAFTS = ("llm_engine_spec_decode_",)
NO_TRANSFERS = ("llm_engine_kv_transfer", "llm_engine_kv_offload_")
NOTHING_MISSING = ("llm_engine_fact_missing",)
# Of its KV cache it says only that its width is the model's.
NOT_TOLD_BY_VLLM = ("llm_engine_requests_aborted_total", "llm_engine_kv_value_bytes")
# Series of an agent with other limits than those of the rules.
NO_DIFFERENCE = ('llm_slo_limit_seconds{objective="chat",measure!~"ttft|tpot"}',)
# Published after the first minute, for which the tests do not wait.
WITHIN_A_MINUTE = (
    "llm_engine_time_seconds_total",
    "llm_unaccounted_input_tokens_total",
    "llm_unaccounted_output_tokens_total",
    "llm_unaccounted_requests_total",
    "llm_rows_without_tokens_total",
)
# What hangs on the machine of the test: whether its kernel tells the memory of a control group.
BY_MACHINE = ("llm_engine_memory_", "llm_engine_oom_kills_total")
# What the engine was asked before: whether it ever failed to answer.
BY_HISTORY = ("llm_engine_requests_failed_total", 'http_requests_total{status="5xx"}')
# Without a GPU, the model's config and a price nothing of these can be known.
NOTHING_TO_RECKON_WITH = tuple(
    metric.name
    for metric in EFFICIENCY_METRICS
    if not any(name.startswith(metric.name) for name in WITHIN_A_MINUTE)
)

# The agent publishes nothing.
NOT_PUBLISHED = (
    "llm_agent_unpublished_",
    "llm_agent_publish",
    "llm_agent_file_",
    "llm_agent_lost_",
)
# Its proxy has one engine, which never leaves the rotation.
NO_ROTATION = ("llm_proxy_engine_", "llm_proxy_requests_")
# It pushes no metrics, and its engine is in the settings.
NOT_CONFIGURED = ("llm_agent_metrics_push", "llm_agent_discover")
NOT_HERE = (
    *(*NO_GPU, *NO_DRAFTS, *NO_TRANSFERS, *NOTHING_MISSING, *NOT_TOLD_BY_VLLM),
    *(*NO_DIFFERENCE, *NOTHING_TO_RECKON_WITH, *NOT_PUBLISHED, *NO_ROTATION, *NOT_CONFIGURED),
)
PERHAPS = (*BY_MACHINE, *BY_HISTORY, *WITHIN_A_MINUTE)
# The names before release 0.11.
OLDER = ("vllm:gpu_cache_usage_perc",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A Prometheus that scrapes an engine and its agent, and the proxy between it and its users."""

    prometheus: Prometheus
    engine: Vllm
    proxy: str

    def ask(self) -> None:
        """A streamed request through the proxy that runs during a scrape or two."""
        body = {"prompt": PROMPT, "max_tokens": 256, "ignore_eos": True, "stream": True}
        response = requests.post(
            f"{self.proxy}/v1/completions",
            json={"model": self.engine.model, **body},
            timeout=ANSWERED_WITHIN_S,
        )
        response.raise_for_status()


def evaluated_often(name: str, folder: Path) -> Path:
    """A copy of a file of rules that are not waited for."""
    rules = yaml.safe_load((ALERTS / name).read_text())
    for group in rules["groups"]:
        group["interval"] = "1s"
    copy = folder / name
    copy.write_text(yaml.safe_dump(rules))
    return copy


def configuration(agent: AgentProcess, engine: Vllm, folder: Path) -> dict[str, Any]:
    """Two scrapes, with the rules for a site with an agent and those for one without."""
    config = scrape_of("goodput-agent", agent.url)
    config["scrape_configs"] += scrape_of("vllm", engine.url)["scrape_configs"]
    return config | {"rule_files": [str(evaluated_often(n, folder)) for n in (WITH_AGENT, ALONE)]}


def settings(engine: Vllm, plugin: Path, collector: Collector, proxy: int) -> dict[str, Any]:
    """The real engine with its plugin and one that is away, and a proxy.

    Promised is what ours promise and more.
    """
    return {
        "otlp": {"forward_to": f"grpc://127.0.0.1:{collector.port}"},
        "nvml": {"enabled": False},
        "engines": [
            {
                "name": ENGINE,
                "url": engine.url,
                "scrape_interval": "1s",
                "plugin_socket": str(plugin),
            },
            engine_away(),
        ],
        "proxy": {"listen": f"127.0.0.1:{proxy}", "engine": ENGINE, "join_wait": "2s"},
        "objectives": [
            {"name": "chat", "preset": "chat"},
            {"name": "answers", "e2e_ms": 10_000},
            # Missed by all, so that causes are there.
            {"name": "at-once", "ttft_ms": 1},
        ],
    }


@pytest.fixture(scope="module")
def watched(
    engine: Vllm,
    plugin_socket: Path,
    ports: AgentPorts,
    collector: Collector,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Watched]:
    """An agent of its own, on the ports that the engine sends its spans to."""
    folder, proxy = tmp_path_factory.mktemp("dashboards"), free_port()
    configured = settings(engine, plugin_socket, collector, proxy)
    with (
        AgentProcess.with_settings(folder, ports, configured) as agent,
        Prometheus(folder, configuration(agent, engine, folder)) as prometheus,
    ):
        yield Watched(prometheus=prometheus, engine=engine, proxy=f"http://127.0.0.1:{proxy}")


def test_every_panel_has_data_except_for_missing_series(watched: Watched) -> None:
    asked = every_question(Settings().all_objectives())

    def about(names: tuple[str, ...]) -> set[str]:
        return {
            question.name
            for question in asked
            if any(name.startswith(names) for name, _ in selectors(question.expression))
        }

    not_here, perhaps = about(NOT_HERE), about(PERHAPS)
    never = never_answered(
        watched.prometheus,
        asked,
        silent=not_here | perhaps,
        meanwhile=watched.ask,
        within_s=ANSWERED_WITHIN_S,
    )
    assert sorted(never - perhaps) == sorted(not_here)
    assert len({question.name for question in asked} - not_here - perhaps) > 100


def series_selected_by(rules: str) -> set[str]:
    """The series that a file of rules selects."""
    document = yaml.safe_load((ALERTS / rules).read_text())
    asked = {series for expression in expressions(document) for series in series_of(expression)}
    return {series for series in asked if not series.startswith("ALERTS{")}


def missing(watched: Watched, asked: set[str], but: set[str]) -> set[str]:
    """Those that are not there yet when all `but` these have come."""
    left = set(asked)

    def settled() -> bool:
        watched.ask()
        for series in asked:
            if watched.prometheus.query(f"last_over_time({series}[1h])"):
                left.discard(series)
        return left <= but

    with suppress(AssertionError):
        eventually(settled, within_s=ANSWERED_WITHIN_S, what="series")
    return left


@pytest.mark.parametrize(
    ("rules", "names", "at_least"), [(WITH_AGENT, NOT_HERE, 50), (ALONE, OLDER, 14)]
)
def test_each_selector_of_the_alerts_finds_its_series_except_missing_ones(
    watched: Watched, rules: str, names: tuple[str, ...], at_least: int
) -> None:
    asked = series_selected_by(rules)
    not_here = {series for series in asked if series.startswith(names)}
    perhaps = {series for series in asked if series.startswith(PERHAPS)}
    left = missing(watched, asked, but=not_here | perhaps)
    assert sorted(left - perhaps) == sorted(not_here)
    assert len(asked - left) >= at_least


def test_each_rule_can_be_evaluated(watched: Watched) -> None:
    errors = watched.prometheus.rule_errors
    eventually(
        lambda: "unknown" not in errors().values(),
        within_s=ANSWERED_WITHIN_S,
        what="a first try of every rule",
    )
    assert errors() == {}
