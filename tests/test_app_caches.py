"""The running agent beside an engine that drafts and loads KV values, by vLLM's own classes."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.engine_scripts import answer_of
from tests.real_parts.metric_pages import total
from tests.real_parts.waiting import eventually
from tests.simulated import WITHIN_S
from tests.sources.engines.fixture_pages import body
from tests.sources.engines.wire import EngineServer

pytestmark = pytest.mark.slow

MORE = {
    "drafts": [[[3, 2], [3, 0], [3, 1]], [[3, 3]]],
    "loads": [[0.5, 1000], [0.25, 400]],
    "tier_reads": [[0.125, 500]],
}
NONE_YET = {"drafts": [[[3, 0]]], "loads": [[0.0, 0]], "tier_reads": [[0.0, 0]]}


def page(asked: object, found_outside: int) -> bytes:
    """The engine's page with these drafts and loads."""
    own = str(answer_of("vllm_cache_metrics.py", asked)["page"])
    outside = "vllm:external_prefix_cache_{}_total"
    lines = []
    for line in body("vllm-0.32.0").decode().splitlines():
        name, space, labels = line.partition("{")
        if name == outside.format("hits"):
            line = f"{name}{space}{labels.rpartition(' ')[0]} {found_outside}"
        if name == outside.format("queries"):
            line = f"{name}{space}{labels.rpartition(' ')[0]} {2 * found_outside}"
        lines.append(line)
    return ("\n".join(lines) + "\n" + own).encode()


@pytest.fixture
def engine() -> Iterator[EngineServer]:
    with EngineServer() as engine:
        engine.answers("/metrics", page(NONE_YET, 0))
        yield engine


def savings(agent: AgentProcess) -> dict[str, Any]:
    """What the engine saved, once the agent has counted it."""

    def read() -> dict[str, Any]:
        counted = agent.api.summary()["engine_counts"]
        found: list[dict[str, Any]] = counted["savings"] if counted else []
        return found[0] if found and found[0]["offload"] else {}

    return eventually(read, within_s=WITHIN_S, what="the engine's savings")


def test_loads_and_drafts_are_published_and_judged(engine: EngineServer, tmp_path: Path) -> None:
    chat = {"name": "chat-0", "url": engine.url, "scrape_interval": "0.5s"}
    with AgentProcess.with_settings(tmp_path, AgentPorts.free(), {"engines": [chat]}) as agent:

        def scraped(drafts: float) -> bool:
            with suppress(KeyError):
                name = "llm_engine_spec_decode_drafts_total"
                return total(agent.api.exposition(), name, engine="chat-0") == drafts
            return False

        eventually(lambda: scraped(1), within_s=WITHIN_S, what="the first page")
        engine.answers("/metrics", page(MORE, 500))
        eventually(lambda: scraped(4), within_s=WITHIN_S, what="the second page")
        shown = agent.api.exposition()
        position = "llm_engine_spec_decode_accepted_tokens_by_position_total"
        assert [total(shown, position, position=str(n)) for n in range(3)] == [3, 2, 1]
        assert total(shown, "llm_engine_kv_offload_load_seconds_total") == 0.75
        assert total(shown, "llm_engine_external_cache_hit_tokens_total") == 500
        found = savings(agent)
        assert found["engine"] == "chat-0"
        assert (found["offload"]["hit_ratio"], found["offload"]["load_s"]) == (0.5, 0.875)
        # Its prompts were all before: there is no time of prefill to compare with.
        assert found["offload"]["verdict"] == "unknown"
        # Three drafts more, with six accepted tokens.
        assert found["speculation"]["mean_accepted_length"] == 3.0
        assert found["speculation"]["at_least"] == 0.75
