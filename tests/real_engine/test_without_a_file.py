"""The agent as a user starts it, with nothing but the address of the engine."""

from pathlib import Path

import pytest

from tests.real_engine.watching import rows_once_there
from tests.real_parts.agent_process import AgentOfUser, AgentPorts
from tests.real_parts.vllm import Vllm, span_request_id

pytestmark = pytest.mark.timeout(1500)


def test_the_address_of_the_engine_is_enough(
    engine: Vllm, ports: AgentPorts, tmp_path: Path
) -> None:
    with AgentOfUser.without_file(tmp_path, ports, engine.url) as agent:
        engine.complete(request_id="no-file", max_tokens=4)
        request_id = span_request_id("no-file")
        rows_once_there(agent.api, {request_id})
        row = agent.api.request(request_id)
    assert row["model"] == engine.model
    assert row["output_tokens"] == 4
    assert row["verdict"] in ("met", "missed")
