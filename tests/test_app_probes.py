"""The probes of an engine on the running agent, before an engine that stands and moves."""

import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import requests
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.metric_pages import total
from tests.real_parts.ports import free_port
from tests.real_parts.waiting import eventually
from tests.simulated import WITHIN_S
from tests.sources.engines.wire import EngineServer
from tests.sources.otlp.exports import export

pytestmark = pytest.mark.slow

CLOSE = ("Connection: close",)
# Unreachable becomes dead after four times this: long enough to be seen on a busy machine.
HANG_S = 4
# Longer than a read of the metrics takes, which may have begun before the weights were there.
LOADED_AGO_S = 10.0
FIRST_STEP = 1000
ENGINE, AWAY = "llm/chat-0", "away-0"
PAUSE = "(EngineCore pid=9) INFO 11-21 15:58:01 [scheduler.py:2756] setting pause state to {}\n"


@dataclass
class Engine:
    """A vLLM at the wire. It makes a step at each scrape while it `computes`."""

    server: EngineServer
    running: int = 0
    waiting: int = 0
    awake: int = 1
    computes: bool = True
    steps: int = FIRST_STEP
    started: float = field(default_factory=lambda: time.time() - LOADED_AGO_S - 5)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def page(self) -> bytes:
        with self.lock:
            self.steps += self.computes and self.running > 0
            values = {
                "num_requests_running": self.running,
                "num_requests_waiting": self.waiting,
                "kv_cache_usage_perc": 0.5,
                "iteration_tokens_total_count": self.steps,
                "generation_tokens_total": self.steps - FIRST_STEP,
                'engine_sleep_state{sleep_state="awake"}': self.awake,
            }
        lines = [f"vllm:{name} {value}" for name, value in values.items()]
        return "\n".join([*lines, f"process_start_time_seconds {self.started}", ""]).encode()

    def answers(self) -> None:
        """It sends metrics and is healthy."""
        self.server.scripts["/metrics"] = self._metrics
        self.is_healthy(200)

    def is_healthy(self, status: int) -> None:
        self.server.answers("/health", b"", status=status, headers=CLOSE)

    def is_away(self) -> None:
        self.server.scripts.pop("/metrics", None)
        self.server.answers("/health", b"", status=503, headers=CLOSE)

    def _metrics(self, handler: BaseHTTPRequestHandler) -> None:
        self.server.answers("/once", self.page(), headers=CLOSE)
        self.server.scripts["/once"](handler)


@dataclass(frozen=True)
class Probed:
    """The running agent, its engines and their probes."""

    agent: AgentProcess
    ports: AgentPorts
    engine: Engine
    log: Path

    def probe(self, which: str, engine: str = ENGINE) -> tuple[int, dict[str, Any]]:
        """The status and the body of a probe."""
        path = f"/engines/{quote(engine)}/{which}"
        response = requests.get(f"{self.agent.url}{path}", timeout=WITHIN_S)
        return response.status_code, response.json()

    def becomes(self, reason: str, *, alive: int, ready: int) -> dict[str, Any]:
        """Both probes, once the reason is this one."""

        def reported() -> bool:
            return bool(self.probe("livez")[1]["reason"] == reason)

        what = f"{reason}, after {self.probe('livez')}"
        eventually(reported, within_s=WITHIN_S, what=what)
        (is_alive, body), (is_ready, other) = self.probe("livez"), self.probe("readyz")
        assert (is_alive, is_ready) == (alive, ready)
        assert {**body, "read_at": None} == {**other, "read_at": None}
        (row,) = self.agent.api.items("/api/v1/engines", {"engine": ENGINE})
        of_row = (row["state"], row["state_detail"], row["state_why"], row["state_since"])
        assert of_row == (reason, body["detail"], body["why"], body["since"])
        return body

    def loads_weights(self, *, within_s: float) -> None:
        """The engine sends the span of its weights, which took so long."""
        end_ns = time.time_ns() - int(LOADED_AGO_S * 1e9)
        loaded = Span(
            trace_id=secrets.token_bytes(16),
            span_id=secrets.token_bytes(8),
            name="Load weights",
            start_time_unix_nano=end_ns - int(within_s * 1e9),
            end_time_unix_nano=end_ns,
        )
        sent = export(loaded, resource={"service.name": ENGINE}, scope="vllm.model_loader")
        response = requests.post(
            f"http://127.0.0.1:{self.ports.http}/v1/traces",
            data=sent.SerializeToString(),
            headers={"Content-Type": "application/x-protobuf"},
            timeout=WITHIN_S,
        )
        assert response.ok, response.text

    def events(self) -> list[str]:
        return [event["kind"] for event in self.agent.api.events() if event["engine"] == ENGINE]


