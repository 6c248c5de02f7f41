"""The running agent beside an engine with four data-parallel ranks and a log of its experts."""

import re
from contextlib import suppress
from pathlib import Path

import pytest

from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.metric_pages import total
from tests.real_parts.waiting import eventually
from tests.simulated import WITHIN_S
from tests.sources.engines.fixture_pages import body
from tests.sources.engines.wire import EngineServer

pytestmark = pytest.mark.slow

PAGE = body("vllm-0.33.0-dp4").decode()
# As vLLM's own logger writes it.
EXPERTS = (
    "INFO 11-28 12:00:00 [eplb_state.py:634] EPLB step: {} for model m: avg_tokens={:.2f}, "
    "max_tokens={:d}, balancedness={:.4f}, steps until the next rearrangement: 2700\n"
)
LABELS = {"engine": "chat-0", "model": "org/model-8b"}


_GAPS = re.compile(
    r'(vllm:inter_token_latency_seconds_(?:sum|count|bucket)\{engine="(\d)".*\}) (\S+)'
)


def later(page: str) -> str:
    """The same page after 40 more gaps of each rank: of 25 ms, and of 50 ms on rank 3."""

    def counted(found: re.Match[str]) -> str:
        series, rank, value = found.groups()
        took_s = 2.0 if rank == "3" else 1.0
        return f"{series} {float(value) + (took_s if '_sum{' in series else 40)}"

    assert _GAPS.search(page)
    return _GAPS.sub(counted, page)


def shown(agent: AgentProcess, name: str, value: float, **labels: str) -> None:
    """Wait until a series of the agent has this value."""

    def is_there() -> bool:
        with suppress(KeyError):
            return total(agent.api.exposition(), name, **labels) == pytest.approx(value)
        return False

    eventually(is_there, within_s=WITHIN_S, what=f"{name} {labels} {value}")


def test_the_load_of_each_rank_their_skew_and_the_balance_of_experts_are_published(
    tmp_path: Path,
) -> None:
    log = tmp_path / "engine.log"
    log.write_text("")
    with EngineServer() as engine:
        engine.answers("/metrics", PAGE.encode())
        chat = {"name": "chat-0", "url": engine.url, "scrape_interval": "0.5s", "log": str(log)}
        settings = {"engines": [chat]}
        with AgentProcess.with_settings(tmp_path, AgentPorts.free(), settings) as agent:
            for rank, (running, waiting) in enumerate(((3, 0), (4, 2), (5, 4), (6, 6))):
                labels = {**LABELS, "rank": str(rank)}
                shown(agent, "llm_engine_rank_requests_running", running, **labels)
                shown(agent, "llm_engine_rank_requests_waiting", waiting, **labels)
            shown(agent, "llm_engine_rank_kv_cache_usage_ratio", 0.9, **LABELS, rank="1")
            shown(agent, "llm_engine_rank_skew_ratio", 12 / 7.5, **LABELS, measure="requests")
            engine.answers("/metrics", later(PAGE).encode())
            shown(agent, "llm_engine_rank_step_seconds", 0.025, **LABELS, rank="0")
            shown(agent, "llm_engine_rank_step_seconds", 0.05, **LABELS, rank="3")
            shown(agent, "llm_engine_rank_skew_ratio", 1.6, **LABELS, measure="step_time")
            (row,) = agent.api.items("/api/v1/engines", {})
            assert row["rank_skew"]["requests"] == pytest.approx(12 / 7.5)
            assert row["rank_skew"]["step_time"] == pytest.approx(1.6)
            with log.open("a") as lines:
                lines.write(EXPERTS.format(300, 1536.0, 2048, 0.75))
                lines.write(EXPERTS.format(400, 256.0, 1024, 0.25))
            shown(agent, "llm_engine_expert_balance_ratio", 1792 / 3072, engine="chat-0")
