"""The proxy of the running agent, before simulated engines."""

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import requests
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.collector import Collector
from tests.real_parts.metric_pages import total
from tests.real_parts.ports import free_port
from tests.real_parts.waiting import eventually
from tests.simulated import MODEL, WITHIN_S, Simulator, rows_in

# Without traffic of the simulated engines: these tests count their own requests.
QUIET = {"arrival_rate": 0.001, "time_scale": 1.0}
ANSWER_WITHIN_S = 60.0
INVENTED = 200


@dataclass
class Proxied:
    """An agent with a proxy, and a client of the proxy."""

    agent: AgentProcess
    url: str
    folder: Path

    def chat(
        self,
        request_id: str,
        *,
        tokens: int = 4,
        headers: Mapping[str, str] | None = None,
        **fields: object,
    ) -> requests.Response:
        """A streamed chat completion with more fields in its body, read to its end."""
        response = self.post(tokens, {"X-Request-Id": request_id, **(headers or {})}, **fields)
        response.content  # noqa: B018
        return response

    def post(self, tokens: int, headers: Mapping[str, str], **fields: object) -> requests.Response:
        """A streamed chat completion whose body is not read yet."""
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": tokens}
        return requests.post(
            f"{self.url}/v1/chat/completions",
            json={"model": MODEL, "stream": True, **body, **fields},
            headers=dict(headers),
            stream=True,
            timeout=ANSWER_WITHIN_S,
        )

    def row(self, request_id: str) -> dict[str, Any]:
        """The settled row of one request."""

        def read() -> dict[str, Any]:
            row: dict[str, Any] = self.agent.api.request(request_id)
            return row if row["counted"] else {}

        return eventually(read, within_s=WITHIN_S, what=f"the row of {request_id}")

    def metric(self, name: str, **labels: str) -> float:
        """The value of a metric; 0 before it is published."""
        try:
            return total(self.agent.api.exposition(), name, **labels)
        except KeyError:
            return 0.0


_MINUTE_MS = 60_000
AGENTS = {
    "name": "agents",
    "e2e_ms": _MINUTE_MS,
    "session": {"first_turn_ttft_ms": _MINUTE_MS, "turn_ttft_ms": _MINUTE_MS},
}


def proxied_by(
    folder: Path,
    ports: AgentPorts,
    engines: list[Simulator],
    forward_to: str | None = None,
    **proxy: Any,
) -> Proxied:
    """An agent that is not started yet, with a proxy before these engines."""
    port = free_port()
    settings = {
        "engines": [
            {"name": f"engine-{n}", "url": engine.url, "scrape_interval": "0.5s"}
            for n, engine in enumerate(engines)
        ],
        "proxy": {"listen": f"127.0.0.1:{port}", "join_wait": "6s", "workers": 2, **proxy},
        "otlp": {"forward_to": forward_to},
        "nvml": {"enabled": False},
        "objectives": [{"name": "chat", "preset": "chat"}, AGENTS],
    }
    return Proxied(
        AgentProcess.with_settings(folder, ports, settings), f"http://127.0.0.1:{port}", folder
    )


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    """What the agent of the pair forwards spans to."""
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Proxied]:
    """A proxy before two engines."""
    folder, ports = tmp_path_factory.mktemp("pair"), AgentPorts.free()
    with (
        Simulator(folder, grpc=ports.grpc, service="engine-0", scenario=QUIET) as one,
        Simulator(folder, grpc=ports.grpc, service="engine-1", scenario=QUIET) as other,
    ):
        proxied = proxied_by(
            *(folder, ports, [one, other]),
            forward_to=f"grpc://127.0.0.1:{collector.port}",
            tenant_header="X-Team",
            user_header="X-User",
            workload_header="X-Job",
            session_header="X-Session-ID",
        )
        with proxied.agent:
            yield proxied


def test_requests_at_once_go_to_both_engines(pair: Proxied) -> None:
    names = [f"at-once-{number}" for number in range(8)]
    streams = [pair.post(1000, {"X-Request-Id": name}) for name in names]
    assert all(stream.content.endswith(b"[DONE]\n\n") for stream in streams)

    def joined() -> list[dict[str, Any]]:
        rows = [pair.row(name) for name in names]
        return rows if {row["vantage"] for row in rows} == {"joined"} else []

    # A span that comes late joins a row that was counted without it.
    rows = eventually(joined, within_s=WITHIN_S, what="the engines' spans")
    assert sorted(row["engine"] for row in rows) == ["engine-0"] * 4 + ["engine-1"] * 4


