"""Real failures of the real vLLM: the right kind of event, within two polls, and no other.

tests/end_to_end has the alerts on them. The engines end here, so no other module may come later.
"""

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.real_engine.watching import (
    BAD_ENGINE,
    ENGINE,
    RUNNING,
    rows_once_there,
    times_seen,
)
from tests.real_parts.agent_process import AgentApi, AgentPorts, AgentProcess
from tests.real_parts.metric_pages import total
from tests.real_parts.ports import free_port
from tests.real_parts.vllm import SpanExport, Vllm, span_request_id
from tests.real_parts.waiting import eventually

pytestmark = pytest.mark.timeout(1500)

INTERVAL_S = 2
WITHIN_S = 180.0
DEADLY = {"HOST_OOM", "CUDA_OOM", "SIZING_ERROR", "GPU_FAULT", "ENGINE_DEAD", "HANG"}


class Watched:
    """What one agent says of one engine from now on."""

    def __init__(self, api: AgentApi, engine: str = ENGINE) -> None:
        self.api = api
        self._engine = engine
        self._seen_ids = {event["at"] for event in self._all()}

    def polls(self) -> float:
        """The number of polls of the engine."""
        return total(self.api.exposition(), "llm_agent_scrapes_total", engine=self._engine)

    def next_poll(self) -> None:
        """Return just after a poll, so that the next one comes an interval later."""
        before = self.polls()
        eventually(lambda: self.polls() > before, within_s=WITHIN_S, what="a poll")

    def events(self) -> list[dict[str, Any]]:
        """The events from then on, oldest first."""
        events = [event for event in self._all() if event["at"] not in self._seen_ids]
        return sorted(events, key=lambda event: str(event["at"]))

    def _all(self) -> list[dict[str, Any]]:
        found = [event for event in self.api.events() if event["engine"] == self._engine]
        # A start is no failure, and its event comes when its first request was served.
        return [event for event in found if event["kind"] != "STARTED"]

    def starts(self) -> list[dict[str, Any]]:
        """The starts of the engine that the agent saw, the newest first."""
        return self.api.items("/api/v1/starts", {"engine": self._engine})

    def kinds(self) -> list[str]:
        """The kinds of those events."""
        return [event["kind"] for event in self.events()]

    def event(self, kind: str) -> dict[str, Any]:
        """Wait for the event of this kind."""

        def read() -> list[dict[str, Any]]:
            return [event for event in self.events() if event["kind"] == kind]

        return eventually(read, within_s=WITHIN_S, what=f"{kind} among {self.kinds()}")[0]

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

    def probes(self) -> tuple[int, int, str]:
        """The answers of both probes, and the reason of the second one."""
        live, ready = (
            requests.get(f"{self.api.url}/engines/{self._engine}/{probe}", timeout=WITHIN_S)
            for probe in ("livez", "readyz")
        )
        return live.status_code, ready.status_code, ready.json()["reason"]

    def probe(self, *, alive: int, ready: int, reason: str) -> None:
        """Wait until the probes say so."""

        def said() -> bool:
            return self.probes() == (alive, ready, reason)

        eventually(said, within_s=WITHIN_S, what=f"{reason}, not {self.probes()}")

    def reasons_until_up(self) -> set[str]:
        """The reasons that the probes give from the first `loading` on until the engine is up."""
        reasons: set[str] = set()

        def is_up() -> bool:
            reason = self.probes()[2]
            if reasons or reason == "loading":
                reasons.add(reason)
            return reason == "idle"

        eventually(is_up, within_s=WITHIN_S, what="an idle engine")
        return reasons

    def deaths(self) -> list[str]:
        """The kinds of events after which an engine is dead or stands still."""
        return [kind for kind in self.kinds() if kind in DEADLY]


def watching(folder: Path, ports: AgentPorts, *engines: dict[str, Any]) -> AgentProcess:
    """An agent of these engines alone."""
    every = {"scrape_interval": f"{INTERVAL_S}s"}
    settings = {"engines": [every | each for each in engines], "nvml": {"enabled": False}}
    return AgentProcess.with_settings(folder, ports, settings)


@dataclass(frozen=True, slots=True)
class Agents:
    """Agents of the engines: one reads logs, one processes, one expositions alone.

    The first one gets the spans.
    """

    beside: AgentApi
    in_its_pod: AgentApi
    afar: AgentApi

    def watched(self, engine: str = ENGINE) -> tuple[Watched, Watched, Watched]:
        """What each says of an engine from now on."""
        apis = (self.beside, self.in_its_pod, self.afar)
        beside, in_its_pod, afar = (Watched(api, engine) for api in apis)
        return beside, in_its_pod, afar