@contextmanager
def probed(folder: Path) -> Iterator[Probed]:
    log = folder / "engine.log"
    log.touch()
    with EngineServer() as server:
        engine = Engine(server)
        engine.is_away()
        usual = {"scrape_interval": "0.2s", "hang_after": f"{HANG_S}s", "same_machine": False}
        settings = {
            "engines": [
                {"name": ENGINE, "url": server.url, "log": str(log), **usual},
                {"name": AWAY, "url": f"http://127.0.0.1:{free_port()}", **usual},
            ],
            "nvml": {"enabled": False},
        }
        ports = AgentPorts.free()
        with AgentProcess.with_settings(folder, ports, settings) as agent:
            yield Probed(agent, ports, engine, log)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probed]:
    with probed(tmp_path_factory.mktemp("probed")) as found:
        yield found


def test_an_engine_goes_through_every_state_and_both_probes_say_so(running: Probed) -> None:
    engine = running.engine
    running.becomes("loading", alive=200, ready=503)
    running.loads_weights(within_s=0.25)
    engine.answers()
    running.becomes("idle", alive=200, ready=200)
    engine.running = 3
    running.becomes("ok", alive=200, ready=200)
    engine.running, engine.waiting = 8, 200
    running.becomes("saturated", alive=200, ready=200)
    engine.computes = False
    stalled = running.becomes("stalled", alive=503, ready=503)
    assert (stalled["engine"], stalled["why"]) == (ENGINE, "HANG")
    engine.computes, engine.waiting = True, 0
    running.becomes("ok", alive=200, ready=200)
    engine.running = 0
    running.becomes("idle", alive=200, ready=200)
    assert [kind for kind in running.events() if kind != "STARTED"] == ["HANG"]


def test_an_engine_that_admits_no_request_is_not_alive(running: Probed) -> None:
    engine = running.engine
    engine.running, engine.waiting = 0, 6
    running.becomes("stalled", alive=503, ready=503)
    engine.waiting = 0
    running.becomes("idle", alive=200, ready=200)


def test_a_paused_and_a_sleeping_engine_are_alive_and_not_ready(running: Probed) -> None:
    engine = running.engine
    engine.awake = 0
    running.becomes("paused", alive=200, ready=503)
    engine.awake = 1
    running.becomes("idle", alive=200, ready=200)
    with running.log.open("a") as log:
        log.write(PAUSE.format("PAUSED_ALL"))
        log.flush()
        running.becomes("paused", alive=200, ready=503)
        log.write(PAUSE.format("UNPAUSED"))
    running.becomes("idle", alive=200, ready=200)


def test_an_engine_that_does_not_answer_is_unreachable_and_after_a_while_dead(
    running: Probed,
) -> None:
    engine = running.engine
    engine.is_away()
    away = running.becomes("unreachable", alive=200, ready=503)
    assert away["why"] == "http_status"
    assert running.becomes("dead", alive=503, ready=503)["since"] > away["since"]
    engine.answers()
    running.becomes("idle", alive=200, ready=200)


def test_a_lost_core_behind_a_front_that_answers_is_dead(running: Probed) -> None:
    running.engine.running = 1
    running.becomes("ok", alive=200, ready=200)
    running.engine.computes = False
    running.engine.is_healthy(503)
    assert running.becomes("dead", alive=503, ready=503)["why"] == "ENGINE_DEAD"
    running.engine.computes = True
    running.engine.is_healthy(200)
    running.becomes("ok", alive=200, ready=200)


def test_the_state_is_a_metric(running: Probed) -> None:
    page = running.agent.api.exposition()
    assert total(page, "llm_engine_state", engine=AWAY, state="unreachable") == 1
    assert total(page, "llm_engine_state", engine=AWAY) == 1


def test_an_address_without_engine_is_unreachable_and_another_name_unknown(
    running: Probed,
) -> None:
    status, body = running.probe("livez", AWAY)
    assert (status, body["reason"], body["why"]) == (200, "unreachable", "connection")
    status, body = running.probe("readyz", "chat-9")
    assert status == 404
    assert "'chat-9'" in body["detail"]


def test_the_start_of_an_engine_is_listed_with_its_phases_and_published(running: Probed) -> None:
    def listed() -> list[dict[str, Any]]:
        return running.agent.api.items("/api/v1/starts", {"engine": ENGINE})

    (start,) = eventually(listed, within_s=WITHIN_S, what="a start")
    assert start["phases"]["weights"] == pytest.approx(0.25, abs=0.01)
    assert sum(start["phases"].values()) == pytest.approx(start["start_s"], abs=0.01)
    assert start["first_request_s"] > start["start_s"]
    assert (start["change_s"], start["phase_changes"]) == (None, {})
    page = running.agent.api.exposition()
    published = total(page, "llm_engine_start_seconds", engine=ENGINE)
    assert published == pytest.approx(start["start_s"], abs=0.01)
    assert "STARTED" in running.events()
