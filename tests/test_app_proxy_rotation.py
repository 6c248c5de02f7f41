"""What the agent and the workers of its proxy tell each other of engines that fail."""

from agent.app.proxy_rotation import EngineNews, ProxyRotation, WorkerRotation
from agent.catalog import metrics as m
from agent.catalog.engine_facts import OUTPUT_TOKENS, STEPS
from agent.catalog.reasons import EjectionReason
from agent.outputs.prometheus.meter import Meter
from agent.records.engine import EngineSample
from agent.records.event import Confidence, Event, EventKind
from agent.records.gpu import Facts
from agent.sources.engines.engine_source import ScrapeResult
from agent.sources.proxy.handover.messages import EjectedEngine, EngineState, Rotation
from agent.sources.proxy.load_balancer import EngineLookup, LoadBalancer, ProxiedEngine
from agent.sources.proxy.outlier_detection import OutlierDetection, OutlierLimits

AT = 1_000_000.0
UP = EngineState(healthy=True, models=None)


def event(kind: EventKind, confidence: Confidence = Confidence.CERTAIN) -> Event:
    return Event(at=AT, engine="a", kind=kind, confidence=confidence)


def sample(**facts: float) -> ScrapeResult:
    names = {"steps": STEPS.name, "output": OUTPUT_TOKENS.name}
    values: Facts = {(names[name], ()): value for name, value in facts.items()}
    return ScrapeResult(
        sample=EngineSample(engine="a", at=AT, dialect="vllm", model="m", facts=values)
    )


# What polls found


class News:
    """The news on a clock that the test moves."""

    def __init__(self) -> None:
        self.now = AT
        self.news = EngineNews(lambda: self.now)

    def state(self) -> EngineState:
        return self.news.state("a", up=True, models=None)

    def happens(self, happened: Event) -> None:
        self.news.also_to(lambda _: None)(happened)


def test_a_health_check_with_a_server_error_is_unhealthy_until_it_is_good_again() -> None:
    news, statuses = News(), iter((200, 503, None, 404))
    read = news.news.reading_health("a", lambda: next(statuses))
    assert [(read(), news.state().healthy) for _ in range(4)] == [
        (200, True),
        (503, False),
        (None, True),
        (404, True),
    ]


def test_a_death_is_news_for_half_a_minute_and_a_suspicion_is_none() -> None:
    news = News()
    news.happens(event(EventKind.HANG, Confidence.SUSPECTED))
    news.happens(event(EventKind.KV_PRESSURE))
    assert news.state().event is None
    news.happens(event(EventKind.ENGINE_DEAD))
    assert news.state().event == ("ENGINE_DEAD", AT)
    news.now += 31
    assert news.state().event is None


def test_steps_or_without_them_output_tokens_show_that_an_engine_computes() -> None:
    for fact in ("steps", "output"):
        news = News()
        news.news.scraped("a", sample(**{fact: 5.0}))
        news.news.scraped("a", sample(**{fact: 5.0}))
        assert news.state().computed_at is None
        news.news.scraped("a", sample(**{fact: 6.0}))
        assert news.state().computed_at == AT


# A worker


class Worker:
    """The worker's side for engines a and b."""

    def __init__(self) -> None:
        self.now_s = 500.0
        self.outliers = OutlierDetection(["a", "b"], OutlierLimits())
        self.rotation = WorkerRotation(self.outliers, lambda: AT, lambda: self.now_s)
        engines = [ProxiedEngine(name, f"http://{name}") for name in "ab"]
        lookup = EngineLookup(self.rotation.models, self.rotation.healthy)
        self.balancer = LoadBalancer(engines, lookup, None, self.outliers, lambda: self.now_s)

    def learn(self, state: EngineState) -> None:
        self.rotation.learn({"a": state, "b": UP})

    @property
    def is_out(self) -> bool:
        return "a" in self.outliers.ejections


def test_an_event_ejects_an_engine_once() -> None:
    worker, dead = Worker(), after("ENGINE_DEAD")
    worker.learn(dead)
    assert worker.outliers.ejections["a"].detail == "ENGINE_DEAD"
    worker.now_s += 10
    worker.outliers.succeeded("a", worker.now_s, worker.now_s)
    worker.learn(dead)
    assert not worker.is_out


def after(kind: str) -> EngineState:
    return EngineState(healthy=True, models=None, event=(kind, AT))


def test_an_engine_that_answered_a_moment_ago_does_not_hang() -> None:
    worker = Worker()
    worker.outliers.succeeded("a", worker.now_s, worker.now_s)
    worker.learn(after("HANG"))
    assert not worker.is_out
    worker.now_s += 60
    worker.learn(EngineState(healthy=True, models=None, event=("HANG", AT + 60)))
    assert worker.is_out


