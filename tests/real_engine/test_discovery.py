"""An agent and a vLLM with the plugin on one machine find each other without a setting."""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.metric_pages import total
from tests.real_parts.ports import free_port
from tests.real_parts.vllm import Vllm, plugin_environment
from tests.real_parts.waiting import eventually

pytestmark = pytest.mark.timeout(900)

# `run --engine` names an engine after its place in the list.
ENGINE = "engine-0"
WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Found:
    """An engine, and the agent that was started before it."""

    engine: Vllm
    agent: AgentProcess

    def metric(self, name: str) -> float | None:
        """A metric of the engine; None while it is absent."""
        try:
            return total(self.agent.api.exposition(), name, engine=ENGINE)
        except KeyError:
            return None


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Found]:
    folder = tmp_path_factory.mktemp("found")
    # For a user who may not make a folder in /run.
    place = {"XDG_RUNTIME_DIR": str(folder)}
    plugin = plugin_environment(folder / "plugin", Path()) | {"GOODPUT_AGENT_SOCKET": ""}
    engine = Vllm(folder, port=free_port(), spans=None, environment=plugin | place)
    agent = AgentProcess.without_file(
        folder, AgentPorts.free(), engine.url, place | {"GOODPUT_AGENT_SOCKET": "auto"}
    )
    with agent:
        before = Found(engine, agent)
        assert before.metric("llm_engine_plugin_up") is None
        with engine:
            yield before


def test_a_request_has_a_row_with_both_views(found: Found) -> None:
    eventually(
        lambda: found.metric("llm_engine_plugin_up") == 1, within_s=WITHIN_S, what="the plugin"
    )
    found.engine.complete(request_id="found", max_tokens=12)
    rows = eventually(
        lambda: [row for row in found.agent.api.requests() if row["request_id"] == "found"],
        within_s=WITHIN_S,
        what="its row",
    )
    (row,) = rows
    assert (row["engine"], row["vantage"], row["status"]) == (ENGINE, "joined", "ok")
    assert (row["output_tokens"], row["preemptions"], row["finish_reason"]) == (12, 0, "length")
    # Before vLLM listened, its plugin had no records.
    assert "is of no known engine" not in found.agent.log()
    eventually(
        lambda: found.metric("llm_engine_open_requests") == 0, within_s=WITHIN_S, what="its file"
    )


def test_requests_that_are_open_when_the_front_dies_are_of_its_engine(found: Found) -> None:
    """The last test of its engine."""
    with found.engine.streaming(request_id="died", max_tokens=1900):
        with found.engine.standing_still():
            eventually(
                lambda: found.metric("llm_engine_open_requests") == 1,
                within_s=WITHIN_S,
                what="the open request",
            )
            os.kill(found.engine.front_pid, signal.SIGKILL)
        rows = eventually(
            lambda: [row for row in found.agent.api.requests() if row["request_id"] == "died"],
            within_s=WITHIN_S,
            what="its row",
        )
    assert [(row["engine"], row["status"], row["error"]) for row in rows] == [
        (ENGINE, "error", "front_died")
    ]
