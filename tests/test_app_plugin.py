"""An engine's plugin and the running agent: rows, metrics, and hostile datagrams."""

import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from goodput_agent_vllm.datagrams import HEADER, served_record
from goodput_agent_vllm.open_requests import OpenRequests
from goodput_agent_vllm.reporting import Reporter
from goodput_agent_vllm.sending import Sender

from agent.records.request import ProxyView, Vantage
from agent.sources.open_requests import STALLED_AFTER_S
from agent.sources.proxy.measuring.served_request import record_bytes
from tests.plugins.vllm_counts import finished, header, iteration, scheduler
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.metric_pages import total
from tests.real_parts.ports import free_port
from tests.real_parts.span_sender import SpanSender, request_span
from tests.real_parts.waiting import eventually
from tests.records.making import record
from tests.simulated import MODEL, Simulator
from tests.test_app_proxy import QUIET, Proxied

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

WITHIN_S = 120.0
# The figures of `request_span`.
SPANS = {
    "e2e_latency": 0.5,
    "queued_time": 0.01,
    "prefill_time": 0.09,
    "decode_time": 0.4,
    "num_prompt_tokens": 20,
    "num_generation_tokens": 11,
    "num_cached_tokens": 16,
}


class Watched:
    """An agent, a sender of spans to it, and the plugin of its engine."""

    def __init__(self, agent: AgentProcess, spans: SpanSender, sender: Sender, path: Path) -> None:
        self.agent = agent
        self.spans = spans
        self.path = path
        self.plugin = Reporter(sender)
        # Before anything came from the plugin.
        self.at_first = (self.metric("llm_engine_plugin_up", engine="chat-0"), self.status())

    def status(self) -> str:
        """What /readyz says of the plugins."""
        response = requests.get(f"{self.agent.url}/readyz", timeout=WITHIN_S)
        return str(response.json()["parts"]["plugins"])

    def end(self, request_id: str, **values: Any) -> None:
        """One step, in which this request ends."""
        ended = finished(request_id=request_id, **{**SPANS, **values})
        self.plugin.step(scheduler(), iteration(ended, at=time.time()), 0)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of these series; 0 where there is none yet."""
        with suppress(KeyError):
            return total(self.agent.api.exposition(), name, **labels)
        return 0.0

    def row(self, request_id: str, *, with_preemptions: int | None) -> dict[str, Any]:
        def found() -> Any:
            # As vLLM does every 10 s: what did not fit into the socket is sent.
            self.plugin.hello()
            rows = [r for r in self.agent.api.requests() if r["request_id"] == request_id]
            return rows if rows and rows[0]["preemptions"] == with_preemptions else None

        (only,) = eventually(found, within_s=WITHIN_S, what=f"the row of {request_id}")
        row: dict[str, Any] = only
        return row


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder, ports = tmp_path_factory.mktemp("agent"), AgentPorts.free()
    path = folder / "plugin" / "vllm.sock"
    url = f"http://127.0.0.1:{free_port()}"
    engine = {"name": "chat-0", "url": url, "plugin_socket": str(path)}
    with (
        AgentProcess.with_settings(folder, ports, {"engines": [engine]}) as agent,
        closing(Sender(str(path), pause_s=0.0)) as sender,
    ):
        yield Watched(agent, SpanSender(ports.grpc), sender, path)


def test_an_agent_says_that_the_plugin_is_silent(watched: Watched) -> None:
    up, parts = watched.at_first
    assert up == 0
    assert parts.startswith("nothing has come from the plugin of chat-0 yet: ")
    watched.plugin.step(scheduler(), iteration(at=time.time()), 0)
    eventually(
        lambda: watched.metric("llm_engine_plugin_last_step_timestamp_seconds", engine="chat-0"),
        within_s=WITHIN_S,
        what="a step",
    )
    assert watched.metric("llm_engine_plugin_up", engine="chat-0") == 1
    assert watched.status() == "ok"


@pytest.mark.parametrize("first", ["plugin", "span"])
def test_a_spans_row_has_the_plugins_figures_in_either_order(watched: Watched, first: str) -> None:
    request_id = f"chatcmpl-{first}"
    if first == "plugin":
        before = watched.metric("llm_engine_plugin_records_total", kind="request")
        watched.end(request_id)
        eventually(
            lambda: watched.metric("llm_engine_plugin_records_total", kind="request") > before,
            within_s=WITHIN_S,
            what="the record",
        )
        assert watched.spans.export([request_span(request_id)])
    else:
        assert watched.spans.export([request_span(request_id)])
        watched.row(request_id, with_preemptions=None)
        watched.end(request_id)
    row = watched.row(request_id, with_preemptions=1)
    assert (row["cached_tokens"], row["finish_reason"], row["ttft_s"]) == (16, "stop", 0.1)
    assert (row["queue_s"], row["prefill_s"], row["decode_s"]) == (0.01, 0.09, 0.4)


def test_a_request_that_a_front_measured_is_a_row_and_needs_no_proxy(watched: Watched) -> None:
    def steps() -> set[str]:
        response = requests.get(f"{watched.agent.url}/api/v1/setup", timeout=WITHIN_S)
        (setup,) = response.json()["items"]
        return {step["name"] for step in setup["steps"]}

    def row() -> Any:
        watched.plugin.hello()
        return [r for r in watched.agent.api.requests() if r["request_id"] == "measured"]

    assert "proxy" in steps()
    now = time.time()
    view = {"vantage": Vantage.PROXY, "proxied": ProxyView(), "request_id": "measured"}
    seen = record(5, started_at=now - 1, ended_at=now, received_at=now, parent_span_id=None, **view)
    watched.plugin.add(served_record(record_bytes(seen), (), proxied=False))
    (found,) = eventually(row, within_s=WITHIN_S, what="the row")
    assert (found["vantage"], found["engine"]) == ("proxy", "chat-0")
    eventually(lambda: "proxy" not in steps(), within_s=WITHIN_S, what="the steps")


def test_open_requests_are_metrics_while_a_front_keeps_them(watched: Watched) -> None:
    def series() -> set[tuple[str, float]]:
        page = watched.agent.api.exposition().splitlines()
        samples = [line.rsplit(" ", 1) for line in page if line.startswith(names)]
        return {(name.partition("{")[0], float(value)) for name, value in samples}

    def becomes(*expected: tuple[str, float]) -> None:
        eventually(lambda: series() == set(expected), within_s=WITHIN_S, what=f"{expected}")

    names = opened, stalled = "llm_engine_open_requests", "llm_engine_stalled_requests"
    assert series() == set()
    front = OpenRequests.beside(str(watched.path))
    assert front is not None
    becomes((opened, 0), (stalled, 0))
    waiting = front.open(b"", time.time(), time.monotonic())
    streaming = front.open(b"", time.time(), time.monotonic() - STALLED_AFTER_S)
    assert waiting is not None
    assert streaming is not None
    streaming.event(time.monotonic() - STALLED_AFTER_S)
    becomes((opened, 2), (stalled, 1))
    waiting.close()
    streaming.close()
    front.close()
    becomes()


def test_a_deleted_socket_is_made_again_and_one_of_another_program_is_named(
    watched: Watched,
) -> None:
    def heard_again() -> bool:
        watched.plugin.hello()
        return watched.status() == "ok"

    watched.path.unlink()
    eventually(watched.path.is_socket, within_s=WITHIN_S, what="the socket")
    eventually(heard_again, within_s=WITHIN_S, what="a record")
    watched.path.unlink()
    watched.path.mkdir()
    named = f"plugin_socket of engine chat-0: {watched.path} is a file and no socket"
    eventually(lambda: watched.status().startswith(named), within_s=WITHIN_S, what="the status")
    watched.path.rmdir()
    eventually(lambda: watched.status() == "ok", within_s=WITHIN_S, what="the socket")


def test_hostile_datagrams_hurt_nothing(watched: Watched) -> None:
    kib = _resident_kib(watched.agent.pid)
    watched.end("chatcmpl-before")
    real = _datagrams(watched)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.setblocking(True)
        for attack in (
            *(os.urandom(size) for size in (0, 1, HEADER.size, 60_000)),
            b"x" * 150_000,
            header(1, 65_535, 0, 0) + real[HEADER.size :],
            header(2, 1, 2**64 - 1, 2**64 - 1) + real[HEADER.size :],
            *_flipped(real, 3000),
        ):
            stranger.sendto(attack, str(watched.path))
    watched.end("chatcmpl-after")
    assert watched.spans.export([request_span("chatcmpl-after")])
    watched.row("chatcmpl-after", with_preemptions=1)
    reasons = {"not_ours": 5, "malformed": 65_000}
    for reason, least in reasons.items():
        assert watched.metric("llm_engine_plugin_dropped_total", reason=reason) >= least
    assert requests.get(f"{watched.agent.url}/readyz", timeout=WITHIN_S).status_code == 200
    assert "Traceback" not in watched.agent.log()
    # The attacks together had 450 KB.
    assert _resident_kib(watched.agent.pid) - kib < 30_000


def test_a_request_that_its_client_left_has_a_row_of_its_own(watched: Watched) -> None:
    """At the end of the agent at the latest; a running one waits 30 s for other records."""
    state = SimpleNamespace(
        stats=SimpleNamespace(
            num_generation_tokens=9,
            num_preemptions=0,
            arrival_time=time.time() - 1.0,
            queued_ts=5.0,
            scheduled_ts=5.25,
            first_token_ts=5.5,
            last_token_ts=5.75,
            first_token_latency=0.6,
        ),
        external_req_id="cmpl-left-0",
        prompt_len=602,
        num_cached_tokens=0,
    )
    before = watched.metric("llm_engine_plugin_records_total", kind="request")
    watched.plugin.aborted(state)
    eventually(
        lambda: watched.metric("llm_engine_plugin_records_total", kind="request") > before,
        within_s=WITHIN_S,
        what="the record",
    )
    watched.agent.stop()
    watched.agent.start()
    row = watched.row("cmpl-left-0", with_preemptions=0)
    assert (row["status"], row["finish_reason"]) == ("cancelled", "abort")
    assert (row["verdict"], row["vantage"], row["engine"]) == ("missed", "engine", "chat-0")
    assert (row["input_tokens"], row["output_tokens"]) == (602, 9)
    assert (row["queue_s"], row["prefill_s"], row["decode_s"]) == (0.25, 0.25, 0.25)
    assert (row["ttft_s"], row["tpot_s"]) == (0.6, 0.25 / 8)
    assert row["e2e_s"] == pytest.approx(1.0, abs=0.5)


@pytest.fixture
def proxied(tmp_path: Path) -> Iterator[tuple[Proxied, Reporter]]:
    """A proxy before an engine that sends no spans, and the engine's plugin."""
    path, port = tmp_path / "vllm.sock", free_port()
    with Simulator(tmp_path, grpc=free_port(), service="chat-0", scenario=QUIET) as engine:
        settings = {
            "engines": [{"name": "chat-0", "url": engine.url, "plugin_socket": str(path)}],
            "proxy": {"listen": f"127.0.0.1:{port}", "join_wait": "1s"},
        }
        agent = AgentProcess.with_settings(tmp_path, AgentPorts.free(), settings)
        with agent, closing(Sender(str(path), pause_s=0.0)) as sender:
            yield Proxied(agent, f"http://127.0.0.1:{port}", tmp_path), Reporter(sender)