def test_a_request_has_its_tokens_and_what_its_client_says_of_it(pair: Proxied) -> None:
    names = {"X-Team": "search", "X-User": "ann", "X-Job": "nightly", "X-Session-ID": "s-1"}
    url = f"data:image/png;base64,{'A' * 400}"
    content = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": url}}]
    messages = [{"role": "user", "content": content}]
    response = pair.chat("of-ann", tokens=7, headers=names, priority=-3, messages=messages)
    # The client did not ask for its usage.
    assert all(b'"usage"' not in event for event in events_of(response))
    row = pair.row("of-ann")
    assert (row["vantage"], row["http_status"], row["tenant"]) == ("joined", 200, "search")
    assert (row["output_tokens"], row["finish_reason"]) == (7, "length")
    assert (row["end_user"], row["workload"], row["session"]) == ("ann", "nightly", "s-1")
    assert (row["priority"], row["media_parts"], row["media_bytes"]) == (-3, 1, 300)
    assert pair.agent.api.summary(tenant="search")["requests"] == 1


def test_a_session_is_shown_turn_by_turn_by_its_header_or_the_key_of_its_cache(
    pair: Proxied,
) -> None:
    for number in range(3):
        pair.chat(f"of-s-2-{number}", headers={"X-Session-ID": "s-2"})
    pair.chat("of-s-2-3", prompt_cache_key="s-2")
    for number in range(4):
        pair.row(f"of-s-2-{number}")
    found = pair.agent.api.json("/api/v1/conversation", {"session": "s-2"})
    assert [each["request_id"] for each in found["turns"]] == [f"of-s-2-{n}" for n in range(4)]
    assert [each["number"] for each in found["turns"]] == [1, 2, 3, 4]
    assert [each["gap_s"] is None for each in found["turns"]] == [True, False, False, False]
    assert all(each["gap_s"] >= 0 and each["ttft_s"] > 0 for each in found["turns"][1:])
    assert found["session"]["verdicts"] == {"agents": "met"}
    found = pair.agent.api.json("/api/v1/conversations", {"window": "5m"})
    assert {each["bucket"] for each in found["by_turn"]} >= {"1", "2-3", "4-7"}
    (judged,) = found["by_objective"]
    assert (judged["objective"], judged["missed"]) == ("agents", 0)


def events_of(response: requests.Response) -> list[bytes]:
    return [line for line in response.content.split(b"\n\n") if line.startswith(b"data: {")]


def test_a_key_is_stored_as_its_digest_alone(pair: Proxied) -> None:
    pair.chat("with-a-key", headers={"Authorization": "Bearer sk-very-secret"})
    assert pair.row("with-a-key")["tenant"].startswith("key-")
    with closing(sqlite3.connect(pair.folder / "goodput.db")) as database:
        dump = "\n".join(database.iterdump())
    assert "sk-very-secret" not in dump


def test_a_request_is_judged_by_its_own_limit(pair: Proxied) -> None:
    pair.chat("in-a-hurry", headers={"x-slo-ttft-ms": "0.001"})
    pair.chat("with-time", headers={"x-slo-ttft-ms": "9e4", "x-slo-tpot-ms": "9e4"})
    assert pair.row("in-a-hurry")["verdict"] == "missed"
    assert pair.row("with-time")["verdict"] == "met"


def test_a_number_that_no_table_can_hold_delays_no_other_row(pair: Proxied) -> None:
    pair.chat("absurd", n=2**63 - 1)
    pair.chat("after-the-absurd")
    assert pair.row("absurd")["choices"] is None
    assert pair.row("after-the-absurd")["choices"] == 1


def test_a_request_is_found_by_the_id_that_its_client_got(pair: Proxied) -> None:
    response = pair.post(4, {})
    (response_id,) = {json.loads(event[6:])["id"] for event in events_of(response)}
    sent_id = response.headers["X-Request-Id"]
    row = pair.row(sent_id)
    assert (row["vantage"], row["response_id"]) == ("joined", response_id)
    for request_id in (sent_id, response_id, row["engine_request_id"]):
        assert pair.agent.api.request(request_id)["span_id"] == row["span_id"]


def test_a_client_with_an_id_gets_no_other(pair: Proxied) -> None:
    assert "X-Request-Id" not in pair.chat("own-id").headers
    too_long = "x" * 300
    response = pair.chat(too_long)
    row = pair.row(response.headers["X-Request-Id"])
    # The engine got the id of the client unchanged.
    assert row["response_id"] == f"chatcmpl-{too_long}"
    assert pair.agent.api.request(row["response_id"])["span_id"] == row["span_id"]


