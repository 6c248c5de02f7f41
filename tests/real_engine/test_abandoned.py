"""Requests whose clients left: what the real engine's spans lose, and where the agent finds it.

One agent hears the engine's plugin, and the other has a proxy; both get the engine's spans.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.real_engine.watching import ENGINE, RUNNING, SPANS_ARRIVE_WITHIN_S, Row
from tests.real_parts.agent_process import AgentApi, AgentPorts, HastyAgent
from tests.real_parts.collector import Collector, SpanRelay
from tests.real_parts.metric_pages import total
from tests.real_parts.ports import free_port
from tests.real_parts.vllm import ANSWER_WITHIN_S, Vllm, span_request_id
from tests.real_parts.waiting import eventually

pytestmark = pytest.mark.timeout(1500)

# Five aborted streams took 3,010 prompt tokens (vllm#55634).
LEFT, PROMPT_TOKENS = 5, 602
LONGEST = 1400
ABANDONED = tuple(f"abandoned-{number}" for number in range(LEFT))
FINISHED = ("finished-1", "finished-2")
CHOICES = "three-choices"
DIRECT_IDS = {span_request_id(name) for name in (*ABANDONED, *FINISHED, CHOICES)}
# Of what follows through the proxy.
WHOLE, TOKENS = 12, 60
SILENT_S = 1.0
MOST_UNACCOUNTED = 0.005
COUNTERS = {
    "input_tokens": "vllm:prompt_tokens_total",
    "output_tokens": "vllm:generation_tokens_total",
    "requests": "vllm:time_to_first_token_seconds_count",
    "succeeded": "vllm:request_success_total",
    "ended": "vllm:e2e_request_latency_seconds_count",
}
OF_THE_LEDGER = ("input_tokens", "output_tokens", "requests")

Counted = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agents:
    """The agents, the address of the proxy, and a further receiver of spans."""

    with_plugin: AgentApi
    with_proxy: AgentApi
    proxy: str
    collector: Collector


@pytest.fixture(scope="module")
def agents(
    engine: Vllm,
    ports: AgentPorts,
    collector: Collector,
    plugin_socket: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Agents]:
    """Both have read the engine's counters."""
    one, other, proxy = AgentPorts.free(), AgentPorts.free(), f"127.0.0.1:{free_port()}"
    seen = {"name": ENGINE, "url": engine.url, "scrape_interval": "1s"}
    hears = {"engines": [{**seen, "plugin_socket": str(plugin_socket)}]}
    before = {"listen": proxy, "engine": ENGINE, "continuous_usage": True, "join_wait": "2s"}
    passes = {"engines": [seen], "proxy": before}
    folder = tmp_path_factory.mktemp
    with (
        HastyAgent.with_settings(folder("plugin"), one, hears) as with_plugin,
        HastyAgent.with_settings(folder("proxy"), other, passes) as with_proxy,
        SpanRelay(ports.grpc, [one.grpc, other.grpc, collector.port]),
    ):
        wait_for_a_scrape(with_plugin.api)
        wait_for_a_scrape(with_proxy.api)
        yield Agents(
            with_plugin=with_plugin.api,
            with_proxy=with_proxy.api,
            proxy=f"http://{proxy}",
            collector=collector,
        )


def wait_for_a_scrape(api: AgentApi) -> None:
    """Return when the agent knows the engine's counters."""
    eventually(
        lambda: total(api.exposition(), "llm_agent_scrapes_total", outcome="ok", engine=ENGINE),
        within_s=SPANS_ARRIVE_WITHIN_S,
        what="a scrape",
    )


def counters(engine: Vllm) -> Counted:
    """What the engine itself has counted, once it has let go of all requests."""

    def idle() -> str:
        page = engine.exposition()
        return "" if total(page, "vllm:num_requests_running") else page

    page = eventually(idle, within_s=SPANS_ARRIVE_WITHIN_S, what="an idle engine")
    return {key: total(page, name) for key, name in COUNTERS.items()}


def less(one: Counted, other: Counted) -> dict[str, float]:
    """The difference, by name."""
    return {name: value - other[name] for name, value in one.items()}


