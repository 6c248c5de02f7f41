"""Expositions and health over HTTP, and what an audit reads of an engine."""

import gzip
import json
import threading
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.catalog import engine_facts as fact
from agent.errors import EngineUnreachable, ExpositionUnreadable
from agent.records.audit import EvidencePart
from agent.sources.engines.fetch import MAX_BODY_BYTES, HealthProbe, fetch, open_session
from agent.sources.engines.live_engine import LiveEngine, outside_s
from tests.real_parts.ports import free_port
from tests.sources.engines.fixture_pages import body
from tests.sources.engines.wire import EngineServer

PLENTY_S = 20.0
SHORT_S = 0.3
HEAD = b"HTTP/1.1 200 OK\r\n"


def page_of(url: str, timeout_s: float = PLENTY_S) -> bytes:
    with open_session() as session:
        return fetch(session, f"{url}/metrics", timeout_s=timeout_s)


def unreachable(url: str, timeout_s: float = PLENTY_S) -> str:
    with pytest.raises(EngineUnreachable) as caught:
        page_of(url, timeout_s)
    return caught.value.reason


def unreadable(url: str) -> str:
    with pytest.raises(ExpositionUnreadable) as caught:
        page_of(url)
    return caught.value.reason


def test_a_refused_connection_is_named(engine: EngineServer) -> None:
    engine.stop()
    with pytest.raises(
        EngineUnreachable, match=r"/metrics cannot be reached: .*refused$"
    ) as caught:
        page_of(engine.url)
    assert caught.value.reason == "connection"


@pytest.mark.parametrize("status", [301, 404, 503])
def test_any_status_but_200_is_an_error(engine: EngineServer, status: int) -> None:
    engine.answers("/metrics", b"a 1\n", status=status, headers=("Location: /",))
    assert unreachable(engine.url) == "http_status"
    assert engine.asked == ["/metrics"]


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param((b"",), id="silence"),
        pytest.param((HEAD, b"X"), id="headers"),
        pytest.param((HEAD + b"Content-Length: 999999\r\n\r\n", b"a 1\n"), id="body"),
        pytest.param((HEAD + b"\r\n", b"a 1\n"), id="body-without-length"),
        pytest.param(
            (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"4\r\na 1\n\r\n"), id="chunks"
        ),
    ],
)
def test_an_answer_that_drips_ends_at_the_deadline(
    engine: EngineServer, pieces: tuple[bytes, ...]
) -> None:
    engine.drips("/metrics", *pieces)
    assert unreachable(engine.url, SHORT_S) == "timeout"


GZIP = b"Content-Encoding: gzip\r\n"


@pytest.mark.parametrize(
    ("head", "sent", "reason"),
    [
        (b"Content-Length: 400\r\n", b"a 1\n", "cut_off"),
        # The limit counts what comes out of compression.
        (GZIP, gzip.compress(b"\n" * (MAX_BODY_BYTES + 1)), "too_large"),
        (GZIP + b"Content-Length: 4\r\n", b"a 1\n", "encoding"),
    ],
    ids=["cut off", "bomb", "no gzip"],
)
def test_a_body_that_is_not_what_it_claims_is_refused(
    engine: EngineServer, head: bytes, sent: bytes, reason: str
) -> None:
    engine.scripts["/metrics"] = lambda handler: _write(handler, HEAD + head + b"\r\n" + sent)
    assert unreadable(engine.url) == reason


def test_of_100_megabytes_only_the_limit_is_read(engine: EngineServer) -> None:
    sent: list[int] = []
    done = threading.Event()

    def pour(handler: BaseHTTPRequestHandler) -> None:
        try:
            handler.wfile.write(HEAD + b"\r\n")
            for _ in range(100):
                handler.wfile.write(b"#" * 1024 * 1024)
                sent.append(1024 * 1024)
        finally:
            done.set()

    engine.scripts["/metrics"] = pour
    assert unreadable(engine.url) == "too_large"
    assert done.wait(PLENTY_S)
    # What the kernel had buffered on both sides comes on top of the limit.
    assert sum(sent) < MAX_BODY_BYTES * 2