def test_the_proxys_row_has_the_engines_view_of_its_plugin(
    proxied: tuple[Proxied, Reporter],
) -> None:
    proxy, plugin = proxied
    proxy.chat("asked", tokens=12)
    before = proxy.row("asked")
    assert before["preemptions"] is before["engine_ttft_s"] is before["queue_s"] is None
    ended = finished(request_id=before["response_id"], **SPANS, goodput_ttft_s=0.1)
    plugin.step(scheduler(), iteration(ended, at=time.time()), 0)

    def amended() -> dict[str, Any]:
        row = proxy.row("asked")
        return row if row["preemptions"] is not None else {}

    row = eventually(amended, within_s=WITHIN_S, what="the plugin's figures")
    assert (row["vantage"], row["status"], row["preemptions"]) == ("proxy", "ok", 1)
    assert (row["queue_s"], row["prefill_s"], row["decode_s"]) == (0.01, 0.09, 0.4)
    assert (row["engine_ttft_s"], row["engine_e2e_s"], row["engine_tpot_s"]) == (0.1, 0.5, 0.04)
    assert row["holdback_s"] == pytest.approx(row["ttft_s"] - 0.1)
    # What the user had, and what the response told, stays.
    same = ("ttft_s", "tpot_s", "e2e_s", "input_tokens", "output_tokens", "finish_reason")
    assert {name: row[name] for name in same} == {name: before[name] for name in same}


