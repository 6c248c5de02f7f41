"""The `top` command, of a running agent and of an engine that no agent watches."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from agent.cli import main
from agent.errors import EngineUnreachable, SettingsInvalid
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.ports import free_port
from tests.real_parts.recording_server import recording_server
from tests.real_parts.waiting import eventually
from tests.simulated import MODEL, WITHIN_S, Simulator, rows_in

PORTS = AgentPorts.free()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulator]:
    folder = tmp_path_factory.mktemp("engine")
    with Simulator(folder, grpc=PORTS.grpc, rate=8) as engine:
        yield engine


def shown(*words: str, **environment: str) -> Result:
    return CliRunner().invoke(main, ["top", *words], env={"COLUMNS": "120", **environment})


def values(*words: str) -> dict[str, Any]:
    result = shown(*words, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_an_engine_alone_shows_what_its_metrics_give(engine: Simulator) -> None:
    def counted() -> dict[str, Any]:
        found = values(engine.url, "--interval", "0.5")
        return found if found["latencies"] and found["rates"]["requests/s"] else {}

    found = eventually(counted, within_s=WITHIN_S, what="requests that end")
    (line,) = found["engines"]
    assert (line["name"], line["up"], line["model"]) == ("vllm", True, MODEL)
    assert None not in (line["running"], line["kv_cache_usage"])
    assert found["rates"]["output tokens/s"] > 0
    assert found["rates"]["goodput/s"] is None
    by_name = {each["name"]: each for each in found["latencies"]}
    assert by_name["ttft"]["quantiles_ms"]["p95"]["upper"] > 0
    text = shown(engine.url, "--once", "--interval", "0.1").stdout
    assert text.startswith(engine.url)
    assert "goodput-agent run --engine" in text


def test_a_running_agent_shows_its_figures_against_its_limits(
    engine: Simulator, tmp_path: Path
) -> None:
    with AgentProcess.without_file(tmp_path, PORTS, engine.url) as agent:
        rows_in(agent, 20)
        found = values(agent.url)
        environment = {"GOODPUT_LISTEN__PORT": str(PORTS.listen)}
        text = shown("--once", **environment).stdout
    (line,) = found["engines"]
    assert (line["name"], line["model"]) == ("engine-0", MODEL)
    ttft, tpot, *_ = found["latencies"]
    assert (ttft["limits_ms"], tpot["limits_ms"]) == ({"chat": 200.0}, {"chat": 120.0})
    assert ttft["quantiles_ms"]["p50"] > 0
    assert found["objectives"][0]["attainment"] is not None
    # No terminal is there: it printed once, and ended.
    assert text.startswith(f"http://127.0.0.1:{PORTS.listen}")
    assert "200 chat" in text


def test_an_agent_that_cannot_read_its_database_now_says_so() -> None:
    with recording_server() as agent:
        agent.status, agent.body = 503, b'{"detail": "the database did not answer in time"}'
        error = shown(agent.url).exception
        assert isinstance(error, SettingsInvalid)
        assert str(error) == f"{agent.url}: the database did not answer in time"
        agent.body = b"{}"
        assert isinstance(shown(agent.url).exception, EngineUnreachable)


def test_an_agent_of_another_version_is_one_sentence() -> None:
    with recording_server() as agent:
        agent.status, agent.body = 200, b'{"items": [{"facts": {}}]}'
        error = shown(agent.url).exception
    assert isinstance(error, SettingsInvalid)
    assert str(error).startswith(f"{agent.url} is an agent of another version, whose responses")


def test_an_address_where_nothing_answers_is_one_sentence() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    error = shown(url).exception
    assert isinstance(error, EngineUnreachable)
    assert str(error) == (
        f"neither an agent nor an engine answers: {url}/metrics cannot be reached: connection "
        "refused; start it, or correct the address"
    )
    error = shown(GOODPUT_LISTEN__PORT=url.rpartition(":")[2]).exception
    assert isinstance(error, SettingsInvalid)
    assert str(error).startswith(f"no agent responds at {url}: connection refused")