def test_the_engine_is_asked_without_the_proxy_of_the_environment(
    engine: EngineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    engine.answers("/metrics", b"a 1\n")
    assert page_of(engine.url) == b"a 1\n"


def test_a_connection_is_not_kept_for_the_next_page(engine: EngineServer) -> None:
    ports: list[int] = []

    def keep_alive(handler: BaseHTTPRequestHandler) -> None:
        ports.append(handler.client_address[1])
        asked = handler.headers
        assert (asked["Accept-Encoding"], asked["Connection"]) == ("identity", "close")
        _write(handler, HEAD + b"Content-Length: 0\r\n\r\n")
        handler.close_connection = False

    engine.scripts["/metrics"] = keep_alive
    with open_session() as session:
        for _ in range(3):
            fetch(session, f"{engine.url}/metrics", timeout_s=PLENTY_S)
    assert len(set(ports)) == 3


def test_a_password_in_the_url_stays_out_of_the_message(engine: EngineServer) -> None:
    url = engine.url.replace("//", "//user:hunter2@")
    with pytest.raises(EngineUnreachable, match=engine.address) as caught:
        page_of(url)
    assert "hunter2" not in str(caught.value)


def _write(handler: BaseHTTPRequestHandler, data: bytes) -> None:
    handler.wfile.write(data)


def status(engine: EngineServer, *, timeout_s: float = 20.0) -> int | None:
    with open_session() as session:
        return HealthProbe(engine.url + "/", session, timeout_s=timeout_s).status()


def test_health_is_the_status_of_the_answer(engine: EngineServer) -> None:
    for code in (200, 503, 302):
        engine.answers("/health", b"", status=code)
        assert status(engine) == code
    assert engine.asked == ["/health"] * 3
    # Also of one that never ends.
    engine.drips("/health", b"HTTP/1.1 200 OK\r\n\r\n", b"x")
    assert status(engine) == 200
    engine.drips("/health", b"HTTP/1.1", b"1")
    assert status(engine, timeout_s=0.3) is None
    engine.answers("/health", b"")
    engine.stop()
    assert status(engine) is None


# What an audit reads of an engine's responses, and the request that it sends

NOW = 1_795_000_000.25
MODELS = json.dumps({"data": [{"id": "tiny", "max_model_len": 2048}, {"id": "adapter"}]}).encode()


@pytest.fixture
def vllm(engine: EngineServer) -> EngineServer:
    engine.answers("/metrics", body("vllm-0.32.0"))
    engine.answers("/version", b'{"version": "0.32.0"}')
    engine.answers("/v1/models", MODELS)
    engine.answers("/health", b"", headers=(f"Date: {formatdate(NOW, usegmt=True)}",))
    return engine


@pytest.fixture
def live(vllm: EngineServer) -> Iterator[LiveEngine]:
    live = LiveEngine(vllm.url, key="secret", clock=lambda: NOW)
    yield live
    live.close()


def test_everything_of_a_recorded_vllm_is_read(live: LiveEngine, vllm: EngineServer) -> None:
    read = live.read()
    found = read.evidence
    assert read.unread == {}
    assert found.sample is not None
    assert found.sample.fact(fact.KV_CAPACITY_TOKENS.name) == 524_288
    assert found.cache_config["enable_prefix_caching"] == "True"
    assert found.answered == {"2xx": 11.0, "5xx": 12.0}
    assert (found.version, found.models, found.max_model_len) == (
        "0.32.0",
        ("tiny", "adapter"),
        2048,
    )
    assert (found.health, found.needs_key, found.date_lead_s) == (200, False, 0.0)
    lengths = (found.input_lengths, found.output_lengths, found.step_tokens)
    assert [each and each.counts[-1] for each in lengths] == [11.0, 11.0, 495.0]
    assert (
        found.expected <= {name for name, _ in found.sample.facts} | found.sample.histograms.keys()
    )
    # A clock ahead is seen in the date.
    vllm.answers("/health", b"", headers=(f"Date: {formatdate(NOW + 30, usegmt=True)}",))
    assert live.read().evidence.date_lead_s == pytest.approx(29.75)


def test_an_engine_behind_a_key_is_read_with_it(live: LiveEngine, vllm: EngineServer) -> None:
    given_keys = []

    def script(handler: object) -> None:
        headers = getattr(handler, "headers", {})
        given_keys.append(headers.get("Authorization"))
        known = headers.get("Authorization") == "Bearer secret"
        vllm.answers("/answer", MODELS if known else b"{}", status=200 if known else 401)
        vllm.scripts["/answer"](handler)  # type: ignore[arg-type]

    vllm.scripts["/v1/models"] = script
    found = live.read().evidence
    assert found.needs_key is True
    assert found.models == ("tiny", "adapter")
    assert set(given_keys) == {None, "Bearer secret"}


def test_an_engine_without_statistics_is_still_read(live: LiveEngine, vllm: EngineServer) -> None:
    vllm.answers("/metrics", b"python_info 1\n")
    vllm.answers("/version", b"[]")
    vllm.answers("/v1/models", b'{"data": []}')
    read = live.read()
    assert read.evidence.sample is None
    assert "no series of a known engine" in read.unread[EvidencePart.EXPOSITION]
    assert read.unread.keys() == {
        EvidencePart.EXPOSITION, EvidencePart.VERSION, EvidencePart.MODELS
    }  # fmt: skip
    assert read.evidence.answered is None


def test_an_engine_that_does_not_answer_is_an_error() -> None:
    live = LiveEngine(f"http://user:word@127.0.0.1:{free_port()}")
    with pytest.raises(EngineUnreachable, match="no engine answers: http://127"):
        live.read()


def test_one_tiny_request_is_sent_with_its_trace(live: LiveEngine, vllm: EngineServer) -> None:
    vllm.answers("/v1/completions", b'{"id": "cmpl-1"}')
    trial, response_id = live.send("tiny")
    ((headers, sent),) = vllm.posted
    assert (trial.problem, response_id) == (None, "cmpl-1")
    assert headers["X-Request-Id"] == trial.request_id
    assert headers["traceparent"].endswith("-01")
    assert headers["Authorization"] == "Bearer secret"
    assert json.loads(sent)["max_tokens"] == 2


def test_a_request_without_a_response_has_a_problem_in_plain_words(
    live: LiveEngine, vllm: EngineServer
) -> None:
    def hang_up(handler: BaseHTTPRequestHandler) -> None:
        handler.close_connection = True

    vllm.scripts["/v1/completions"] = hang_up
    trial, _ = live.send("tiny")
    assert trial.problem == "the connection was closed without a response"
    vllm.stop()
    trial, _ = live.send("tiny")
    assert trial.problem == "connection refused"


@pytest.mark.parametrize(
    ("answer", "status", "problem"),
    [(b"{}", 404, "HTTP 404"), (b"{}", 200, "not that of an engine"), (b"x", 200, "not that")],
)
def test_a_request_that_fails_has_a_problem(
    live: LiveEngine, vllm: EngineServer, answer: bytes, status: int, problem: str
) -> None:
    vllm.answers("/v1/completions", answer, status=status)
    trial, response_id = live.send("tiny")
    assert response_id is None
    assert trial.problem is not None
    assert problem in trial.problem


@given(*[st.integers(-50, 50)] * 4)
def test_a_time_is_outside_by_as_much_as_it_must_be(a: int, b: int, c: int, d: int) -> None:
    """By trying every time between the first and the last one."""
    first, last, begin, end = min(a, b), max(a, b), min(c, d), max(c, d)
    nearest = min(
        (t - max(begin, min(end, t)) for t in range(first, last + 1)), key=lambda lead: abs(lead)
    )
    assert outside_s(first, last, begin, end) == nearest