def ask(url: str, path: str = "/v1/completions", **body: Any) -> requests.Response:
    """A streamed response whose body is not read yet."""
    request_id = body.pop("request_id", None)
    fields = {"model": "tiny-llama", "ignore_eos": True, "stream": True, **body}
    headers = {"X-Request-Id": request_id} if request_id else {}
    response = requests.post(
        f"{url}{path}", json=fields, headers=headers, stream=True, timeout=ANSWER_WITHIN_S
    )
    response.raise_for_status()
    return response


def long_prompt() -> list[int]:
    return list(range(10, 10 + PROMPT_TOKENS))


def leave(url: str, request_id: str) -> None:
    """Begin a stream with a long prompt, and leave it after its first token."""
    asked = ask(url, request_id=request_id, prompt=long_prompt(), max_tokens=LONGEST)
    with closing(asked) as response:
        next(line for line in response.iter_lines() if line.startswith(b"data:"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Direct:
    """What the engine counted of requests without the proxy, and which of them it finished.

    A busy engine may finish a request before it notices that its client has left.
    """

    begin: Counted
    end: Counted
    finished: frozenset[str]

    @property
    def grown(self) -> dict[str, float]:
        """The counters of these requests."""
        return less(self.end, self.begin)


@pytest.fixture(scope="module")
def direct(engine: Vllm, agents: Agents) -> Direct:
    """Clients that leave, and others that do not."""
    begin = counters(engine)
    for request_id in ABANDONED:
        leave(engine.url, request_id)
    for request_id in FINISHED:
        engine.complete(request_id=request_id, max_tokens=6)
    engine.complete(request_id=CHOICES, max_tokens=4, choices=3)
    # Spans leave the engine in the order in which requests end, so these come last.
    last = {span_request_id(name) for name in (*FINISHED, CHOICES)}
    eventually(
        lambda: last <= agents.collector.spans().keys(),
        within_s=SPANS_ARRIVE_WITHIN_S,
        what="the last spans",
    )
    left = {span_request_id(name) for name in ABANDONED}
    finished = frozenset(left & agents.collector.spans().keys())
    return Direct(begin=begin, end=counters(engine), finished=finished)


# The engine


def test_the_engine_reports_no_request_that_its_client_left(direct: Direct) -> None:
    """Neither by a span nor in its counters, though each had a first token."""
    assert len(direct.finished) < LEFT
    ended = len(FINISHED) + 3 + len(direct.finished)
    assert direct.grown["succeeded"] == direct.grown["ended"] == ended
    assert direct.grown["requests"] == LEFT + len(FINISHED) + 3
    assert direct.grown["output_tokens"] < LEFT * LONGEST


# Its plugin


@pytest.fixture(scope="module")
def rows(agents: Agents, direct: Direct) -> list[Row]:
    """The rows of all these requests; those of clients that left come 5 s later.

    A span that comes later still replaces the row of its request.
    """
    expected = len(DIRECT_IDS) + 2

    def found() -> list[Row]:
        of_these = [row for row in agents.with_plugin.requests() if row["request_id"] in DIRECT_IDS]
        traces = {span.trace_id.hex() for span in agents.collector.received()}
        told = [
            row
            for row in of_these
            if row["preemptions"] is not None
            and (row["finish_reason"] == "abort" or row["trace_id"] in traces)
        ]
        return told if len(told) == len(of_these) == expected else []

    return eventually(found, within_s=SPANS_ARRIVE_WITHIN_S, what=f"{expected} rows")


def test_with_the_plugin_a_request_whose_client_left_is_a_row(
    rows: list[Row], direct: Direct
) -> None:
    left = [row for row in rows if row["finish_reason"] == "abort"]
    unfinished = {span_request_id(name) for name in ABANDONED} - direct.finished
    assert {row["request_id"] for row in left} == unfinished
    for row in left:
        assert (row["status"], row["vantage"], row["engine"]) == ("cancelled", "engine", ENGINE)
        assert 0 < row["output_tokens"] < LONGEST
        assert 0 < row["ttft_s"] <= row["e2e_s"]
        assert row["queue_s"] + row["prefill_s"] <= row["e2e_s"]


def test_with_the_plugin_a_request_that_finished_has_one_row_of_its_span(rows: list[Row]) -> None:
    finished = [row for row in rows if row["finish_reason"] != "abort"]
    assert len(finished) >= len(FINISHED) + 3
    for row in finished:
        assert (row["status"], row["preemptions"]) == ("ok", 0)
        assert row["cached_tokens"] is not None


def test_with_the_plugin_no_token_that_the_engine_counted_is_missing(
    rows: list[Row], direct: Direct
) -> None:
    for of in ("input_tokens", "output_tokens"):
        assert sum(row[of] for row in rows) == direct.grown[of]


def test_the_agent_says_that_the_plugin_is_there(agents: Agents, rows: list[Row]) -> None:
    page = agents.with_plugin.exposition()
    assert total(page, "llm_engine_plugin_up", engine=ENGINE) == 1
    records = "llm_engine_plugin_records_total"
    assert total(page, records, engine=ENGINE, kind="step") > len(rows)
    assert total(page, records, engine=ENGINE, kind="request") >= len(rows)


# The ledger and the proxy


def leave_in_silence(engine: Vllm, agents: Agents) -> None:
    """Begin streams, and leave them when nothing more comes of a stopped engine.

    The engines of users make no token between a client's leaving and the request's end;
    this one would make some hundred a second.
    """
    prompt = long_prompt()
    streams = [ask(agents.proxy, prompt=prompt, max_tokens=LONGEST) for _ in range(LEFT)]
    events = [stream.iter_lines() for stream in streams]
    for lines in events:
        next(lines)

    def known() -> bool:
        left = [row for row in agents.with_proxy.requests() if row["status"] == "cancelled"]
        return len(left) == LEFT

    with engine.standing_still():
        for stream, lines in zip(streams, events, strict=True):
            connection: Any = stream.raw.connection
            connection.sock.settimeout(SILENT_S)
            with suppress(requests.ConnectionError):
                list(lines)
            stream.close()
        eventually(known, within_s=SPANS_ARRIVE_WITHIN_S, what="their rows")


def serve(url: str) -> None:
    """Streams that are read to their ends; one has three choices, and thrice a counted prompt."""
    messages = [{"role": "user", "content": "hogonu bari"}]
    ask(url, "/v1/chat/completions", messages=messages, n=3, max_tokens=20).content  # noqa: B018

    def whole(_: int) -> None:
        ask(url, prompt="bacade", max_tokens=TOKENS).content  # noqa: B018

    with ThreadPoolExecutor(RUNNING) as clients:
        list(clients.map(whole, range(WHOLE)))


def closed_ledger(api: AgentApi, grown: Counted) -> dict[str, Any]:
    """The ledger as soon as it is closed for all that the engine counted."""
    counted = {name: grown[name] for name in OF_THE_LEDGER}

    def closed() -> dict[str, Any]:
        ledger = api.summary(window="1h")["ledger"]
        return ledger if ledger is not None and ledger["counted"] == counted else {}

    return eventually(closed, within_s=SPANS_ARRIVE_WITHIN_S, what=f"a closed ledger of {grown}")


def test_what_vanishes_is_in_the_ledger_and_behind_the_proxy_that_is_nearly_nothing(
    engine: Vllm, agents: Agents, direct: Direct
) -> None:
    leave_in_silence(engine, agents)
    serve(agents.proxy)
    end = counters(engine)
    ledger = closed_ledger(agents.with_proxy, less(end, direct.begin))

    seen = [row for row in agents.with_proxy.requests() if row["request_id"] in DIRECT_IDS]
    vanished = {
        "input_tokens": direct.grown["input_tokens"] - sum(row["input_tokens"] for row in seen),
        "output_tokens": direct.grown["output_tokens"] - sum(row["output_tokens"] for row in seen),
        "requests": LEFT - len(direct.finished),
    }
    assert vanished["input_tokens"] == vanished["requests"] * PROMPT_TOKENS > 0
    proxied = less(end, direct.end)
    assert proxied["requests"] == LEFT + 3 + WHOLE
    for name, value in less(ledger["unaccounted"], vanished).items():
        assert -1e-6 <= value <= MOST_UNACCOUNTED * proxied[name], (ledger, vanished)
    by_reason = {"aborted": vanished["requests"], "finished": 0, "died": 0, "refused": 0}
    assert ledger["unaccounted_requests"] == pytest.approx(by_reason, abs=1e-6)
    assert ledger["rows_without_tokens"] == 0
