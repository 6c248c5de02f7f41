"""Real failures of the real vLLM: the right kind of event, within two polls, and no other.

The alert on one of them reaches a webhook, alone, and ends; tests/end_to_end has all other alerts.
The engine is stopped at the end, so no other module may come after this one.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.real_engine.watching import DEADLY, ENGINE
from tests.real_parts.agent_process import AgentApi, AgentPorts, AgentProcess
from tests.real_parts.alertmanager import Alerting
from tests.real_parts.metric_pages import total
from tests.real_parts.ports import free_port
from tests.real_parts.vllm import SpanExport, Vllm
from tests.real_parts.waiting import eventually

pytestmark = pytest.mark.timeout(1500)

INTERVAL_S = 3
WITHIN_S = 180.0
# The watchdog is sent every three to six seconds.
QUIET, SETTLED = 3, 2


class Watched:
    """The engine's agent, and its events since the last fault."""

    def __init__(self, api: AgentApi) -> None:
        self.api = api
        self._seen_ids: set[str] = {event["at"] for event in api.events()}

    def polls(self) -> float:
        """The number of polls of the engine."""
        return total(self.api.exposition(), "llm_agent_scrapes_total", engine=ENGINE)

    def next_poll(self) -> None:
        """Return just after a poll, so that the next one comes an interval later."""
        before = self.polls()
        eventually(lambda: self.polls() > before, within_s=WITHIN_S, what="a poll")

    def events(self) -> list[dict[str, Any]]:
        """The events since the last fault, oldest first."""
        events = [event for event in self.api.events() if event["at"] not in self._seen_ids]
        return sorted(events, key=lambda event: str(event["at"]))

    def kinds(self) -> list[str]:
        """The kinds of those events."""
        return [event["kind"] for event in self.events()]

    def event(self, kind: str, *, within_s: float = WITHIN_S) -> dict[str, Any]:
        """Wait for the event of this kind."""

        def read() -> list[dict[str, Any]]:
            return [event for event in self.events() if event["kind"] == kind]

        return eventually(read, within_s=within_s, what=f"{kind} among {self.kinds()}")[0]

    def event_within_two_polls(self, kind: str) -> dict[str, Any]:
        """The event of this kind, which the second poll from now on must bring."""
        since = self.polls()

        def is_there() -> bool:
            polled = self.polls()
            there = kind in self.kinds()
            assert there or polled <= since + 2, f"{kind} among {self.kinds()} by then"
            return there

        eventually(is_there, within_s=WITHIN_S, what=kind)
        return self.event(kind)


def watching(folder: Path, engine: dict[str, Any], ports: AgentPorts | None = None) -> AgentProcess:
    """An agent of this engine alone."""
    settings = {
        "engines": [{"name": ENGINE, "scrape_interval": f"{INTERVAL_S}s", **engine}],
        "nvml": {"enabled": False},
    }
    return AgentProcess.with_settings(folder, ports or AgentPorts.free(), settings)


@dataclass(frozen=True, slots=True)
class Agents:
    """Agents of one engine: one reads its log, one its processes, one its exposition alone."""

    beside: AgentProcess
    in_its_pod: AgentProcess
    afar: AgentProcess


@pytest.fixture(scope="module")
def agents(engine: Vllm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agents]:
    """All running agents."""
    views: dict[str, dict[str, Any]] = {
        "beside": {"log": str(engine.log)},
        "in_its_pod": {},
        "afar": {"same_machine": False},
    }
    with ExitStack() as running:
        yield Agents(
            **{
                name: running.enter_context(
                    watching(tmp_path_factory.mktemp(name), {"url": engine.url, **sees})
                )
                for name, sees in views.items()
            }
        )


@pytest.fixture(scope="module")
def alerting(agents: Agents, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alerting]:
    """The alerting of the agent beside the engine, after a while without an alert."""
    folder = tmp_path_factory.mktemp("alerting")
    (folder / "none.yml").write_text("{}")
    beside = agents.beside.url.removeprefix("http://")
    with Alerting(folder, folder / "none.yml", [beside]) as running:
        running.watch(QUIET)
        assert running.webhook.alerts() == []
        yield running


@pytest.fixture
def watched(agents: Agents) -> Watched:
    """The agent beside the engine."""
    return Watched(agents.beside.api)


@pytest.fixture
def in_its_pod(agents: Agents) -> Watched:
    """The agent that reads the engine's processes and no log."""
    return Watched(agents.in_its_pod.api)


@pytest.fixture
def afar(agents: Agents) -> Watched:
    """The agent that reads the engine's exposition alone."""
    return Watched(agents.afar.api)


