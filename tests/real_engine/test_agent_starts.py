"""The agent started, stopped, killed and started again while the real engine serves."""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agent.cli import main
from tests.real_engine.watching import rows_once_there, settings, times_seen
from tests.real_parts.agent_process import AgentOfUser, AgentPorts, AgentProcess
from tests.real_parts.collector import Collector
from tests.real_parts.metric_pages import total
from tests.real_parts.vllm import Vllm, span_request_id
from tests.real_parts.waiting import eventually

pytestmark = pytest.mark.timeout(1500)

LOG = logging.getLogger(__name__)
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


def test_a_plain_engine_has_its_load_after_one_scrape_and_its_rates_a_second_later(
    engine: Vllm, tmp_path: Path
) -> None:
    """Its spans go elsewhere. With `--log-cli-level INFO`: the seconds since the command."""
    numbers = count()

    def ask() -> None:
        engine.complete(request_id=f"plain-{next(numbers)}", max_tokens=4)

    began_s = time.monotonic()
    with repeating(ask), AgentOfUser.without_file(tmp_path, AgentPorts.free(), engine.url) as agent:
        (load,) = eventually(lambda: loads(agent), within_s=60.0, what="the load")
        LOG.info("load after %.1f s", time.monotonic() - began_s)
        counted = eventually(
            lambda: agent.api.summary()["engine_counts"], within_s=60.0, what="counts"
        )
        LOG.info("rates after %.1f s", time.monotonic() - began_s)
        scrapes = total(agent.api.exposition(), "llm_agent_scrapes_total", outcome="ok")
        summary = agent.api.summary()
        shown = CliRunner().invoke(main, ["top", agent.url, "--json"])
        alone = CliRunner().invoke(main, ["top", engine.url, "--json", "--interval", "1"])
        LOG.info("top of both after %.1f s", time.monotonic() - began_s)
    assert load["running"] is not None
    assert 2 <= scrapes <= 3
    assert counted["output_tokens_per_s"] == pytest.approx(4 * counted["throughput_rps"], rel=0.2)
    assert counted["latencies_ms"]["ttft"]["p50"]["upper"] > 0
    assert (summary["requests"], summary["throughput_rps"]) == (0, None)
    for result in (shown, alone):
        assert json.loads(result.stdout)["rates"]["requests/s"] > 0, result.output


def loads(agent: AgentProcess) -> list[dict[str, Any]]:
    """The engines whose load is known."""
    engines = agent.api.items("/api/v1/engines", {})
    return [each for each in engines if each["running"] is not None]


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
