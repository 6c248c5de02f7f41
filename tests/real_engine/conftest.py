"""One real vLLM for all tests of this folder; each module watches it with an agent of its own."""

from collections.abc import Iterator

import pytest

from tests.real_engine.watching import ENGINE, rows_once_there, settings
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.collector import Collector
from tests.real_parts.ports import free_port
from tests.real_parts.vllm import SpanExport, Vllm, span_request_id

WARM_UP = "warm-up"


@pytest.fixture(scope="session")
def ports() -> AgentPorts:
    """Where every agent of these tests listens, as a running engine cannot be told anew."""
    return AgentPorts.free()


@pytest.fixture(scope="session")
def engine(ports: AgentPorts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    """The real vLLM, sending its spans over gRPC until a test restarts it otherwise."""
    folder = tmp_path_factory.mktemp("vllm")
    spans = SpanExport.grpc(ports.grpc)
    with Vllm(folder, port=free_port(), spans=spans, service=ENGINE) as running:
        yield running


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    """Where the agent forwards what it receives, so that spans can be read without it."""
    with Collector() as running:
        yield running


@pytest.fixture(scope="module")
def agent(
    engine: Vllm,
    ports: AgentPorts,
    collector: Collector,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[AgentProcess]:
    """An agent with a new database that has seen the engine's first span."""
    folder = tmp_path_factory.mktemp("agent")
    with AgentProcess.with_settings(folder, ports, settings(engine, collector)) as running:
        engine.complete(request_id=WARM_UP, max_tokens=2)
        rows_once_there(running.api, {span_request_id(WARM_UP)})
        yield running
