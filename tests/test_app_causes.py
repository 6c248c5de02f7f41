"""A running agent names the cause of missed requests, from spans and samples of its engine."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

import pytest
import requests

from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.metric_pages import total
from tests.real_parts.waiting import eventually
from tests.simulated import WITHIN_S, Simulator, rows_in

pytestmark = pytest.mark.slow

USUAL = 20
MISSED = 10
SCENARIO = {
    **{"arrival_rate": 5.0, "time_scale": 2.0, "max_num_seqs": 64},
    "output_tokens": {"median": 5, "sigma": 0.1, "min": 2, "max": 20},
    "input_tokens": {"median": 300, "sigma": 0.3, "min": 100, "max": 1000},
}


@dataclass(frozen=True, slots=True)
class Deferred:
    """An agent after its engine deferred requests and stopped, and the causes of the misses."""

    agent: AgentProcess
    causes: Counter[str]


@pytest.fixture(scope="module")
def deferred(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deferred]:
    """The agent has seen what requests usually take."""
    folder, ports = tmp_path_factory.mktemp("causes"), AgentPorts.free()
    with Simulator(folder, grpc=ports.grpc, scenario=SCENARIO) as engine:
        settings = {
            "engines": [{"name": "engine-0", "url": engine.url, "scrape_interval": "1s"}],
            "objectives": [{"name": "chat", "ttft_ms": 400}],
        }
        with AgentProcess.with_settings(folder, ports, settings) as agent:
            rows_in(agent, USUAL)
            causes = causes_of_deferred(engine, agent)
            # While requests miss, no two views are of one moment.
            engine.process.stop()
            yield Deferred(agent, causes)


def causes_of_deferred(simulator: Simulator, agent: AgentProcess) -> Counter[str]:
    fault = {"defer_ratio": 1.0, "defer_s": 0.8}
    url = f"{simulator.url}/simulator/fault"
    # Before it, requests that a busy machine delays miss as well.
    faulty_from = datetime.now(UTC)
    requests.put(url, json=fault, timeout=WITHIN_S).raise_for_status()

    def causes() -> Counter[str]:
        rows = agent.api.requests(limit="1000", verdict="missed")
        faulty = [row for row in rows if datetime.fromisoformat(row["started_at"]) > faulty_from]
        return Counter(row["cause"] for row in faulty if row["cause"] is not None)

    def named() -> Counter[str]:
        found = causes()
        return found if found["deferred"] + found["grammar"] >= MISSED else Counter()

    return eventually(named, within_s=WITHIN_S, what=f"{MISSED} requests that were deferred")


def test_missed_requests_get_their_cause(deferred: Deferred) -> None:
    found = deferred.causes
    # While the machine stops there are no samples to tell by.
    of_others = found.total() - found["unexplained"] - found["deferred"] - found["grammar"]
    assert of_others <= 0.1 * found.total(), found


def test_the_seconds_of_requests_counters_and_summary_agree(deferred: Deferred) -> None:
    """The explanations of single requests, summed here, are the source of both others."""
    agent = deferred.agent

    def of_rows() -> dict[str, float]:
        seconds: dict[str, float] = {}
        for row in agent.api.requests(limit="1000", verdict="missed"):
            if row["cause"] is not None:
                for share in agent.api.request(row["request_id"])["explanation"]["shares"]:
                    assert share["evidence"]
                    cause = share["cause"]
                    seconds[cause] = seconds.get(cause, 0.0) + (share["excess_s"] or 0.0)
        return seconds

    def agree() -> bool:
        expected = of_rows()
        page = agent.api.exposition()
        counted = {
            cause: total(page, "llm_slo_missed_seconds_total", cause=cause, limit="ttft")
            for cause in expected
        }
        summary = agent.api.summary(window="1h", objective="chat")
        summed = {each["cause"]: each["seconds"] for each in summary["cause_details"]}
        whole = sum(expected.values())
        views = [
            counted,
            summed,
            {name: each * whole for name, each in (summary["causes"] or {}).items()},
        ]
        return bool(expected) and all(each == pytest.approx(expected) for each in views)

    eventually(agree, within_s=WITHIN_S, what="three views of the same seconds")