class Alerts:
    """Alerts at a webhook since the beginning of a fault."""

    def __init__(self, alerting: Alerting) -> None:
        self._alerting = alerting
        self._before = len(alerting.webhook.alerts())

    def ended_alone(self, alert: str) -> None:
        """Return when the alert has ended, and assert that it fired and no other did."""
        eventually(
            lambda: (alert, "resolved", ENGINE) in self._all(),
            within_s=WITHIN_S,
            what=f"the end of {alert}",
        )
        self._alerting.watch(SETTLED)
        assert self._all() == [(alert, "firing", ENGINE), (alert, "resolved", ENGINE)]

    def _all(self) -> list[tuple[str, str, str | None]]:
        posted = self._alerting.webhook.alerts()[self._before :]
        return [(one.name, one.status, one.labels.get("engine")) for one in posted]


@pytest.fixture
def alerts(alerting: Alerting) -> Alerts:
    """Alerts from now on."""
    return Alerts(alerting)


def test_a_killed_core_is_a_dead_engine(
    engine: Vllm, watched: Watched, in_its_pod: Watched, afar: Watched, alerts: Alerts
) -> None:
    watched.next_poll()
    os.kill(engine.core_pid, signal.SIGKILL)
    event = watched.event_within_two_polls("ENGINE_DEAD")
    assert event["confidence"] == "certain"
    assert event["evidence"]["last_sample_at"] is not None
    afar.event("UNREACHABLE")
    engine.stop()
    # The alert fires meanwhile, and what comes next is seen of processes that were started as users
    # start them.
    engine.start(forked=False)
    for agent in (watched, in_its_pod, afar):
        restart = agent.event("RESTART")
        assert restart["confidence"] == "certain"
        assert restart["evidence"]["gone_s"] > 0
    assert DEADLY.intersection(watched.kinds()) == {"ENGINE_DEAD"}
    # The front ends with its core, so an agent that reads no log may find both gone at once.
    assert DEADLY.intersection(in_its_pod.kinds()) <= {"ENGINE_DEAD"}
    assert DEADLY.intersection(afar.kinds()) <= {"ENGINE_DEAD"}
    alerts.ended_alone("LlmEngineDied")


def test_a_stopped_core_with_running_requests_hangs_until_it_continues(
    engine: Vllm, watched: Watched, in_its_pod: Watched
) -> None:
    core = engine.core_pid
    watched.next_poll()
    with engine.streaming(request_id="stopped", max_tokens=1500):
        os.kill(core, signal.SIGSTOP)
        try:
            event = watched.event_within_two_polls("HANG")
            in_its_pod.event("HANG")
        finally:
            os.kill(core, signal.SIGCONT)
    assert event["evidence"]["requests_running"] == 1
    watched.next_poll()
    watched.next_poll()
    assert watched.kinds() == ["HANG"]
    assert in_its_pod.kinds() == ["HANG"]


def test_a_normal_stop_is_no_failure(
    engine: Vllm, watched: Watched, in_its_pod: Watched, afar: Watched
) -> None:
    engine.stop()
    event = watched.event_within_two_polls("UNREACHABLE")
    assert "shutdown" in event["evidence"]["stop_line"]
    for agent in (in_its_pod, afar):
        agent.event("UNREACHABLE")
    watched.next_poll()
    watched.next_poll()
    assert watched.kinds() == ["UNREACHABLE"]
    for agent in (in_its_pod, afar):
        # Without the log, a stop that takes several polls on a busy machine may look like a death.
        doubtful = [event for event in agent.events() if event["kind"] != "UNREACHABLE"]
        assert {event["kind"] for event in doubtful} <= {"ENGINE_DEAD"}
        assert "certain" not in {event["confidence"] for event in doubtful}


def test_a_start_with_too_little_cache_is_a_sizing_error(tmp_path: Path) -> None:
    """The CPU engine takes no smaller cache than its smallest, so the length asked for is huge."""
    ports = AgentPorts.free()
    engine = Vllm(
        tmp_path,
        port=free_port(),
        spans=SpanExport.grpc(ports.grpc),
        extra=("--max-model-len", "4000000"),
        environment={"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"},
    )
    engine.log.touch()
    with watching(tmp_path, {"url": engine.url, "log": str(engine.log)}, ports) as agent:
        watched = Watched(agent.api)
        engine.start_in_vain()
        event = watched.event_within_two_polls("SIZING_ERROR")
        kinds = watched.kinds()
    assert event["confidence"] == "certain"
    assert "KV cache" in str(event["evidence"])
    assert DEADLY.intersection(kinds) == {"SIZING_ERROR"}
