"""Clients of a vLLM with the middleware: each gets the bytes that it gets without, and its row is
the one that the agent's proxy would have made.

vLLM loads the middleware by its flag, and exports spans.
"""

import json
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import pytest

from agent.records.engine import ServedRequest
from agent.sources.plugin_records import read_datagram
from tests.real_engine.conftest import ENGINE_OPTIONS
from tests.real_engine.proxy_clients import (
    BY_CURL,
    CHAT,
    COMPLETIONS,
    ELSEWHERE,
    MEASURED,
    MESSAGES,
    REFUSED,
    RESPONSES,
    Case,
    ComparableResponse,
    hear,
    response_id_of,
)
from tests.real_engine.watching import ENGINE, Row
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.clients import Clients, Exchange
from tests.real_parts.engine_server import MODEL
from tests.real_parts.ports import free_port
from tests.real_parts.vllm import ANSWER_WITHIN_S, SpanExport, Vllm, plugin_environment
from tests.real_parts.waiting import eventually

pytestmark = pytest.mark.timeout(1500)

FLAG = ("--middleware", "goodput_agent_vllm.middleware.GoodputMiddleware")
ROWS_WITHIN_S = 120.0
DIRECT, PROXIED = "direct", "proxied"

# One of each kind: each protocol, streamed or not, several choices, tools, refusals, spellings.
NAMES = (
    *("chat", "chat streamed with usage", "chat streamed without usage", "chat two choices"),
    *("chat two choices streamed", "chat one token streamed", "chat named tool"),
    *("completions streamed", "completions two prompts", "completions two prompts streamed"),
    *("responses", "responses streamed", "messages", "messages streamed", "messages tool streamed"),
    *("curl", "curl without a name", "curl http 1.0 streamed", "curl chunked", "curl gzip wished"),
    *("curl each usage alone", "curl escaped path", "curl expecting", "curl huge"),
    *("chat unknown model streamed", "chat too long streamed", "messages too long streamed"),
    *("chat no choices", "responses after an unknown one", "curl malformed", "curl no body"),
    *("models", "head of models", "chat got", "preflight", "slash at the end", "two slashes"),
)
_ALL = {each[0]: Case(*each) for each in (*MEASURED, *BY_CURL, *REFUSED, *ELSEWHERE)}
CASES = tuple(_ALL[name] for name in NAMES)
EACH_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