def test_a_response_that_is_not_streamed_is_judged_by_the_engines_times(pair: Proxied) -> None:
    body = {"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]}
    for request_id, limit_ms in (("whole-in-time", "9e4"), ("whole-too-late", "0.001")):
        headers = {
            "X-Request-Id": request_id,
            "x-slo-ttft-ms": limit_ms,
            "x-slo-tpot-ms": "9e4",
        }
        requests.post(
            f"{pair.url}/v1/chat/completions", json=body, headers=headers, timeout=ANSWER_WITHIN_S
        ).raise_for_status()
    rows = [pair.row("whole-in-time"), pair.row("whole-too-late")]
    assert [row["verdict"] for row in rows] == ["met", "missed"]
    assert all(row["ttft_s"] is None and row["engine_ttft_s"] > 0 for row in rows)


def test_the_trace_context_passes_to_the_engine_and_what_is_not_sampled_is_not_forwarded(
    pair: Proxied, collector: Collector
) -> None:
    client, silent, traced = "cd" * 8, "ab" * 16, "ef" * 16
    for name, trace, flags in (("silent", silent, "00"), ("traced", traced, "01")):
        pair.chat(name, headers={"traceparent": f"00-{trace}-{client}-{flags}"})
    rows = [pair.row(name) for name in ("silent", "traced")]
    assert [row["vantage"] for row in rows] == ["joined", "joined"]
    assert [row["trace_id"] for row in rows] == [silent, traced]
    # The spans of one exporter come in the order of their requests.
    spans = eventually(
        lambda: _both(collector, traced),
        within_s=WITHIN_S,
        what="the spans of the proxy and of the engine",
    )
    own, engines = spans[rows[1]["proxy_span_id"]], spans[rows[1]["span_id"]]
    assert own.parent_span_id.hex() == client
    assert engines.parent_span_id == own.span_id
    assert own.name == f"chat {MODEL}"
    assert [span for span in collector.received() if span.trace_id.hex() == silent] == []


def _both(collector: Collector, trace: str) -> dict[str, Span]:
    spans = {s.span_id.hex(): s for s in collector.received() if s.trace_id.hex() == trace}
    return spans if len(spans) == 2 else {}


def test_an_unusable_store_affects_no_client(pair: Proxied) -> None:
    _rename(pair.folder, "requests", "elsewhere")
    assert pair.chat("unstored").status_code == 200
    eventually(
        lambda: pair.metric("llm_agent_store_failures_total", what="requests") > 0,
        within_s=WITHIN_S,
        what="a failure that is counted",
    )
    eventually(
        lambda: pair.metric("llm_agent_proxy_waiting_records") > 0,
        within_s=WITHIN_S,
        what="a record that waits",
    )
    _rename(pair.folder, "elsewhere", "requests")
    assert pair.row("unstored")["status"] == "ok"


def _rename(folder: Path, table: str, other: str) -> None:
    with closing(sqlite3.connect(folder / "goodput.db", timeout=30)) as database:
        database.execute(f"ALTER TABLE {table} RENAME TO {other}")


@pytest.mark.parametrize(
    ("path", "route", "status"),
    [("/v1/models", "/v1/models", "2xx"), ("/invented", "other", "4xx")],
)
def test_responses_without_a_row_are_counted_by_route_and_class_of_status(
    pair: Proxied, path: str, route: str, status: str
) -> None:
    def counted() -> float:
        return pair.metric("llm_proxy_responses_total", route=route, status=status)

    before = counted()
    for _ in range(3):
        requests.get(f"{pair.url}{path}?x=1", timeout=ANSWER_WITHIN_S)
    eventually(lambda: counted() == before + 3, within_s=WITHIN_S, what="the responses")
    assert pair.metric("llm_proxy_responses_total", route="/v1/chat/completions") == 0


def test_names_that_clients_invent_make_no_labels_and_no_groups(pair: Proxied) -> None:
    pair.chat("before-inventions")
    pair.row("before-inventions")
    lines = len(pair.agent.api.exposition().splitlines())
    replaced = pair.metric("llm_agent_labels_replaced_total", label="model")
    with closing(HTTPConnection(pair.url.removeprefix("http://"))) as connection:
        for number in range(INVENTED):
            name = f"made-up-{number}"
            body = json.dumps({"model": name, "messages": []})
            headers = {"X-User": name, "X-Job": name, "X-Session-ID": name}
            connection.request("POST", "/v1/chat/completions", body, headers)
            connection.getresponse().read()

    def counted() -> float:
        return pair.metric("llm_agent_labels_replaced_total", label="model") - replaced

    eventually(lambda: counted() == INVENTED, within_s=WITHIN_S, what="the inventions")
    invalid = rows_in(pair.agent, INVENTED, status="invalid")
    requested = {row["requested_model"] for row in invalid}
    assert {f"made-up-{number}" for number in range(INVENTED)} <= requested
    assert {row["model"] for row in invalid} == {None}
    # Only the series of an unknown model may be new, of its causes as well.
    exposition = pair.agent.api.exposition()
    assert len(exposition.splitlines()) - lines < INVENTED
    assert "made-up" not in exposition

    def groups() -> set[str | None]:
        found = pair.agent.api.breakdown(by="model", window="1h")["groups"]
        return {group["group"] for group in found}

    eventually(lambda: groups() == {MODEL, None}, within_s=WITHIN_S, what="two groups")
