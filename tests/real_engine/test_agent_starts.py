"""The agent started, stopped, killed and started again while the real engine serves."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.real_engine.watching import rows_once_there, settings, times_seen
from tests.real_parts.agent_process import AgentOfUser, AgentPorts, AgentProcess
from tests.real_parts.collector import Collector
from tests.real_parts.vllm import Vllm, span_request_id
from tests.real_parts.waiting import eventually

pytestmark = pytest.mark.timeout(1500)

PAUSE_S = 0.01


def test_the_address_of_the_engine_is_enough(
    engine: Vllm, ports: AgentPorts, tmp_path: Path
) -> None:
    """The agent is started as a user starts it."""
    with AgentOfUser.without_file(tmp_path, ports, engine.url) as agent:
        engine.complete(request_id="no-file", max_tokens=4)
        request_id = span_request_id("no-file")
        rows_once_there(agent.api, {request_id})
        row = agent.api.request(request_id)
    assert row["model"] == engine.model
    assert row["output_tokens"] == 4
    assert row["verdict"] in ("met", "missed")


@pytest.fixture(scope="module")
def agent(
    engine: Vllm,
    ports: AgentPorts,
    collector: Collector,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[AgentProcess]:
    """An agent with a new database."""
    folder = tmp_path_factory.mktemp("agent")
    with AgentProcess.with_settings(folder, ports, settings(engine, collector)) as running:
        yield running


@contextmanager
def repeating(step: Callable[[], None]) -> Iterator[None]:
    """Do this over and over in another thread until the block ends."""
    ended = threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            while not ended.wait(PAUSE_S):
                step()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    assert errors == []


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(AgentProcess.stop, id="SIGTERM"),
        pytest.param(AgentProcess.kill, id="kill -9"),
    ],
)
def test_every_request_of_the_engine_has_one_row_although_the_agent_restarted(
    end: Callable[[AgentProcess], None], engine: Vllm, agent: AgentProcess
) -> None:
    finished: list[str] = []

    def step() -> None:
        request_id = f"{end.__name__}-{len(finished)}"
        engine.complete(request_id=request_id, max_tokens=3)
        finished.append(span_request_id(request_id))

    def wait_for_more() -> None:
        least = len(finished) + 5
        eventually(lambda: len(finished) >= least, within_s=180, what=f"{least} requests")

    with repeating(step):
        wait_for_more()
        end(agent)
        wait_for_more()
        agent.start()
        wait_for_more()
    rows = rows_once_there(agent.api, finished)
    assert times_seen(rows, finished) == dict.fromkeys(finished, 1)
