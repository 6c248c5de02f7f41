"""The real vLLM behind the proxy: what its benchmark's client saw is what the agent stored."""

import json
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Self
from urllib.parse import urlsplit

import pytest

from tests.real_engine.watching import (
    ENGINE,
    LIMITS,
    SPANS_ARRIVE_WITHIN_S,
    Row,
    certainly_met,
    rows_once_there,
    settings,
    times_seen,
)
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.bench import BenchedRequest, BenchmarkResult, BenchmarkRunner, Load
from tests.real_parts.collector import Collector
from tests.real_parts.metric_pages import total
from tests.real_parts.ports import free_port
from tests.real_parts.vllm import Vllm
from tests.real_parts.waiting import eventually

PIECE_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes and the Unix time at which they passed."""

    data: bytes
    at: float


@dataclass(slots=True)
class TappedConnection:
    """Pieces to the engine, timed when read, and responses, timed before they are sent on."""

    requests: list[Piece] = field(default_factory=list)
    responses: list[Piece] = field(default_factory=list)


class Tap:
    """Relays every connection to one server while the block lasts."""

    def __init__(self, url: str) -> None:
        target = urlsplit(url)
        assert target.port is not None
        self._target = (target.hostname or "", target.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.connections: list[TappedConnection] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def exchange(self, request_id: str) -> TappedConnection:
        """The pieces from the request with this X-Request-Id to the next one on its connection."""
        wanted = f"\r\nx-request-id: {request_id}\r\n".encode()
        for connection in tuple(self.connections):
            requests = tuple(connection.requests)
            for number, piece in enumerate(requests):
                if wanted in piece.data.lower():
                    until = min((later.at for later in requests[number + 1 :]), default=time.time())
                    responses = [one for one in connection.responses if piece.at <= one.at <= until]
                    return TappedConnection([piece], responses)
        raise AssertionError(f"no request {request_id} went to the engine")

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                connection = TappedConnection()
                self.connections.append(connection)
                self._open += [client, server]
                _relay(client, server, connection.requests)
                _relay(server, client, connection.responses)

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for one in (self._listener, *self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


def _relay(source: socket.socket, sink: socket.socket, passed: list[Piece]) -> None:
    """Copy until the source ends, in a thread of its own."""

    def copy() -> None:
        with suppress(OSError):
            while data := source.recv(PIECE_BYTES):
                passed.append(Piece(data, time.time()))
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    threading.Thread(target=copy, daemon=True).start()


pytestmark = pytest.mark.timeout(1500)

LOADS = (
    Load(name="proxied-calm", requests_per_s=5, prompts=16),
    # Nearly at once, with long prompts: most must wait longer than the limit.
    Load(name="proxied-burst", requests_per_s=100, prompts=24, input_tokens=256),
)
# A wall clock that is being corrected and a monotonic one part by at most 0.5 ms a second
# (adjtime(3)); a request here takes less than two.
SLACK_S = 0.001
# So many tokens keep an engine at work for longer than a client takes to leave.
CHOICES, LONGEST = 8, 1500
# A token may be a part of a character, which has no text yet.
FIRST_TOKEN = b'"text":"'


def asked_id(request: BenchedRequest) -> str:
    """The X-Request-Id that the benchmark sent."""
    return request.request_id.removeprefix("cmpl-").removesuffix("-0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxied:
    """An agent whose proxy reaches the engine through a tap."""

    agent: AgentProcess
    tap: Tap
    url: str


@pytest.fixture(scope="module")
def proxied(
    engine: Vllm,
    ports: AgentPorts,
    collector: Collector,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Proxied]:
    """An agent of its own, on the ports that the engine sends its spans to."""
    port = free_port()
    folder = tmp_path_factory.mktemp("proxied")
    with Tap(engine.url) as tap:
        configured = settings(engine, collector, url=tap.url) | {
            "proxy": {"listen": f"127.0.0.1:{port}", "engine": ENGINE}
        }
        with AgentProcess.with_settings(folder, ports, configured) as agent:
            yield Proxied(agent=agent, tap=tap, url=f"http://127.0.0.1:{port}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the benchmark measured through the proxy, and the rows that the agent made of it."""

    results: list[BenchmarkResult]
    rows: dict[str, Row]
    summary: dict[str, Any]
    page: str

    @property
    def pairs(self) -> list[tuple[BenchedRequest, Row]]:
        """Each request of the benchmark with its row."""
        requests = [request for result in self.results for request in result.requests]
        return [(request, self.rows[asked_id(request)]) for request in requests]


@pytest.fixture(scope="module")
def measured(
    engine: Vllm,
    benchmark: BenchmarkRunner,
    proxied: Proxied,
    tmp_path_factory: pytest.TempPathFactory,
) -> Measured:
    """One run of the benchmark through the proxy, before all else that the agent sees."""
    folder = tmp_path_factory.mktemp("proxied-benchmark")
    results = benchmark.run(engine, LOADS, LIMITS, folder, url=proxied.url)
    wanted = {asked_id(request) for result in results for request in result.requests}
    api = proxied.agent.api

    def joined() -> list[Row]:
        rows = [row for row in rows_once_there(api, wanted) if row["request_id"] in wanted]
        return rows if all(row["vantage"] == "joined" for row in rows) else []

    rows = eventually(joined, within_s=SPANS_ARRIVE_WITHIN_S, what="joined rows")
    assert times_seen(rows, wanted) == dict.fromkeys(wanted, 1)
    return Measured(
        results=results,
        rows={row["request_id"]: row for row in rows},
        summary=api.summary(window="1h"),
        page=api.exposition(),
    )


