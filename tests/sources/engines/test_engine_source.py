"""Reads of an engine's exposition and models, and the directory of engines."""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

import pytest

from agent.catalog import engine_facts as fact
from agent.catalog.reasons import SCRAPES_FAILED
from agent.errors import ExpositionUnreadable
from agent.records.engine import EngineIdentity, EngineSample
from agent.sources.engines.directory import EngineDirectory
from agent.sources.engines.engine_source import (
    EngineSource,
    ScrapeResult,
    ServedModels,
    read_model,
    read_served,
)
from agent.sources.engines.fetch import open_session
from tests.sources.engines.fixture_pages import body
from tests.sources.engines.wire import EngineServer

MODELS = b'{"object":"list","data":[{"id":"served","root":"/models/x","parent":null}]}'


@dataclass
class Reads:
    """A source of the fake engine, and everything that its reads returned."""

    engine: EngineServer
    results: list[ScrapeResult] = field(default_factory=list)
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.session = open_session()
        self.source = self.source_of("auto")

    def source_of(self, kind: str, *, path: str = "", timeout_s: float = 20.0) -> EngineSource:
        return EngineSource(
            name="chat",
            url=self.engine.url + path,
            kind=kind,
            timeout_s=timeout_s,
            session=self.session,
        )

    def read(self, page: bytes | None = None, path: str = "/metrics") -> ScrapeResult:
        if page is not None:
            self.engine.answers(path, page)
        self.now += 5
        result = self.source.read(self.now)
        assert (result.sample is None) is (result.failure is not None)
        self.results.append(result)
        return result

    @property
    def samples(self) -> list[EngineSample]:
        return [result.sample for result in self.results if result.sample is not None]

    @property
    def reasons(self) -> list[str]:
        """The faults and failures of all reads."""
        found = [
            reason
            for result in self.results
            for reason in (*result.faults, result.failure)
            if reason is not None
        ]
        assert set(found) <= set(SCRAPES_FAILED)
        return found


@pytest.fixture
def reads(engine: EngineServer) -> Iterator[Reads]:
    reads = Reads(engine)
    with reads.session:
        yield reads


def unnamed_page(output_tokens: int) -> bytes:
    """A page whose series do not name the model."""
    return (
        f'vllm:num_requests_running{{engine="0"}} 1\n'
        f'vllm:generation_tokens_total{{engine="0"}} {output_tokens}\n'
    ).encode()


def test_a_read_gives_a_sample(reads: Reads) -> None:
    reads.read(body("vllm-0.32.0"))
    (sample,) = reads.samples
    assert (sample.engine, sample.at, sample.dialect) == ("chat", 1005.0, "vllm")
    assert sample.model == "tiny-llama"
    assert sample.process_started_at == 1795231551.33
    assert sample.fact(fact.OUTPUT_TOKENS.name) == 1793
    assert sample.fact(fact.REQUESTS_FINISHED.name, "length") == 11
    assert fact.TIME_TO_FIRST_TOKEN.name in sample.histograms
    assert reads.reasons == []
    assert reads.engine.asked == ["/metrics"]


def test_a_sample_holds_how_long_its_read_took(reads: Reads) -> None:
    reads.engine.answers("/metrics", body("vllm-0.32.0"))
    clock = iter([100.0, 102.5])
    source = EngineSource(
        name="chat", url=reads.engine.url, session=reads.session, monotonic=lambda: next(clock)
    )
    sample = source.read(1000.0).sample
    assert sample is not None
    assert (sample.at, sample.fact(fact.SCRAPE_DURATION.name)) == (1000.0, 2.5)


def test_a_sample_holds_each_rank_of_several(reads: Reads) -> None:
    reads.read(body("vllm-0.32.0-dp2"))
    (sample,) = reads.samples
    assert sample.ranks.keys() == {"0", "1"}
    for rank in sample.ranks.values():
        assert rank.fact(fact.STEPS.name) is not None
        assert (rank.engine, rank.histograms, rank.ranks) == ("chat", {}, {})


