"""The running agent beside an engine that sends no span: what nearly everybody has."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import requests

from agent.app.jobs import Jobs
from agent.app.storing import AgentStore
from agent.settings import Settings, load
from agent.store.claim import AgentState
from agent.store.objectives import ObjectiveStore
from tests.outputs.prometheus.served_engine import ServedEngine
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.metric_pages import total
from tests.real_parts.ports import free_port
from tests.real_parts.waiting import eventually
from tests.simulated import MODEL, WITHIN_S, Simulator, rows_in
from tests.sources.engines.wire import EngineServer

pytestmark = pytest.mark.slow

ENOUGH = 10
PORTS = AgentPorts.free()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Simulator]:
    """A busy engine whose spans go nowhere."""
    with Simulator(tmp_path, grpc=free_port(), rate=8) as engine:
        yield engine


def counted(agent: AgentProcess, at_least: float = ENOUGH) -> dict[str, Any]:
    """What the engine counted, once it has counted so many requests."""

    def read() -> dict[str, Any]:
        found: dict[str, Any] | None = agent.api.summary()["engine_counts"]
        return found if found and found["requests"] >= at_least else {}

    return eventually(read, within_s=WITHIN_S, what=f"{at_least} counted requests")


def test_everything_that_the_engine_counts_is_shown_and_stays_when_the_agent_starts_again(
    engine: Simulator, tmp_path: Path
) -> None:
    engines = [
        {"name": "engine-0", "url": engine.url, "scrape_interval": "1s", "gpu_hour_usd": 2.5}
    ]
    with AgentProcess.with_settings(tmp_path, PORTS, {"engines": engines}) as agent:
        found = counted(agent)
        now = requests.get(f"{engine.url}/metrics", timeout=10).text
        assert found["requests"] <= total(now, "vllm:request_success_total")
        assert found["output_tokens_per_s"] > 0
        for name in ("ttft", "tpot", "itl", "e2e", "queue", "prefill", "decode"):
            p95 = found["latencies_ms"][name]["p95"]
            assert 0 <= p95["lower"] <= p95["estimate"] <= (p95["upper"] or p95["estimate"])
        autoscalers_have_their_signals(agent)
        # Nothing is zero that is unknown.
        summary = agent.api.summary()
        assert summary["requests"] == 0
        assert summary["throughput_rps"] is None
        (attained,) = found["attainment"]
        assert 0 <= attained["lower"] <= attained["upper"] <= 1
        spans_are_asked_for_until_the_first_one_comes(agent, tmp_path)
        agent.stop()
        agent.start()
        assert counted(agent, 0)["requests"] >= found["requests"]
        assert counted(agent, found["requests"] + ENOUGH)
        line = "engine engine-0: metrics, spans; for plugin"
        eventually(lambda: line in agent.log(), within_s=WITHIN_S, what="the line in the log")
        assert steps(agent)["spans"]["state"] == "done"


def autoscalers_have_their_signals(agent: AgentProcess) -> None:
    """From the engine's metrics alone, seconds after the start."""
    of_engine = {"engine": "engine-0", "model": MODEL}
    wanted: list[tuple[str, dict[str, str]]] = [
        ("llm_engine_arrival_rate", of_engine),
        ("llm_slo_p90_to_limit_ratio", {**of_engine, "objective": "chat", "window": "1m"}),
        ("llm_slo_p90_to_limit_ratio", {**of_engine, "objective": "chat", "window": "5m"}),
        ("llm_slo_replicas_needed", {**of_engine, "objective": "chat"}),
    ]

    def shown() -> bool:
        page = agent.api.exposition()
        with suppress(KeyError):
            return all(total(page, name, **labels) > 0 for name, labels in wanted)
        return False

    eventually(shown, within_s=WITHIN_S, what="the signals for autoscalers")


def spans_are_asked_for_until_the_first_one_comes(agent: AgentProcess, folder: Path) -> None:
    """In the steps of the engine's setup, in the log and on /readyz."""
    command = (
        f"OTEL_SERVICE_NAME=engine-0 OTEL_TRACES_SAMPLER=always_on vllm serve {MODEL} "
        f"--otlp-traces-endpoint http://127.0.0.1:{PORTS.grpc}"
    )
    assert steps(agent)["metrics"]["state"] == "done"
    # Nobody knows how many GPUs the price is for.
    (action,) = steps(agent)["price"]["actions"]
    assert action["lines"][-1].strip() == 'parallelism: {"tensor": 1}'
    (action,) = steps(agent)["spans"]["actions"]
    assert action["lines"] == [command]
    line = "engine engine-0: metrics; for single requests "
    eventually(lambda: line in agent.log(), within_s=WITHIN_S, what="the line in the log")
    parts = requests.get(f"{agent.url}/readyz", timeout=30).json()["parts"]
    assert parts["setup"] == "1 of 1 engines could show more: see /api/v1/setup"
    (sender := folder / "sender").mkdir()
    with Simulator(sender, grpc=PORTS.grpc, service="engine-0"):
        rows_in(agent, 1)
    assert steps(agent)["spans"]["state"] == "done"


