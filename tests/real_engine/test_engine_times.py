"""An agent that gets no spans, and the times that the real engine gives in its responses."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import requests

from tests.real_engine.watching import ENGINE, RUNNING, SPANS_ARRIVE_WITHIN_S, Row
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.metric_pages import total
from tests.real_parts.ports import free_port
from tests.real_parts.vllm import ANSWER_WITHIN_S, PROMPT, Vllm
from tests.real_parts.waiting import eventually

pytestmark = pytest.mark.timeout(1500)

# Half of them must wait until others have ended.
ASKED = tuple(f"timed-{number}" for number in range(2 * RUNNING))
TOKENS = 50
SLACK_S = 1e-6
OPEN = "llm_agent_proxy_open_requests"


@dataclass(frozen=True, slots=True)
class Timed:
    """What the engine's response says of its own times, and the row that the agent made of it."""

    metrics: dict[str, float]
    row: Row


@pytest.fixture(scope="module")
def timed(engine: Vllm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Timed]]:
    """Requests at once through a proxy whose agent is where the engine sends no spans."""
    port = free_port()
    settings = {
        "engines": [{"name": ENGINE, "url": engine.url}],
        "proxy": {"listen": f"127.0.0.1:{port}", "engine": ENGINE, "join_wait": "1s"},
        "nvml": {"enabled": False},
    }
    folder, ports = tmp_path_factory.mktemp("timed"), AgentPorts.free()

    def ask(request_id: str) -> dict[str, Any]:
        response = requests.post(
            f"http://127.0.0.1:{port}/v1/completions",
            json={"model": engine.model, "prompt": PROMPT, "max_tokens": TOKENS}
            | {"ignore_eos": True},
            headers={"X-Request-Id": request_id},
            timeout=ANSWER_WITHIN_S,
        )
        response.raise_for_status()
        return dict(response.json()["metrics"])

    with AgentProcess.with_settings(folder, ports, settings) as agent:
        with ThreadPoolExecutor(len(ASKED)) as clients:
            # All are there before the first is computed.
            with engine.standing_still():
                answers = clients.map(ask, ASKED)
                eventually(
                    lambda: total(agent.api.exposition(), OPEN) == len(ASKED),
                    within_s=SPANS_ARRIVE_WITHIN_S,
                    what="all requests",
                )
            metrics = dict(zip(ASKED, answers, strict=True))

        def settled() -> dict[str, Row]:
            rows = {row["request_id"]: row for row in agent.api.requests() if row["counted"]}
            return rows if rows.keys() >= metrics.keys() else {}

        rows = eventually(settled, within_s=SPANS_ARRIVE_WITHIN_S, what="settled rows")
        yield [Timed(metrics[request_id], rows[request_id]) for request_id in ASKED]


def test_a_row_has_the_engines_own_times(timed: list[Timed]) -> None:
    for each in timed:
        said_s = {name: value / 1000 for name, value in each.metrics.items() if value is not None}
        row = each.row
        assert (row["vantage"], row["output_tokens"]) == ("proxy", TOKENS)
        assert row["queue_s"] == pytest.approx(said_s["queue_time_ms"], abs=SLACK_S)
        assert row["prefill_s"] == pytest.approx(said_s["time_to_first_token_ms"], abs=SLACK_S)
        assert row["decode_s"] == pytest.approx(said_s["generation_time_ms"], abs=SLACK_S)
        assert row["engine_tpot_s"] == pytest.approx(said_s["mean_itl_ms"], abs=SLACK_S)


def test_the_time_to_the_first_token_has_the_queue_that_the_engine_leaves_out(
    timed: list[Timed],
) -> None:
    for each in timed:
        row = each.row
        assert row["engine_ttft_s"] == pytest.approx(row["queue_s"] + row["prefill_s"])
        assert row["engine_ttft_s"] + row["decode_s"] <= row["e2e_s"] + SLACK_S
    # A request that waited did so for as long as another one took.
    waited = [each for each in timed if each.row["queue_s"] > each.row["prefill_s"]]
    assert len(waited) >= len(ASKED) - RUNNING
    for each in waited:
        assert each.row["engine_ttft_s"] > 2 * each.metrics["time_to_first_token_ms"] / 1000
