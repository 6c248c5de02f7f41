import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from agent.catalog import engine_facts as fact
from agent.catalog.reasons import READINGS_FAILED
from agent.records.engine import EngineSample
from agent.sources.engines.directory import EngineDirectory
from agent.sources.engines.fetch import open_session
from agent.sources.engines.watch import EngineSinks, EngineWatch, PageLook
from tests.sources.engines.fixture_pages import body
from tests.sources.engines.wire import EngineServer

MODELS = b'{"object":"list","data":[{"id":"served","root":"/models/x","parent":null}]}'


@dataclass
class Watched:
    """A watch over the fake engine and all that it told its sinks."""

    engine: EngineServer
    samples: list[EngineSample] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.directory = EngineDirectory([("chat", self.engine.url)])
        self.session = open_session()
        self.watch = self.watching("auto")

    def watching(self, kind: str, *, path: str = "", timeout_s: float = 20.0) -> EngineWatch:
        return EngineWatch(
            name="chat",
            url=self.engine.url + path,
            kind=kind,
            timeout_s=timeout_s,
            session=self.session,
            directory=self.directory,
            sinks=EngineSinks(on_sample=self.samples.append, on_failure=self.failed),
        )

    def failed(self, engine: str, reason: str) -> None:
        assert reason in READINGS_FAILED
        self.failures.append((engine, reason))

    def poll(self, page: bytes | None = None, path: str = "/metrics") -> PageLook:
        if page is not None:
            self.engine.answers(path, page)
        self.now += 5
        return self.watch.poll(self.now)

    @property
    def reasons(self) -> list[str]:
        return [reason for _, reason in self.failures]


@pytest.fixture
def watched(engine: EngineServer) -> Iterator[Watched]:
    watched = Watched(engine)
    with watched.session:
        yield watched


def unnamed_page(output_tokens: int) -> bytes:
    """A page whose series do not name the model."""
    return (
        f'vllm:num_requests_running{{engine="0"}} 1\n'
        f'vllm:generation_tokens_total{{engine="0"}} {output_tokens}\n'
    ).encode()


def test_a_poll_gives_a_sample(watched: Watched) -> None:
    watched.poll(body("vllm-0.32.0"))
    (sample,) = watched.samples
    assert (sample.engine, sample.at, sample.dialect) == ("chat", 1005.0, "vllm")
    assert sample.model == "tiny-llama"
    assert sample.process_started_at == 1795231551.33
    assert sample.fact(fact.OUTPUT_TOKENS.name) == 1793
    assert sample.fact(fact.REQUESTS_FINISHED.name, "length") == 11
    assert fact.TIME_TO_FIRST_TOKEN.name in sample.histograms
    assert watched.failures == []


def test_a_sample_holds_each_rank_of_several(watched: Watched) -> None:
    watched.poll(body("vllm-0.32.0-dp2"))
    (sample,) = watched.samples
    assert sample.ranks.keys() == {"0", "1"}
    for rank in sample.ranks.values():
        assert rank.fact(fact.STEPS.name) is not None
        assert (rank.engine, rank.histograms, rank.ranks) == ("chat", {}, {})


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        (b"<html></html>\n", "html"),
        (b"", "empty"),
        (b"vllm:num_requests_run", "cut_off"),
        (b"python_info 1\n", "no_known_series"),
        (body("router-production-stack"), "no_known_series"),
        (b"\xff\n", "not_text"),
    ],
)
def test_a_broken_page_is_counted_by_reason_and_ends_nothing(
    watched: Watched, page: bytes, reason: str
) -> None:
    watched.poll(body("vllm-0.32.0"))
    watched.poll(page)
    watched.poll(body("vllm-0.32.0"))
    assert watched.reasons == [reason]
    assert len(watched.samples) == 2


def test_a_poll_answers_with_its_sample_or_with_why_there_is_none(watched: Watched) -> None:
    assert watched.poll(body("vllm-0.32.0")) == PageLook(sample=watched.samples[0])
    watched.engine.stop()
    assert watched.poll() == watched.poll() == PageLook(failure="connection")
    assert watched.failures == [("chat", "connection")] * 2