class Tee:
    """Stands between a plugin and the agent, and keeps what passes."""

    def __init__(self, folder: Path, agent: Path) -> None:
        self.path = folder / "tee.sock"
        self._agent = str(agent)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.path))
        self._passed: list[bytes] = []
        self._thread = threading.Thread(target=self._pass_on, daemon=True)
        self._thread.start()

    def _pass_on(self) -> None:
        while datagram := self._socket.recv(1 << 20):
            self._passed.append(datagram)
            self._socket.sendto(datagram, self._agent)

    @property
    def served(self) -> list[ServedRequest]:
        """Every HTTP request that the middleware reported, also those of the proxy."""
        contents = [read_datagram(each, ENGINE, time.time()) for each in tuple(self._passed)]
        return [served for content in contents if content for served in content.served]

    def close(self) -> None:
        """Stop."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", str(self.path))
        self._thread.join()
        self._socket.close()


@dataclass(frozen=True, slots=True)
class Watched:
    """An engine with the middleware, an agent with its proxy, and what stands between both."""

    engine: Vllm
    agent: AgentProcess
    tee: Tee
    proxy_url: str


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    ports, proxy_port, agents_socket = AgentPorts.free(), free_port(), folder / "vllm.sock"
    with closing(Tee(folder, agents_socket)) as tee:
        engine = Vllm(
            folder,
            port=free_port(),
            spans=SpanExport.grpc(ports.grpc),
            service=ENGINE,
            extra=[*ENGINE_OPTIONS, *FLAG],
            environment=plugin_environment(folder / "plugin", tee.path, middleware=False),
        )
        settings = {
            "engines": [{"name": ENGINE, "url": engine.url, "plugin_socket": str(agents_socket)}],
            "objectives": [{"name": "chat", "ttft_ms": 60_000, "tpot_ms": 10_000}],
            "proxy": {"listen": f"127.0.0.1:{proxy_port}", "return_request_id": False},
            "nvml": {"enabled": False},
        }
        with AgentProcess.with_settings(folder, ports, settings) as agent, engine:
            yield Watched(engine, agent, tee, f"http://127.0.0.1:{proxy_port}")


@dataclass(frozen=True, slots=True)
class Asked:
    """One case on three ways: without the middleware, with it, and through the proxy, too."""

    plain: ComparableResponse
    direct: ComparableResponse
    ids: Mapping[str, str]
    exchanges: Mapping[str, Exchange]


@pytest.fixture(scope="module")
def asked(engine: Vllm, watched: Watched) -> dict[str, Asked]:
    with (
        closing(Clients(engine.url)) as plain,
        closing(Clients(watched.engine.url)) as direct,
        closing(Clients(watched.proxy_url)) as proxy,
    ):
        ways = {"plain": plain, DIRECT: direct, PROXIED: proxy}
        return {case.name: ask(case, ways) for case in CASES}


def ask(case: Case, ways: Mapping[str, Clients]) -> Asked:
    ids: dict[str, str] = {}
    heard: dict[str, ComparableResponse] = {}
    for way, clients in ways.items():
        named = replace(case, name=f"{way} {case.name}")
        heard[way] = hear(named, clients)
        ids[way] = response_id_of(clients.exchange) or named.request_id
    exchanges = {way: clients.exchange for way, clients in ways.items()}
    return Asked(heard["plain"], heard[DIRECT], ids, exchanges)


@pytest.fixture(scope="module")
def rows(asked: dict[str, Asked], watched: Watched) -> list[Row]:
    """Every row, once each request has one with all that is to come."""
    wanted = [
        (each.ids[way], each.exchanges[way].status)
        for each in asked.values()
        for way in (DIRECT, PROXIED)
        if is_measured(each.exchanges[way])
    ]

    def found() -> list[Row]:
        rows = watched.agent.api.requests()
        of_id = {row["request_id"].removeprefix("chatcmpl-"): row for row in rows}
        for request_id, status in wanted:
            vantage = "joined" if status == 200 else "proxy"
            row = of_id[request_id]
            assert row["vantage"] == vantage, request_id
            # The plugin's figures may come after the span.
            if status == 200 and (row["choices"] or 1) == 1:
                assert row["preemptions"] is not None, request_id
        return rows

    return eventually(found, within_s=ROWS_WITHIN_S, what="all rows")


ROUTES = {CHAT, COMPLETIONS, RESPONSES, MESSAGES}


def path_of(exchange: Exchange) -> str:
    return exchange.path.partition("?")[0].replace("%63", "c")


def is_measured(exchange: Exchange) -> bool:
    return exchange.method == "POST" and path_of(exchange) in ROUTES


@EACH_CASE
def test_a_client_gets_the_same_with_and_without_the_middleware(
    case: Case, asked: dict[str, Asked]
) -> None:
    each = asked[case.name]
    assert each.plain.status == case.status
    assert each.direct.comparable == each.plain.comparable


@EACH_CASE
def test_a_request_has_one_row_on_each_way(
    case: Case, asked: dict[str, Asked], rows: list[Row]
) -> None:
    for way in (DIRECT, PROXIED):
        found = rows_of(asked[case.name].ids[way], rows)
        assert len(found) == is_measured(asked[case.name].exchanges[way]), way


def rows_of(request_id: str, rows: list[Row]) -> list[Row]:
    # Without an id of its client, a request of the middleware has the engine's.
    named = (request_id, f"chatcmpl-{request_id}")
    return [row for row in rows if row["request_id"] in named and row["route"] is not None]


# Of each request another value: known on both ways, or on none.
OWN = frozenset(
    (
        *("request_id", "response_id", "engine_request_id", "trace_id", "span_id", "proxy_span_id"),
        *("parent_span_id", "started_at", "ended_at", "explained_at", "settles_at", "counted"),
        *("ttft_s", "tpot_s", "e2e_s", "max_gap_s", "gaps", "first_byte_s", "first_visible_s"),
        *("queue_s", "prefill_s", "decode_s", "front_s", "rest_s", "holdback_s"),
        *("engine_ttft_s", "engine_tpot_s", "engine_e2e_s", "clock_skew_s"),
        *("output_bytes", "input_bytes"),
    )
)
# Of several choices the proxy knows less: a span has no preemptions, and the prompt's tokens once
# for each choice.
MORE_OF_CHOICES = frozenset(("preemptions", "input_tokens", "cached_tokens"))
# A span is of one choice; without spans no times are of several.
TIMES_OF_ONE_CHOICE = frozenset(
    (
        *("queue_s", "prefill_s", "decode_s", "front_s", "rest_s", "holdback_s"),
        *("engine_ttft_s", "engine_tpot_s", "engine_e2e_s"),
    )
)
# The proxy asks for usage, so it knows how many tokens an event has.
MORE_OF_PROXY = frozenset(("gap_tokens",))
# Only spans name their service.
OF_SPANS = frozenset(("service_name",))
# A larger body is not read; the proxy's row has the model of the engine's span.


@EACH_CASE
def test_the_row_of_the_middleware_is_that_of_the_proxy(
    case: Case, asked: dict[str, Asked], rows: list[Row]
) -> None:
    each = asked[case.name]
    if not is_measured(each.exchanges[DIRECT]):
        return
    (direct,), (proxied,) = (rows_of(each.ids[way], rows) for way in (DIRECT, PROXIED))
    for way, row in ((DIRECT, direct), (PROXIED, proxied)):
        assert row["input_bytes"] == len(each.exchanges[way].sent)
    assert direct["output_bytes"] == len(each.exchanges[DIRECT].body)
    assert {name for name in direct if not is_explained(name, direct, proxied)} == set()


def is_explained(name: str, direct: Row, proxied: Row) -> bool:
    """Whether a field of both rows is the same, or differs by a rule."""
    of_direct, of_proxied = direct[name], proxied[name]
    several = (direct["choices"] or 1) > 1
    if name in TIMES_OF_ONE_CHOICE and several:
        return of_direct is None
    if name in OWN:
        return (of_direct is None) == (of_proxied is None)
    if name in MORE_OF_CHOICES and several and of_proxied is None:
        return True
    if name in MORE_OF_PROXY and of_direct is None:
        return True
    return name in OF_SPANS or bool(of_direct == of_proxied)


# The step of the kernel's clock, by which an arrival is known.
STEP_S = 0.01


@EACH_CASE
def test_the_proxy_saw_a_request_around_the_middleware(
    case: Case, asked: dict[str, Asked], rows: list[Row], watched: Watched
) -> None:
    """The middleware reports a request of the proxy, too: both saw the very same."""
    each = asked[case.name]
    if not is_measured(each.exchanges[PROXIED]):
        return
    (row,) = rows_of(each.ids[PROXIED], rows)
    (served,) = [one for one in watched.tee.served if one.record.trace_id == row["trace_id"]]
    record, view = served.record, served.record.proxied
    assert served.proxied
    assert view is not None
    started_at, ended_at = (
        datetime.fromisoformat(row[n]).timestamp() for n in ("started_at", "ended_at")
    )
    assert started_at <= record.started_at + STEP_S
    assert record.ended_at <= ended_at + STEP_S
    for of_proxy, seen in (
        (row["e2e_s"], record.e2e_s),
        (row["ttft_s"], record.ttft_s),
        (row["first_byte_s"], view.first_byte_s),
        (row["first_visible_s"], view.first_visible_s),
    ):
        assert (of_proxy is None) == (seen is None)
        assert seen is None or 0 <= seen <= of_proxy + STEP_S
    assert (row["gaps"] is None) == (view.gaps is None)
    assert (row["status"], row["http_status"]) == (record.status, record.http_status)
    assert (row["finish_reason"], row["response_id"]) == (record.finish_reason, view.response_id)
    assert (row["tenant"], row["streamed"]) == (record.tenant, view.streamed)


# Clients that leave

LONG = {"model": MODEL, "prompt": "bacade", "max_tokens": 1500, "ignore_eos": True}
LONG_STREAM = {**LONG, "stream": True}


def leave(url: str, request_id: str, stage: str) -> None:
    """Send a completion, and close the connection at this stage."""
    body = json.dumps(LONG if stage == "before the head" else LONG_STREAM).encode()
    host, port = url.removeprefix("http://").split(":")
    lines = ["POST /v1/completions HTTP/1.1", "Host: engine", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(body)}", f"X-Request-Id: {request_id}", "", ""]
    with socket.create_connection((host, int(port)), ANSWER_WITHIN_S) as connection:
        connection.sendall("\r\n".join(lines).encode())
        if stage == "before the body's end":
            connection.sendall(body[:20])
            # What an application has not read yet is no request.
            time.sleep(0.2)
            return
        connection.sendall(body)
        if stage == "before the head":
            connection.settimeout(0.3)
            with pytest.raises(TimeoutError):
                connection.recv(1)
            return
        got = b""
        while got.count(b"data: ") < {"after the first token": 1, "in the stream": 9}[stage]:
            got += connection.recv(65_536)


STAGES = ("before the body's end", "before the head", "after the first token", "in the stream")


@pytest.mark.parametrize("stage", STAGES)
def test_a_client_that_leaves_has_the_row_that_the_proxy_would_make(
    stage: str, watched: Watched
) -> None:
    found: list[Row] = []
    for way, url in ((DIRECT, watched.engine.url), (PROXIED, watched.proxy_url)):
        request_id = re.sub("[^a-z]+", "-", f"left {way} {stage}")
        leave(url, request_id, stage)

        def rows(request_id: str = request_id) -> list[Row]:
            all_rows = rows_of(request_id, watched.agent.api.requests())
            return [row for row in all_rows if stage == STAGES[0] or row["engine_request_id"]]

        (row,) = eventually(rows, within_s=ROWS_WITHIN_S, what=request_id)
        found.append(row)
    direct, proxied = found
    assert direct["status"] == "cancelled"
    # How many tokens it makes before it stops is up to the engine.
    own = {"output_tokens", "tpot_s", "engine_tpot_s", *MORE_OF_CHOICES}
    # The engine sends no span of it: the proxy's row has the plugin's figures alone.
    own |= {"vantage", "settles_at", "parent_span_id", "proxy_span_id"}
    if stage == STAGES[0]:
        # The proxy chose no engine.
        own |= {"engine"}
    assert {n for n in direct if n not in own and not is_explained(n, direct, proxied)} == set()
    assert 0 < (direct["output_tokens"] or 1) < 1500
