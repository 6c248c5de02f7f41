"""`goodput-agent audit` on the real vLLM, started well and started badly."""

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from typer.testing import CliRunner

from agent.cli import main
from tests.real_engine.conftest import BAD_LENGTH
from tests.real_engine.watching import BAD_ENGINE, ENGINE, rows_once_there
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.collector import SpanRelay
from tests.real_parts.metric_pages import total
from tests.real_parts.ports import free_port
from tests.real_parts.vllm import ANSWER_WITHIN_S, PROMPT, Vllm, span_request_id
from tests.real_parts.waiting import eventually

pytestmark = pytest.mark.timeout(900)

PASS, WARN, FAIL, UNKNOWN = "pass", "warn", "fail", "unknown"
GPU_CHECKS = {
    *("parallelism", "memory errors", "clocks held down", "persistence mode", "utilisation"),
    *("CUDA graphs", "quantisation"),
}
WARM_UP = "before-the-check"
SEEN_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Audited:
    """An audit's exit code, and its lines by name."""

    exit_code: int
    lines: Mapping[str, Mapping[str, Any]]

    def findings(self) -> dict[str, str]:
        """What each check found."""
        return {name: line["finding"] for name, line in self.lines.items()}


@dataclass(frozen=True, slots=True)
class Watch:
    """An agent of both engines, its settings, and the relay that brings it spans."""

    config: Path
    relay: SpanRelay

    def audit(self, url: str) -> Audited:
        """Audit an engine, by a request of its own; the agent is that of the settings."""
        options = [url, "--config", str(self.config), "--send-request", "--json"]
        result = CliRunner().invoke(main, ["audit", *options])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.output
        lines = json.loads(result.stdout)["lines"]
        return Audited(result.exit_code, {line["check"]: line for line in lines})


@pytest.fixture(scope="module")
def watch(
    engine: Vllm,
    bad_engine: Vllm,
    ports: AgentPorts,
    plugin_socket: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Watch]:
    """An agent behind a relay, which has the span of a request."""
    folder = tmp_path_factory.mktemp("check")
    behind = AgentPorts(listen=ports.listen, grpc=free_port(), http=free_port())
    settings = {
        "engines": [
            {"name": ENGINE, "url": engine.url, "plugin_socket": str(plugin_socket)},
            {"name": BAD_ENGINE, "url": bad_engine.url},
        ],
        # Edges of the engine's histograms.
        "objectives": [{"name": "edges", "ttft_ms": 250, "tpot_ms": 100, "e2e_ms": 5000}],
        "nvml": {"enabled": False},
    }
    with (
        AgentProcess.with_settings(folder, behind, settings) as agent,
        SpanRelay(ports.grpc, [behind.grpc]) as relay,
    ):
        engine.complete(request_id=WARM_UP, max_tokens=2)
        rows_once_there(agent.api, {span_request_id(WARM_UP)})
        # While nobody listened the plugin paused for a second.
        eventually(
            lambda: plugin_is_heard(engine, agent), within_s=SEEN_WITHIN_S, what="the plugin"
        )
        yield Watch(folder / "agent.yml", relay)


def plugin_is_heard(engine: Vllm, agent: AgentProcess) -> bool:
    """Whether the agent heard of the engine's plugin, which tells of a request now."""
    engine.complete(request_id=f"{WARM_UP}-again", max_tokens=2)
    return total(agent.api.exposition(), "llm_engine_plugin_up", engine=ENGINE) == 1


def test_an_engine_that_was_started_well_passes(engine: Vllm, watch: Watch) -> None:
    audited = watch.audit(engine.url)
    findings = audited.findings()
    # Other tests have sent the engine requests that it refuses, more than it runs at once, and the
    # first ones after its start.
    by_others = {"warm-up", "queue", "--max-num-seqs"}
    assert {findings[name] for name in by_others} <= {PASS, WARN}
    findings = {
        name: found
        for name, found in findings.items()
        if name not in {*by_others, "refused requests"}
    }
    assert {name for name, finding in findings.items() if finding == UNKNOWN} == GPU_CHECKS
    assert {name for name, finding in findings.items() if finding == WARN} == {"graceful stop"}
    assert FAIL not in findings.values()
    assert "was there after" in audited.lines["single requests"]["seen"]
    assert audited.exit_code == 0 or audited.findings()["refused requests"] == FAIL


@pytest.mark.parametrize(
    ("lead_s", "finding", "seen"),
    [(4.0, WARN, "ahead"), (-20.0, FAIL, "behind"), (300.0, FAIL, "ahead")],
)
def test_a_clock_that_is_wrong_in_the_spans_is_seen(
    engine: Vllm, watch: Watch, lead_s: float, finding: str, seen: str
) -> None:
    watch.relay.lead_s = lead_s
    try:
        audited = watch.audit(engine.url)
    finally:
        watch.relay.lead_s = 0.0
    line = audited.lines["clocks"]
    assert (line["finding"], seen in line["seen"]) == (finding, True), line
    # By about as much as the spans were shifted, less the time that the request took.
    seen_s = float(line["seen"].split()[0])
    assert -1 < abs(lead_s) - seen_s < 3 + abs(lead_s) / 10
    assert audited.findings()["single requests"] == PASS


@pytest.fixture(scope="module")
def asked(bad_engine: Vllm) -> Vllm:
    """The bad engine after requests as long as it allows, and one that is too long."""
    prompt = PROMPT * 30
    longest = BAD_LENGTH - len(_tokens(bad_engine, prompt))

    def status(repeated: int) -> int:
        body = {"model": bad_engine.model, "prompt": prompt * repeated, "ignore_eos": True}
        if repeated == 1:
            body["max_tokens"] = longest
        return requests.post(
            f"{bad_engine.url}/v1/completions", json=body, timeout=ANSWER_WITHIN_S
        ).status_code

    with ThreadPoolExecutor(4) as clients:
        assert list(clients.map(status, [1] * 4)) == [200] * 4
    assert status(9) == 400
    return bad_engine


def _tokens(running: Vllm, prompt: str) -> list[int]:
    body = {"model": running.model, "prompt": prompt}
    response = requests.post(f"{running.url}/tokenize", json=body, timeout=ANSWER_WITHIN_S)
    tokens: list[int] = response.json()["tokens"]
    return tokens


def test_the_lines_of_an_engine_that_was_started_badly_turn(asked: Vllm, watch: Watch) -> None:
    audited = watch.audit(asked.url)
    findings, lines = audited.findings(), audited.lines
    assert {name for name, finding in findings.items() if finding == FAIL} == {
        "prefix caching",
        "size for the traffic",
        "preemptions",
        "--max-model-len",
        "single requests",
    }
    assert findings["refused requests"] == WARN
    # The agent hears the other engine's plugin.
    assert findings["plugin"] == WARN
    assert {findings[name] for name in ("statistics", "expected series", "health")} == {PASS}
    assert lines["--max-model-len"]["seen"].startswith(
        f"{BAD_LENGTH} tokens; requests have {BAD_LENGTH}"
    )
    assert "--num-gpu-blocks-override" in lines["size for the traffic"]["change"]
    assert "--otlp-traces-endpoint" in lines["single requests"]["change"]
    assert audited.exit_code == 1