def test_the_views_of_every_request_are_one_row(measured: Measured) -> None:
    for request, row in measured.pairs:
        assert row["status"] == "ok", request
        assert (row["engine"], row["route"]) == (ENGINE, "/v1/completions")
        assert row["input_tokens"] == request.input_tokens
        assert row["output_tokens"] == request.output_tokens
        assert row["max_gap_s"] >= row["tpot_s"]
        assert row["queue_s"] is not None
        assert row["engine_ttft_s"] > 0
        assert row["holdback_s"] == pytest.approx(row["ttft_s"] - row["engine_ttft_s"])
    assert measured.summary["requests"] == len(measured.rows)


def test_every_request_that_is_good_for_the_client_is_met(measured: Measured) -> None:
    good = [request for result in measured.results for request in certainly_met(result)]
    assert good
    assert {measured.rows[asked_id(request)]["verdict"] for request in good} == {"met"}


def test_a_verdict_follows_from_the_times_of_its_row(measured: Measured) -> None:
    for row in measured.rows.values():
        good = row["ttft_s"] <= LIMITS.ttft_ms / 1000 and row["tpot_s"] <= LIMITS.tpot_ms / 1000
        assert row["verdict"] == ("met" if good else "missed")
    assert {row["verdict"] for row in measured.rows.values()} == {"met", "missed"}


def test_the_metrics_page_counts_each_request_once_where_it_was_seen(measured: Measured) -> None:
    name = "gen_ai_server_time_to_first_token_seconds_count"
    assert total(measured.page, name, vantage="proxy") == len(measured.rows)


@pytest.mark.usefixtures("measured")
def test_a_client_that_leaves_frees_the_engine(engine: Vllm, proxied: Proxied) -> None:
    def generated() -> float:
        return total(engine.exposition(), "vllm:generation_tokens_total")

    def running() -> float:
        return total(engine.exposition(), "vllm:num_requests_running")

    before = generated()
    with engine.streaming(request_id="left", max_tokens=LONGEST, choices=CHOICES, url=proxied.url):
        pass
    eventually(lambda: running() == 0, within_s=60.0, what="an engine that is free again")
    assert generated() - before < CHOICES * LONGEST
    row = next(
        row for row in rows_once_there(proxied.agent.api, {"left"}) if row["request_id"] == "left"
    )
    assert (row["status"], row["vantage"]) == ("cancelled", "proxy")
    assert (row["http_status"], row["finish_reason"]) == (200, None)
    assert row["ttft_s"] < row["e2e_s"]


# Times between those of the engine's side and the client's, on one clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Unix times of one streamed answer on one side of the proxy."""

    asked: float
    first_token: float
    end: float


def first_token_at(pieces: Iterable[Piece]) -> float:
    """When the first event of a token had passed."""
    body = b""
    for piece in pieces:
        body += piece.data
        if FIRST_TOKEN in body:
            return piece.at
    raise AssertionError(f"no token in {body!r}")


def asked_by_socket(url: str, model: str, request_id: str) -> Seen:
    """A streamed completion: when it was sent at the earliest, and its bytes here at the latest."""
    address = urlsplit(url)
    body = json.dumps({"model": model, "prompt": "bacade", "max_tokens": 40, "stream": True})
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n"
        f"X-Request-Id: {request_id}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((str(address.hostname), int(address.port or 0)), 60) as client:
        asked = time.time()
        client.sendall(f"{head}{body}".encode())
        pieces = []
        while data := client.recv(65536):
            pieces.append(Piece(data, time.time()))
    return Seen(asked=asked, first_token=first_token_at(pieces), end=pieces[-1].at)


def seen_at_engine(tap: Tap, request_id: str) -> Seen:
    """The same on the engine's side, each time before the bytes were sent to the proxy."""
    exchange = tap.exchange(request_id)
    (request,), answers = exchange.requests, exchange.responses
    return Seen(asked=request.at, first_token=first_token_at(answers), end=answers[-1].at)


@pytest.mark.usefixtures("measured")
def test_the_times_of_a_row_lie_between_the_engines_and_the_clients(
    engine: Vllm, proxied: Proxied
) -> None:
    at_client = {
        request_id: asked_by_socket(proxied.url, engine.model, request_id)
        for request_id in (f"between-{number}" for number in range(8))
    }
    rows = {row["request_id"]: row for row in rows_once_there(proxied.agent.api, at_client.keys())}
    for request_id, client in at_client.items():
        row, upstream = rows[request_id], seen_at_engine(proxied.tap, request_id)
        # Unknown if the engine sent all tokens at once.
        decode_s = (row["tpot_s"] or 0.0) * (row["output_tokens"] - 1)
        assert decode_s <= row["e2e_s"] - row["ttft_s"] + SLACK_S
        started = datetime.fromisoformat(row["started_at"]).timestamp()
        assert client.asked <= started <= upstream.asked
        for before, took_s, after in (
            (upstream.first_token, row["ttft_s"], client.first_token),
            (upstream.end, row["e2e_s"], client.end),
        ):
            assert before - SLACK_S <= started + took_s <= after + SLACK_S