@pytest.fixture(scope="module")
def agents(
    engine: Vllm, bad_engine: Vllm, ports: AgentPorts, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Agents]:
    """All running agents."""
    names = {ENGINE: engine, BAD_ENGINE: bad_engine}
    at = [{"name": name, "url": each.url} for name, each in names.items()]
    with_logs = [each | {"log": str(names[each["name"]].log)} for each in at]
    remote = [each | {"same_machine": False} for each in at]
    with ExitStack() as running:
        yield Agents(
            *(
                running.enter_context(watching(tmp_path_factory.mktemp("sees"), where, *sees)).api
                for where, sees in (
                    (ports, with_logs),
                    (AgentPorts.free(), at),
                    (AgentPorts.free(), remote),
                )
            )
        )


@dataclass(frozen=True, slots=True)
class FailedStart:
    """What an agent says of an engine that cannot start."""

    probes_before: tuple[int, int, str]
    event: dict[str, Any]
    deaths: list[str]
    probes_after: tuple[int, int, str]


def reasons_while_it_starts(
    engine: Vllm, agents: Sequence[Watched], *, forked: bool = True
) -> list[set[str]]:
    """Start the engine; return the reasons that the probes of each agent gave meanwhile.

    The engine is started in this thread: the kernel ends it with the thread that started it.
    """
    with ThreadPoolExecutor(len(agents)) as looking:
        seen = [looking.submit(agent.reasons_until_up) for agent in agents]
        engine.start(forked=forked)
        return [each.result() for each in seen]


def start_with_too_little_cache(folder: Path) -> FailedStart:
    """The CPU engine takes no smaller cache than its smallest, so the length asked for is huge."""
    ports = AgentPorts.free()
    engine = Vllm(
        folder,
        port=free_port(),
        spans=SpanExport.grpc(ports.grpc),
        extra=("--max-model-len", "4000000"),
        environment={"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"},
    )
    engine.log.touch()
    sees = {"name": ENGINE, "url": engine.url, "log": str(engine.log)}
    with watching(folder, ports, sees) as agent:
        watched = Watched(agent.api)
        before = watched.probes()
        engine.start_in_vain()
        event = watched.event_within_two_polls("SIZING_ERROR")
        return FailedStart(before, event, watched.deaths(), watched.probes())


@pytest.fixture(scope="module")
def failed_start(
    agents: Agents, tmp_path_factory: pytest.TempPathFactory
) -> Iterator["Future[FailedStart]"]:
    """It happens while another engine restarts."""
    with ThreadPoolExecutor(1) as starting:
        yield starting.submit(start_with_too_little_cache, tmp_path_factory.mktemp("sizing"))


@pytest.mark.usefixtures("failed_start")
def test_a_killed_front_is_one_death_and_one_restart(
    engine: Vllm, agents: Agents, ports: AgentPorts
) -> None:
    """What comes next is seen of processes that were started as users start them."""
    beside, in_its_pod, afar = agents.watched()
    with engine.streaming(request_id="in-flight", max_tokens=1500):
        os.kill(engine.front_pid, signal.SIGKILL)
    dead = beside.event("ENGINE_DEAD")
    assert beside.probes() == (503, 503, "dead")
    afar.event("UNREACHABLE")
    engine.kill()
    engine.send_spans(SpanExport.http(ports.http))
    # A further engine starts on the machine.
    here = reasons_while_it_starts(engine, (beside, in_its_pod), forked=False)
    assert here == [{"loading", "idle"}] * 2
    assert dead["evidence"]["last_sample_at"] is not None
    for agent in (beside, in_its_pod, afar):
        restart = agent.event("RESTART")
        assert restart["confidence"] == "certain"
        assert restart["evidence"]["gone_s"] > 0
        assert agent.kinds().count("RESTART") == 1
        agent.probe(alive=200, ready=200, reason="idle")
    assert beside.deaths() == ["ENGINE_DEAD"]
    assert set(in_its_pod.deaths()) <= {"ENGINE_DEAD"}
    assert afar.kinds() == ["UNREACHABLE", "RESTART"]


def test_spans_over_http_are_rows_and_a_request_that_died_is_none(
    engine: Vllm, agents: Agents
) -> None:
    engine.complete(request_id="over-http", max_tokens=7)
    sent, died = span_request_id("over-http"), span_request_id("in-flight")
    rows = rows_once_there(agents.beside, {sent})
    assert times_seen(rows, {sent, died}) == {sent: 1, died: 0}
    (row,) = (row for row in rows if row["request_id"] == sent)
    assert (row["output_tokens"], row["model"]) == (7, engine.model)


def test_the_start_has_the_phases_of_the_engines_spans(engine: Vllm, agents: Agents) -> None:
    beside, _, afar = agents.watched()
    (start,) = eventually(beside.starts, within_s=WITHIN_S, what="a start")
    assert {"boot", "processes", "model", "weights", "front"} <= start["phases"].keys()
    assert all(seconds > 0 for seconds in start["phases"].values())
    assert sum(start["phases"].values()) == pytest.approx(start["start_s"], abs=0.01)
    # The first request is that of the test before.
    assert start["start_s"] < start["first_request_s"] < start["start_s"] + WITHIN_S
    # By metrics alone a start has its length, to within a poll.
    (start_afar,) = eventually(afar.starts, within_s=WITHIN_S, what="a start")
    assert start_afar["start_s"] == pytest.approx(start["start_s"], abs=2 * INTERVAL_S)
    assert start_afar["first_request_s"] is not None
    assert start_afar["phases"] == {}