def steps(agent: AgentProcess) -> dict[str, dict[str, Any]]:
    """The steps of the only engine by name."""
    (engine,) = requests.get(f"{agent.url}/api/v1/setup", timeout=30).json()["items"]
    return {step["name"]: step for step in engine["steps"]}


class NotedJobs(Jobs):
    """Jobs by name; the test runs them."""

    def __init__(self) -> None:
        super().__init__(time.time)
        self.by_name: dict[str, Callable[[float], object]] = {}

    def every(
        self,
        interval_s: float,
        name: str,
        job: Callable[[float], object],
        *,
        first_in_s: float | None = None,
    ) -> None:
        self.by_name[name] = job


def learns_for_an_hour(settings: Settings) -> None:
    """An earlier run, which serves 4 requests/s until an hour ago, and then too many."""
    engine = ServedEngine(begins_at=time.time() // 60.0 * 60.0 - 4200.0)
    store = AgentStore(settings, engine.meter, time.time, AgentState())
    jobs = NotedJobs()
    store.schedule(jobs)
    engine.serve(4.0, 0.1, seconds=600.0)
    engine.serve(8.0, 0.5, seconds=120.0)
    engine.serve(1.0, 0.1, seconds=420.0)
    jobs.by_name["keep the rates that are held"](time.time())
    # What a killed run leaves behind.
    stored = ObjectiveStore(store.database, settings.name).held_rates()
    assert stored == engine.meter.held_rates()
    store.close()


def held_rate(agent: AgentProcess) -> tuple[float, float]:
    """The rate that the engine holds and its age, once there is a series."""
    of_engine = {"objective": "chat", "engine": "chat-0"}

    def shown() -> tuple[float, ...]:
        page = agent.api.exposition()
        names = ("llm_slo_held_rate", "llm_slo_held_rate_age_seconds")
        return tuple(total(page, name, **of_engine) for name in names)

    per_s, age_s = eventually(shown, within_s=WITHIN_S, what="the rate that is held")
    return per_s, age_s


def test_the_rate_that_an_engine_holds_outlives_agents_that_are_killed(tmp_path: Path) -> None:
    with EngineServer() as server:
        server.answers("/metrics", of_ranks(1100))
        given = {
            "engines": [{"name": "chat-0", "url": server.url, "scrape_interval": "1s"}],
            "objectives": [{"name": "chat", "ttft_ms": 200}],
        }
        agent = AgentProcess.with_settings(tmp_path, AgentPorts.free(), given)
        learns_for_an_hour(load(tmp_path / "agent.yml", {}))
        ages_s = []
        for _ in range(2):
            agent.start()
            per_s, age_s = held_rate(agent)
            agent.kill()
            assert per_s == pytest.approx(4.0, rel=0.006)
            ages_s.append(age_s)
    assert 3600.0 <= ages_s[0] < ages_s[1] < 3660.0 + WITHIN_S


def of_ranks(*counts: float) -> bytes:
    """The exposition of an engine whose data-parallel ranks generated so many tokens."""
    lines = [
        f'vllm:num_requests_running{{engine="{rank}",model_name="m"}} 0\n'
        f'vllm:generation_tokens_total{{engine="{rank}",model_name="m"}} {count}\n'
        for rank, count in enumerate(counts)
    ]
    return "".join(lines).encode()


def test_no_counter_falls_when_a_rank_leaves(tmp_path: Path) -> None:
    with EngineServer() as server:
        server.answers("/metrics", of_ranks(1100, 2200))
        engines = [{"name": "engine-0", "url": server.url, "scrape_interval": "1s"}]
        with AgentProcess.with_settings(tmp_path, AgentPorts.free(), {"engines": engines}) as agent:
            eventually(lambda: tokens(agent) == 3300, within_s=WITHIN_S, what="both ranks")
            server.answers("/metrics", of_ranks(1200))
            eventually(lambda: tokens(agent) != 3300, within_s=WITHIN_S, what="a rank's end")
            assert tokens(agent) == 3400
            server.answers("/metrics", of_ranks(1200, 5))
            eventually(lambda: tokens(agent) != 3400, within_s=WITHIN_S, what="a new rank")
            assert tokens(agent) == 3405
            assert requests.get(f"{agent.url}/api/v1/events", timeout=30).json()["items"] == []


def tokens(agent: AgentProcess) -> float:
    """The engine's tokens; 0 before the first scrape."""
    try:
        return total(agent.api.exposition(), "llm_engine_output_tokens_total")
    except KeyError:
        return 0.0
