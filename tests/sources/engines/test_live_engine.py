"""What an audit reads of an engine's responses, and the request that it sends."""

import json
from collections.abc import Iterator
from email.utils import formatdate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.catalog import engine_facts as fact
from agent.errors import EngineUnreachable
from agent.records.audit import EvidencePart
from agent.sources.engines.live_engine import LiveEngine, outside_s
from tests.real_parts.ports import free_port
from tests.sources.engines.fixture_pages import body
from tests.sources.engines.wire import EngineServer

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


def test_everything_of_a_recorded_vllm_is_read(live: LiveEngine) -> None:
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


def test_a_clock_ahead_is_seen_in_the_date(live: LiveEngine, vllm: EngineServer) -> None:
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
    assert "no_known_series" in read.unread[EvidencePart.EXPOSITION]
    assert read.unread.keys() == {
        EvidencePart.EXPOSITION, EvidencePart.VERSION, EvidencePart.MODELS
    }  # fmt: skip
    assert read.evidence.answered is None


def test_an_engine_that_does_not_answer_is_an_error() -> None:
    live = LiveEngine(f"http://user:word@127.0.0.1:{free_port()}")
    with pytest.raises(EngineUnreachable, match="--engine: http://127"):
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


@pytest.mark.parametrize(
    ("answer", "status", "problem"),
    [(b"{}", 404, "HTTP 404"), (b"{}", 200, "KeyError: 'id'"), (b"x", 200, "Expecting value")],
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
