"""The running agent beside sources that are down: each place says the same sentence of each."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from playwright.sync_api import Browser
from typer.testing import CliRunner

from agent.cli import main
from tests.catalog.test_other_programs import ROUTER
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.chromium import browsing, opened_in
from tests.real_parts.ports import free_port
from tests.real_parts.waiting import eventually
from tests.simulated import WITHIN_S
from tests.sources.dcgm.exporter_pages import page_of, row
from tests.sources.engines.wire import EngineServer

GPU = row("DCGM_FI_DEV_GPU_TEMP", 31)
# What an exporter on a machine without a GPU has.
NO_GPU = b"# no metric\n"


@pytest.fixture(scope="module")
def server() -> Iterator[EngineServer]:
    """A router at /metrics, a web server at /page/metrics and an exporter at /gpu."""
    with EngineServer() as running:
        running.answers("/metrics", ROUTER)
        running.answers("/page/metrics", b"<html><title>Welcome to nginx!</title></html>\n")
        running.answers("/gpu", NO_GPU)
        yield running


@pytest.fixture(scope="module")
def problems(server: EngineServer) -> dict[str, str]:
    """What is said of each engine of the settings."""
    gone = f"http://127.0.0.1:{free_port()}"
    return {
        "gone": f"{gone}/metrics cannot be reached: connection refused",
        "router": f"{server.url}/metrics has no series of a known engine: this looks like "
        "production-stack's router; give the URL of the engine; a router's own metrics go under "
        "`routers`",
        "page": f"{server.url}/page/metrics has an HTML page, not metrics: 'Welcome to nginx!'",
    }


@pytest.fixture(scope="module")
def agent(
    tmp_path_factory: pytest.TempPathFactory, server: EngineServer, problems: dict[str, str]
) -> Iterator[AgentProcess]:
    settings = {
        "engines": [
            {"name": name, "url": said.split("/metrics")[0], "scrape_interval": "0.5s"}
            for name, said in problems.items()
        ],
        "dcgm": {"url": f"{server.url}/gpu", "poll_interval": "0.5s"},
        "routers": [{"name": "front", "url": server.url, "scrape_interval": "0.5s"}],
    }
    folder = tmp_path_factory.mktemp("problems")
    with AgentProcess.with_settings(folder, AgentPorts.free(), settings) as running:
        yield running


def command(*words: str) -> str:
    """What a command prints on a wide terminal."""
    return CliRunner().invoke(main, [*words], env={"COLUMNS": "300"}).stdout


def test_the_api_says_why_each_engine_is_down(
    agent: AgentProcess, problems: dict[str, str]
) -> None:
    rows = agent.api.items("/api/v1/engines", {})
    assert {each["name"]: (each["up"], each["problem"]) for each in rows} == {
        name: (False, said) for name, said in problems.items()
    }


def test_an_engine_that_is_repaired_has_no_problem(
    agent: AgentProcess, server: EngineServer, problems: dict[str, str]
) -> None:
    def router() -> dict[str, Any]:
        rows = agent.api.items("/api/v1/engines", {})
        return next(each for each in rows if each["name"] == "router")

    server.answers("/metrics", b'vllm:num_requests_running{engine="0",model_name="m"} 0\n')
    eventually(lambda: router()["up"], within_s=WITHIN_S, what="the engine")
    assert router()["problem"] is None
    server.answers("/metrics", ROUTER)
    again = eventually(lambda: router()["problem"], within_s=WITHIN_S, what="the router")
    assert again == problems["router"]


def test_top_and_config_check_say_the_same(
    agent: AgentProcess, problems: dict[str, str], tmp_path: Path
) -> None:
    shown = command("top", agent.url, "--once")
    config = tmp_path / "agent.yml"
    engines = [{"name": name, "url": said.split("/metrics")[0]} for name, said in problems.items()]
    config.write_text(json.dumps({"engines": engines}))
    checked = command("config", "check", str(config), "--engines")
    for name, said in problems.items():
        assert f"{name} is down: {said}\n" in shown
        assert f"engine {name}: cannot be read: {said}\n" in checked


def test_the_page_says_why_each_engine_is_down(
    agent: AgentProcess, problems: dict[str, str]
) -> None:
    with browsing() as browser:
        assert_on_page(browser, agent.url, problems)


def assert_on_page(browser: Browser, url: str, problems: dict[str, str]) -> None:
    with opened_in(browser, url) as there:
        for name, said in problems.items():
            row_of = there.page.get_by_role("row").filter(has_text=name)
            row_of.get_by_text(
                re.compile(f"^(loading|unreachable) since .*: {re.escape(said)}$")
            ).first.wait_for()


def test_readyz_says_that_the_exporter_has_no_gpu_and_where_it_is_to_nobody(
    agent: AgentProcess, server: EngineServer
) -> None:
    def gpus() -> str:
        response = requests.get(f"{agent.url}/readyz", timeout=WITHIN_S)
        assert response.json()["status"] == "ok"
        assert server.address not in response.text
        return str(response.json()["parts"]["gpus"])

    assert gpus() == "dcgm.url has no series of dcgm-exporter or AMD's device-metrics-exporter"
    server.answers("/gpu", page_of(GPU))
    eventually(lambda: gpus() == "ok", within_s=WITHIN_S, what="a GPU")
    server.answers("/gpu", b"no", status=401)
    eventually(
        lambda: gpus() == "dcgm.url answered HTTP 401: it wants credentials",
        within_s=WITHIN_S,
        what="the problem",
    )
    server.answers("/gpu", page_of(row("DCGM_FI_DEV_GPU_TEMP", 31, UUID="")))
    eventually(lambda: gpus() == "the GPU exporter lists no GPU", within_s=WITHIN_S, what="no GPU")


def test_the_router_s_own_metrics_are_published_when_it_is_named_as_one(
    agent: AgentProcess,
) -> None:
    def published() -> list[str]:
        text = requests.get(f"{agent.url}/metrics", timeout=WITHIN_S).text
        return [line for line in text.splitlines() if line.startswith("llm_router_")]

    expected = [
        'llm_router_up{router="front"} 1.0',
        'llm_router_endpoints_ready{router="front"} 1.0',
    ]
    eventually(lambda: published() == expected, within_s=WITHIN_S, what="the router's metrics")
    parts = requests.get(f"{agent.url}/readyz", timeout=WITHIN_S).json()["parts"]
    assert parts["router front"] == "ok"