def test_what_was_dropped_from_a_page_is_counted_beside_its_sample(watched: Watched) -> None:
    watched.poll(unnamed_page(1) + b'vllm:num_requests_waiting{engine="0"} NaN\n')
    assert "value_not_finite" in watched.reasons
    assert len(watched.samples) == 1


def test_a_failure_inside_the_agent_is_counted_and_logged_not_raised(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("agent.sources.engines.watch.translate", broken)
    watched.poll(body("vllm-0.32.0"))
    assert watched.reasons == ["internal"]
    assert caplog.records[-1].exc_info is not None


def test_a_state_that_lasts_is_logged_once(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for page in (b"<html>\n", b"<html>\n", b"", body("vllm-0.32.0"), body("vllm-0.32.0")):
        watched.poll(page)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING", "INFO"]


def test_the_model_is_asked_for_where_the_page_does_not_name_it(watched: Watched) -> None:
    watched.engine.answers("/v1/models", MODELS)
    for _ in range(3):
        watched.poll(unnamed_page(1))
    assert [sample.model for sample in watched.samples] == ["served"] * 3
    assert watched.engine.asked.count("/v1/models") == 1
    assert watched.directory.model_of("chat") == "served"


def test_an_engine_with_another_place_for_its_model_is_asked_there(watched: Watched) -> None:
    watched.engine.answers("/info", b'{"model_id": "org/model"}')
    watched.poll(body("tgi-3.3.7"))
    assert watched.samples[0].model == "org/model"


def test_the_page_itself_names_the_model_without_another_request(watched: Watched) -> None:
    watched.poll(body("vllm-0.32.0"))
    assert watched.engine.asked == ["/metrics"]
    assert watched.directory.model_of("chat") == "tiny-llama"


def test_a_restarted_engine_is_asked_for_its_model_again(watched: Watched) -> None:
    watched.engine.answers("/v1/models", MODELS)
    watched.poll(unnamed_page(10))
    watched.engine.answers("/v1/models", MODELS.replace(b"served", b"another"))
    watched.poll(unnamed_page(11))
    watched.poll(unnamed_page(1))
    assert [sample.model for sample in watched.samples] == ["served", "served", "another"]


def test_an_engine_that_does_not_name_its_model_is_asked_now_and_then(watched: Watched) -> None:
    for _ in range(25):
        watched.poll(unnamed_page(1))
    assert {sample.model for sample in watched.samples} == {None}
    assert watched.engine.asked.count("/v1/models") == 2
    assert watched.reasons == ["model_http_status"] * 2


def test_a_page_at_another_path_is_found_and_then_asked_alone(watched: Watched) -> None:
    watched.engine.answers("/metrics", b'[{"iterLatencyMS": 1}]')
    for _ in range(3):
        watched.poll(body("trtllm-1.1.0"), "/prometheus/metrics")
    assert [sample.dialect for sample in watched.samples] == ["trtllm"] * 3
    assert watched.engine.asked == ["/metrics", *["/prometheus/metrics"] * 3]
    assert watched.failures == []


def test_a_kind_that_is_set_asks_its_own_path_only(watched: Watched) -> None:
    watched.watch = watched.watching("trtllm")
    watched.poll(body("trtllm-1.1.0"), "/prometheus/metrics")
    assert watched.engine.asked == ["/prometheus/metrics"]


def test_where_no_path_has_a_page_the_first_failure_is_counted(watched: Watched) -> None:
    watched.poll(b"<html>\n")
    assert watched.reasons == ["html"]
    assert watched.engine.asked == ["/metrics", "/prometheus/metrics"]


def test_an_engine_too_slow_on_one_path_is_not_waited_for_on_another(watched: Watched) -> None:
    watched.watch = watched.watching("auto", timeout_s=0.3)
    watched.engine.drips("/metrics", b"")
    watched.poll()
    assert watched.reasons == ["timeout"]
    assert watched.engine.asked == ["/metrics"]


@pytest.mark.parametrize("path", ["/behind/gateway", "/behind/gateway/"])
def test_a_path_in_the_url_comes_before_the_engines_own(watched: Watched, path: str) -> None:
    watched.watch = watched.watching("vllm", path=path)
    watched.poll(body("vllm-0.32.0"), "/behind/gateway/metrics")
    assert len(watched.samples) == 1