def test_a_verdict_that_late_figures_determine_is_the_only_one_that_is_counted(
    proxied: tuple[Proxied, Reporter],
) -> None:
    """Responses that are not streamed: only the engine knows their times."""
    proxy, plugin = proxied
    ids = [f"late-{number}" for number in range(3)]
    body = {"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]}
    for request_id in ids:
        headers = {"X-Request-Id": request_id, "x-slo-ttft-ms": "1", "x-slo-tpot-ms": "9e4"}
        requests.post(
            f"{proxy.url}/v1/chat/completions", json=body, headers=headers, timeout=WITHIN_S
        ).raise_for_status()

    def summary() -> dict[str, int]:
        figures = proxy.agent.api.summary()
        return {name: figures[name] for name in ("requests", "missed", "undetermined")}

    def counted(verdict: str) -> float:
        return total(proxy.agent.api.exposition(), "llm_slo_requests_total", verdict=verdict)

    eventually(lambda: summary()["requests"] == 3, within_s=WITHIN_S, what="the end of the wait")
    assert summary() == {"requests": 3, "missed": 0, "undetermined": 3}
    assert total(proxy.agent.api.exposition(), "llm_requests_total") == 3
    assert counted("undetermined") == counted("missed") == 0
    for request_id in ids:
        figures = {"goodput_ttft_s": 0.1, "request_id": proxy.row(request_id)["response_id"]}
        plugin.step(scheduler(), iteration(finished(**SPANS, **figures), at=time.time()), 0)
    eventually(lambda: counted("missed") == 3, within_s=WITHIN_S, what="the verdicts")
    assert summary() == {"requests": 3, "missed": 3, "undetermined": 0}
    assert counted("undetermined") == 0
    assert total(proxy.agent.api.exposition(), "llm_requests_total") == 3


def _datagrams(watched: Watched) -> bytes:
    """A datagram as the plugin sends it: a step and an ended request."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        path = watched.path.with_name(f"{secrets.token_hex(4)}.sock")
        listening.bind(str(path))
        with closing(Sender(str(path), pause_s=0.0)) as sender:
            ended = finished(request_id="chatcmpl-flipped", **SPANS)
            Reporter(sender).step(scheduler(), iteration(ended, at=time.time()), 0)
        return listening.recv(65_536)


def _flipped(datagram: bytes, count: int) -> Iterator[bytes]:
    """The datagram with random bits changed behind its header."""
    for _ in range(count):
        changed = bytearray(datagram)
        for _ in range(6):
            place = HEADER.size + secrets.randbelow(len(datagram) - HEADER.size)
            changed[place] ^= 1 << secrets.randbelow(8)
        yield bytes(changed)


def _resident_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