def test_a_full_batch_with_a_deep_queue_is_alive_and_ready(engine: Vllm, agents: Agents) -> None:
    watched = agents.watched()
    with engine.streaming(request_id="deep", max_tokens=1500, choices=5 * RUNNING):
        for agent in watched:
            agent.probe(alive=200, ready=200, reason="saturated")
        for _ in range(4):
            watched[0].next_poll()
            assert {agent.probes() for agent in watched} == {(200, 200, "saturated")}
    assert [agent.deaths() for agent in watched] == [[], [], []]


def test_a_stopped_core_with_running_requests_hangs_until_it_continues(
    engine: Vllm, agents: Agents
) -> None:
    beside, in_its_pod, _ = agents.watched()
    beside.next_poll()
    with engine.streaming(request_id="stopped", max_tokens=1500), engine.standing_still():
        event = beside.event_within_two_polls("HANG")
        in_its_pod.event("HANG")
        assert beside.probes() == in_its_pod.probes() == (503, 503, "stalled")
    assert event["evidence"]["requests_running"] == 1
    for agent in (beside, in_its_pod):
        agent.probe(alive=200, ready=200, reason="idle")
    beside.next_poll()
    beside.next_poll()
    assert beside.kinds() == ["HANG"]
    assert in_its_pod.kinds() == ["HANG"]


def test_a_killed_core_is_a_dead_engine(engine: Vllm, agents: Agents) -> None:
    beside, in_its_pod, afar = agents.watched()
    beside.next_poll()
    os.kill(engine.core_pid, signal.SIGKILL)
    event = beside.event_within_two_polls("ENGINE_DEAD")
    assert event["confidence"] == "certain"
    assert beside.probes() == (503, 503, "dead")
    afar.event("UNREACHABLE")
    assert afar.probes()[1] == 503
    assert beside.deaths() == ["ENGINE_DEAD"]
    # The front ends with its core, so an agent that reads no log may find both gone at once.
    assert set(in_its_pod.deaths()) <= {"ENGINE_DEAD"}
    assert set(afar.deaths()) <= {"ENGINE_DEAD"}


def test_the_start_of_an_engine_that_died_is_alive_and_compared_with_the_one_before(
    engine: Vllm, agents: Agents
) -> None:
    beside, _, _ = agents.watched()
    (first,) = beside.starts()
    engine.kill()
    assert reasons_while_it_starts(engine, [beside]) == [{"loading", "idle"}]
    engine.complete(request_id="after-its-death", max_tokens=2)
    second, before = eventually(
        lambda: starts if len(starts := beside.starts()) > 1 else [],
        within_s=WITHIN_S,
        what="a second start",
    )
    assert before == first
    assert second["change_s"] == pytest.approx(second["start_s"] - first["start_s"])
    assert {"weights", "model"} <= second["phase_changes"].keys()
    assert second["phase_changes"] == {
        phase: pytest.approx(second["phases"].get(phase, 0.0) - first["phases"].get(phase, 0.0))
        for phase in first["phases"] | second["phases"]
    }


def test_a_normal_stop_is_no_failure(bad_engine: Vllm, agents: Agents) -> None:
    beside, in_its_pod, afar = agents.watched(BAD_ENGINE)
    bad_engine.stop()
    event = beside.event_within_two_polls("UNREACHABLE")
    assert beside.probes() == (200, 503, "unreachable")
    assert "shutdown" in event["evidence"]["stop_line"]
    for agent in (in_its_pod, afar):
        agent.event("UNREACHABLE")
    beside.next_poll()
    beside.next_poll()
    assert beside.kinds() == ["UNREACHABLE"]
    for agent in (in_its_pod, afar):
        # Without the log, a stop that takes several polls on a busy machine may look like a death.
        doubtful = [event for event in agent.events() if event["kind"] != "UNREACHABLE"]
        assert {event["kind"] for event in doubtful} <= {"ENGINE_DEAD"}
        assert "certain" not in {event["confidence"] for event in doubtful}


def test_a_start_with_too_little_cache_is_a_sizing_error(
    failed_start: "Future[FailedStart]",
) -> None:
    failed = failed_start.result()
    assert failed.event["confidence"] == "certain"
    assert "KV cache" in str(failed.event["evidence"])
    assert failed.deaths == ["SIZING_ERROR"]
    assert failed.probes_before == (200, 503, "unreachable")
    assert failed.probes_after == (503, 503, "dead")
