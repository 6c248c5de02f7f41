"""The running agent beside an engine that sends no span: what nearly everybody has."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.metric_pages import total
from tests.real_parts.ports import free_port
from tests.real_parts.waiting import eventually
from tests.simulated import Simulator

pytestmark = pytest.mark.slow

WITHIN_S = 120.0
ENOUGH = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("untraced")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Simulator]:
    """A busy engine whose spans go nowhere."""
    with Simulator(folder, grpc=free_port(), rate=8) as engine:
        yield engine


@pytest.fixture(scope="module")
def agent(folder: Path, engine: Simulator) -> Iterator[AgentProcess]:
    settings = {
        "name": "agent-0",
        "engines": [{"name": "chat-0", "url": engine.url, "scrape_interval": "1s"}],
    }
    with AgentProcess.with_settings(folder, AgentPorts.free(), settings) as agent:
        yield agent


def counted(agent: AgentProcess, at_least: float = ENOUGH) -> dict[str, Any]:
    """What the engine counted, once it has counted so many requests."""

    def read() -> dict[str, Any]:
        found: dict[str, Any] | None = agent.api.summary()["engine_counts"]
        return found if found and found["requests"] >= at_least else {}

    return eventually(read, within_s=WITHIN_S, what=f"{at_least} counted requests")


def test_everything_that_the_engine_counts_is_shown_and_nothing_is_zero_that_is_unknown(
    agent: AgentProcess, engine: Simulator
) -> None:
    found = counted(agent)
    now = requests.get(f"{engine.url}/metrics", timeout=10).text
    assert found["requests"] <= total(now, "vllm:request_success_total")
    assert found["output_tokens_per_s"] > 0
    for name in ("ttft", "tpot", "itl", "e2e", "queue", "prefill", "decode"):
        p95 = found["latencies_ms"][name]["p95"]
        assert 0 <= p95["lower"] <= p95["estimate"] <= (p95["upper"] or p95["estimate"])
    summary = agent.api.summary()
    assert summary["requests"] == 0
    assert summary["throughput_rps"] is None
    (attained,) = found["attainment"]
    assert 0 <= attained["lower"] <= attained["upper"] <= 1


def test_what_was_counted_stays_when_the_agent_starts_again(agent: AgentProcess) -> None:
    before = counted(agent)["requests"]
    agent.stop()
    agent.start()
    assert counted(agent, 0)["requests"] >= before
    assert counted(agent, before + ENOUGH)["requests"] >= before + ENOUGH
