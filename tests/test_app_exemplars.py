"""The agent's exemplars in a real Prometheus, with requests that wait in vain for a span."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.real_parts.agent_process import AgentPorts
from tests.real_parts.prometheus import Prometheus, scrape_of
from tests.real_parts.waiting import eventually
from tests.simulated import WITHIN_S, Simulator
from tests.test_app_proxy import QUIET, Proxied, proxied_by

pytestmark = pytest.mark.timeout(300)

ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Scraped:
    """A proxy whose agent is scraped, and the log of the scraper."""

    proxied: Proxied
    prometheus: Prometheus
    log: Path


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    """A proxy before one engine, and Prometheus."""
    folder, ports = tmp_path_factory.mktemp("scraped"), AgentPorts.free()
    with Simulator(folder, grpc=ports.grpc, scenario=QUIET) as engine:
        proxied = proxied_by(folder, ports, [engine])
        with (
            proxied.agent,
            Prometheus(folder, scrape_of("goodput-agent", proxied.agent.url)) as prometheus,
        ):
            yield Scraped(proxied, prometheus, folder / "prometheus.log")


def leave(proxied: Proxied, request_id: str) -> None:
    """A client that leaves after the first event: the engine sends no span."""
    with proxied.post(8000, {"X-Request-Id": request_id}, ignore_eos=True) as stream:
        next(stream.iter_lines())


def scraped_after_leaving(prometheus: Prometheus, requests: int) -> bool:
    """Whether a scrape has this many requests of clients that left."""
    return bool(prometheus.query(f'sum(llm_requests_total{{status="cancelled"}}) == {requests}'))


def test_prometheus_refuses_no_exemplar(scraped: Scraped) -> None:
    for number in range(1, ROUNDS + 1):
        leave(scraped.proxied, f"left-{number}")
        scraped.proxied.chat(f"stayed-{number}")
        assert scraped.proxied.row(f"stayed-{number}")["vantage"] == "joined"
        eventually(
            partial(scraped_after_leaving, scraped.prometheus, number),
            within_s=WITHIN_S,
            what="a scrape after the request was settled alone",
        )
    assert scraped.prometheus.exemplars("gen_ai_server_time_to_first_token_seconds_bucket")
    assert "out-of-order exemplars" not in scraped.log.read_text()