def test_a_failed_read_is_counted_by_its_reason_and_ends_nothing(
    reads: Reads,
) -> None:
    reads.read(b"<html>\n")
    assert reads.reasons == ["html"]
    assert reads.engine.asked == ["/metrics", "/prometheus/metrics"]
    assert reads.read(body("vllm-0.32.0")) == ScrapeResult(sample=reads.samples[0])
    reads.engine.stop()
    assert reads.read().failure == reads.read().failure == "connection"


def test_what_was_dropped_from_a_page_is_counted_beside_its_sample(reads: Reads) -> None:
    reads.read(unnamed_page(1) + b'vllm:num_requests_waiting{engine="0"} NaN\n')
    assert "value_not_finite" in reads.reasons
    assert len(reads.samples) == 1


def test_a_failure_inside_the_agent_is_counted_and_logged_not_raised(
    reads: Reads, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("agent.sources.engines.engine_source.translate", broken)
    reads.read(body("vllm-0.32.0"))
    assert reads.reasons == ["internal"]
    assert caplog.records[-1].exc_info is not None


def test_a_state_that_lasts_is_logged_once(reads: Reads, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for page in (b"<html>\n", b"<html>\n", b"", body("vllm-0.32.0"), body("vllm-0.32.0")):
        reads.read(page)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING", "INFO"]


def test_the_model_is_asked_for_where_the_page_does_not_name_it(reads: Reads) -> None:
    reads.engine.answers("/v1/models", MODELS)
    for _ in range(3):
        reads.read(unnamed_page(1))
    assert [sample.model for sample in reads.samples] == ["served"] * 3
    assert reads.engine.asked.count("/v1/models") == 1


def test_an_engine_with_another_place_for_its_model_is_asked_there(reads: Reads) -> None:
    reads.engine.answers("/info", b'{"model_id": "org/model"}')
    reads.read(body("tgi-3.3.7"))
    assert reads.samples[0].model == "org/model"


def test_a_restarted_engine_is_asked_for_its_model_again(reads: Reads) -> None:
    reads.engine.answers("/v1/models", MODELS)
    reads.read(unnamed_page(10))
    reads.engine.answers("/v1/models", MODELS.replace(b"served", b"another"))
    reads.read(unnamed_page(11))
    reads.read(unnamed_page(1))
    assert [sample.model for sample in reads.samples] == ["served", "served", "another"]


def test_an_engine_that_does_not_name_its_model_is_asked_now_and_then(reads: Reads) -> None:
    for _ in range(25):
        reads.read(unnamed_page(1))
    assert {sample.model for sample in reads.samples} == {None}
    assert reads.engine.asked.count("/v1/models") == 2
    assert reads.reasons == ["model_http_status"] * 2


def test_a_page_at_another_path_is_found_and_then_asked_alone(reads: Reads) -> None:
    reads.engine.answers("/metrics", b'[{"iterLatencyMS": 1}]')
    for _ in range(3):
        reads.read(body("trtllm-1.3.0"), "/prometheus/metrics")
    assert [sample.dialect for sample in reads.samples] == ["trtllm"] * 3
    assert reads.engine.asked == ["/metrics", *["/prometheus/metrics"] * 3]
    assert reads.reasons == []


def test_a_kind_that_is_set_asks_its_own_path_only(reads: Reads) -> None:
    reads.source = reads.source_of("trtllm")
    reads.read(body("trtllm-1.3.0"), "/prometheus/metrics")
    assert reads.engine.asked == ["/prometheus/metrics"]


@pytest.mark.parametrize(
    ("sent", "reasons", "tokens"),
    [
        (b"Content-Length: 47\r\n\r\n%b", [], [1793]),
        (b"Transfer-Encoding: chunked\r\n\r\n2f\r\n%b\r\n0\r\n\r\n", [], [1793]),
        # The number may be longer than this.
        (b"\r\n%b", ["cut_off"], []),
    ],
)
def test_a_page_without_a_last_newline_is_whole_where_its_length_is_known(
    reads: Reads, sent: bytes, reasons: list[str], tokens: list[float]
) -> None:
    page = b'vllm:generation_tokens_total{engine="0"} 1793.0'
    reads.source = reads.source_of("vllm")

    def send(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n" + sent % page)

    reads.engine.scripts["/metrics"] = send
    reads.read()
    assert set(reads.reasons) <= {*reasons, "model_http_status"}
    assert [sample.fact(fact.OUTPUT_TOKENS.name) for sample in reads.samples] == tokens


def test_a_fact_that_is_gone_after_an_upgrade_is_told_once(
    reads: Reads, caplog: pytest.LogCaptureFixture
) -> None:
    old = body("vllm-0.32.0")
    new = old.replace(b"vllm:kv_cache_usage_perc", b"vllm:kv_cache_used_ratio")
    for page in (old, new, new):
        reads.read(page)
    usage = fact.KV_CACHE_USAGE.name
    missing = [sample.fact(fact.FACT_MISSING.name, usage) for sample in reads.samples]
    assert missing == [None, 1, 1]
    assert caplog.messages == [
        f"engine chat gives no {usage} any more: did an upgrade rename its series?"
    ]
    reads.read(old)
    assert reads.samples[-1].fact(fact.FACT_MISSING.name, usage) is None


def test_an_engine_too_slow_on_one_path_is_not_waited_for_on_another(reads: Reads) -> None:
    reads.source = reads.source_of("auto", timeout_s=0.3)
    reads.engine.drips("/metrics", b"")
    reads.read()
    assert reads.reasons == ["timeout"]
    assert reads.engine.asked == ["/metrics"]


@pytest.mark.parametrize("path", ["/behind/gateway", "/behind/gateway/"])
def test_a_path_in_the_url_comes_before_the_engines_own(reads: Reads, path: str) -> None:
    reads.source = reads.source_of("vllm", path=path)
    reads.read(body("vllm-0.32.0"), "/behind/gateway/metrics")
    assert len(reads.samples) == 1


OTHER_SHAPES = ["{}", "[]", "null", '{"data": 3}', '{"data": {"id": "a"}}']
BASE = {"id": "chat", "root": "/models/llama", "parent": None}


def listed(*entries: object) -> bytes:
    return json.dumps({"object": "list", "data": entries}).encode()


@pytest.mark.parametrize(
    ("answer", "model"),
    [
        pytest.param(listed(BASE), "chat", id="only"),
        pytest.param(listed({**BASE, "id": "sql", "parent": "chat"}, BASE), "chat", id="adapter"),
        pytest.param(listed(BASE, {**BASE, "id": "llama"}), "chat", id="aliases of one root"),
        pytest.param(listed({"id": "a"}, {"id": "b"}), None, id="two models"),
        pytest.param(listed({"id": "a", "root": "x"}, {"id": "b", "root": "y"}), None, id="roots"),
        *((listed(*wrong), None) for wrong in ((), ("a", None, 3), ({"root": "x"},))),
        *((listed({"id": name}), None) for name in (7, "")),
        *((shape.encode(), None) for shape in OTHER_SHAPES),
    ],
)
def test_the_model_is_the_only_one_that_is_listed(answer: bytes, model: str | None) -> None:
    assert read_model("/v1/models", answer) == model


@pytest.mark.parametrize("answer", [b"", b"<html>", b"\xff", b"[" * 100_000])
def test_what_is_no_json_is_refused(answer: bytes) -> None:
    with pytest.raises(ExpositionUnreadable) as caught:
        read_model("/v1/models", answer)
    assert caught.value.reason == "json_malformed"


def test_odd_names_become_labels_that_a_page_and_a_database_can_hold() -> None:
    body = b'{"data": [{"id": "half-\\ud800"}, {"id": "%s"}]}' % (b"m" * 1_000_000)
    names = sorted(read_served(body), key=len)
    assert names[0] == "half-?"
    assert len(names[1]) == 256


def served(engine: EngineServer) -> frozenset[str] | None:
    with open_session() as session:
        return ServedModels("chat-0", engine.url + "/", session, timeout_s=20.0).read()


def test_models_and_their_adapters_are_served_by_their_names(engine: EngineServer) -> None:
    entries = [{"id": "chat"}, {"id": "sql", "parent": "chat"}, {"id": 7}, None]
    engine.answers("/v1/models", json.dumps({"data": entries}).encode())
    assert served(engine) == frozenset({"chat", "sql"})


@pytest.mark.parametrize("answer", [None, b"<html>", b"\xff"])
def test_without_a_readable_list_the_served_models_are_unknown(
    engine: EngineServer, answer: bytes | None
) -> None:
    if answer is not None:
        engine.answers("/v1/models", answer)
    assert served(engine) is None


# Which engine a sender is


@pytest.fixture
def directory() -> EngineDirectory:
    directory = EngineDirectory(
        [
            ("chat-0", "http://10.0.0.1:8000"),
            ("code-0", "https://Code.example/base"),
            ("six-0", "http://[::1]:8001"),
        ]
    )
    directory.learn_model("chat-0", "org/chat")
    return directory


CHAT, CODE = ("chat-0", "org/chat"), ("code-0", None)


@pytest.mark.parametrize(
    ("attributes", "identity"),
    [
        ({"service.name": "chat-0"}, CHAT),
        ({"service.name": "vllm", "service.instance.id": "chat-0"}, CHAT),
        ({"service.name": "vllm", "service.instance.id": "10.0.0.1:8000"}, CHAT),
        ({"service.instance.id": "10.0.0.1:8000"}, CHAT),
        # The port of its scheme.
        ({"service.instance.id": "CODE.example:443"}, CODE),
        ({"service.instance.id": "[::1]:8001"}, ("six-0", None)),
        # The name of the service outranks its instance.
        ({"service.name": "code-0", "service.instance.id": "10.0.0.1:8000"}, CODE),
        # Of several engines an unknown sender is none.
        ({"service.name": "unknown_service"}, (None, None)),
        ({}, (None, None)),
        # The model that the sender names stands.
        ({"service.name": "chat-0", "gen_ai.request.model": "lora"}, ("chat-0", "lora")),
        ({"service.name": "chat-0", "model_name": "lora"}, ("chat-0", "lora")),
        ({"model_name": "lora"}, (None, "lora")),
        # What is no text is passed over.
        *(
            ({"service.name": "chat-0", "gen_ai.request.model": value}, CHAT)
            for value in ("", 7, None, ["a"])
        ),
        *(({"service.name": value}, (None, None)) for value in ("", 7, None, ["a"])),
    ],
)
def test_a_sender_is_known_by_name_or_address(
    directory: EngineDirectory,
    attributes: dict[str, object],
    identity: tuple[str | None, str | None],
) -> None:
    engine, model = identity
    assert directory.identify(attributes) == EngineIdentity(engine=engine, model=model)


def test_what_an_engine_serves_can_change_and_is_kept_while_it_does_not_answer(
    directory: EngineDirectory,
) -> None:
    assert directory.served_by("code-0") is None
    directory.learn_served("code-0", frozenset({"code", "sql"}))
    directory.learn_served("code-0", None)
    assert directory.served_by("code-0") == frozenset({"code", "sql"})
    directory.learn_served("code-0", frozenset({"code"}))
    assert directory.served_by("code-0") == frozenset({"code"})
    assert [directory.is_served(name) for name in ("code", "sql")] == [True, False]
    # The model of the exposition is served beside the listed ones.
    assert directory.served_by("chat-0") == frozenset({"org/chat"})
    directory.learn_served("chat-0", frozenset({"chat"}))
    assert directory.served_by("chat-0") == frozenset({"chat", "org/chat"})
    for model in ("org/chat-2", None):
        directory.learn_model("chat-0", model)
        assert directory.identify({"service.name": "chat-0"}).model == model


def test_an_address_shared_by_two_engines_tells_neither() -> None:
    shared = EngineDirectory([("a", "http://gate:80/a"), ("b", "http://gate:80/b")])
    assert shared.identify({"service.instance.id": "gate:80"}).engine is None
    assert shared.identify({"service.instance.id": "b"}).engine == "b"


def test_an_unknown_sender_is_the_only_engine_unless_more_may_come() -> None:
    engines = [("chat-0", "http://10.0.0.1:8000")]
    unknown = {"service.name": "chat-1"}
    assert EngineDirectory(engines).identify(unknown).engine == "chat-0"
    assert EngineDirectory(engines, complete=False).identify(unknown).engine is None
    assert EngineDirectory([]).identify(unknown).engine is None