def test_a_restart_or_good_health_lets_a_probe_in_at_once() -> None:
    for again in (after("RESTART"), UP):
        worker = Worker()
        worker.outliers.eject("a", EjectionReason.EVENT, worker.now_s, "ENGINE_DEAD")
        worker.learn(EngineState(healthy=False, models=None))
        assert not worker.rotation.healthy("a")
        worker.learn(again)
        assert worker.outliers.is_due("a", worker.now_s)


def test_an_engine_that_computes_is_not_silent() -> None:
    worker = Worker()
    for _ in range(3):
        worker.outliers.sent("a", worker.now_s)
        worker.outliers.succeeded("b", worker.now_s, worker.now_s)
    worker.now_s += 5
    assert not worker.outliers.is_in("a", worker.now_s)
    worker.learn(EngineState(healthy=True, models=None, computed_at=AT))
    assert worker.outliers.is_in("a", worker.now_s)


def test_a_report_has_the_engines_that_are_out_and_each_count_once() -> None:
    worker = Worker()
    for _ in range(3):
        worker.outliers.failed("a", EjectionReason.ERROR, worker.now_s, detail="500")
    worker.balancer.retried["a"] += 2
    worker.balancer.forced = 1
    for path in ("/v1/embeddings", "/v1/embeddings", "/invented"):
        worker.balancer.count_response("a", path, 200)
    worker.now_s += 4
    out = {"a": EjectedEngine("error", "500", AT - 4, 10.0, over=False)}
    responses = [("a", "/v1/embeddings", 2, 2), ("a", "other", 2, 1)]
    first = Rotation(out, {"a": {"error": 1}}, {"a": 2}, 1, responses)
    assert worker.rotation.report(worker.balancer) == first
    assert worker.rotation.report(worker.balancer) == Rotation(out)


# The agent

OUT = EjectedEngine("error", "500", AT - 4, 10.0, over=False)


class Agent:
    """The agent's side, with the rotations of two workers."""

    def __init__(self) -> None:
        self.rotations = [Rotation(), Rotation()]
        self.unhealthy: set[str] = set()
        self.events: list[Event] = []
        self.meter = Meter((), ["a", "b"])
        self.side = ProxyRotation(
            ["a", "b"],
            self.meter,
            rotations=lambda: self.rotations,
            healthy=lambda engine: engine not in self.unhealthy,
            on_event=self.events.append,
        )

    def seen(self) -> list[tuple[str, str | None, object]]:
        return [(e.kind, e.engine, e.evidence.get("reason")) for e in self.events]

    def share(self, engine: str) -> float:
        return self.meter.snapshot().gauges[m.PROXY_IN_ROTATION][engine,]


def test_an_ejection_by_any_worker_is_one_event_and_its_end_another() -> None:
    agent = Agent()
    agent.side.watch(AT)
    agent.rotations[1] = Rotation({"a": OUT})
    agent.side.watch(AT)
    agent.rotations[0] = Rotation({"a": OUT})
    agent.side.watch(AT + 1)
    assert agent.side.why_out("a") == "error 500"
    agent.rotations = [Rotation(), Rotation()]
    agent.side.watch(AT + 6)
    assert agent.seen() == [("ENGINE_EJECTED", "a", "error"), ("ENGINE_RETURNED", "a", "error")]
    assert agent.events[0].at == AT - 4
    assert agent.events[1].evidence["out_s"] == 10.0
    assert agent.side.why_out("a") is None


def test_the_share_of_workers_that_send_an_engine_requests() -> None:
    agent = Agent()
    agent.rotations[1] = Rotation({"a": OUT})
    assert (agent.share("a"), agent.share("b")) == (0.5, 1.0)
    agent.unhealthy.add("b")
    assert agent.share("b") == 0.0


def test_an_engine_that_starts_with_the_agent_is_shown_as_unhealthy_and_is_no_event() -> None:
    agent = Agent()
    agent.unhealthy.add("a")
    agent.side.watch(AT)
    assert agent.side.why_out("a") == "unhealthy"
    agent.unhealthy.clear()
    agent.side.watch(AT)
    assert agent.events == []
    agent.unhealthy.add("a")
    agent.side.watch(AT)
    assert agent.seen() == [("ENGINE_EJECTED", "a", "unhealthy")]


def test_what_workers_count_is_published() -> None:
    agent = Agent()
    agent.side.count(Rotation({}, {"a": {"error": 2}}, {"a": 3}, 4))
    counters = agent.meter.snapshot().counters
    assert counters[m.PROXY_EJECTIONS]["a", "error"] == 2
    assert counters[m.PROXY_EJECTIONS]["b", "silent"] == 0
    assert counters[m.PROXY_RETRIED]["a",] == 3
    assert counters[m.PROXY_FORCED][()] == 4
