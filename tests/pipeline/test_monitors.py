"""A poll reads every source in an order that misses no death; events come before samples."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import count

import pytest
from sqlalchemy import Engine

from agent.analysis.failures import DetectionLimits
from agent.catalog import engine_facts as fact
from agent.catalog import gpu_facts
from agent.catalog import metrics as m
from agent.catalog.engine_facts import MAX_RUNNING_REQUESTS
from agent.outputs.prometheus.meter import Meter
from agent.pipeline import monitors
from agent.pipeline.engine_starts import StartWatch
from agent.pipeline.monitors import (
    EngineLimits,
    EngineMonitor,
    EnginePipeline,
    ScrapePublisher,
    UnclaimedGpuMonitor,
)
from agent.records.engine import EngineProcess, EngineSample, HostSample, ProcessRole
from agent.records.event import Event, EventKind
from agent.records.gpu import GpuSample, XidError
from agent.sources.engines.directory import EngineDirectory
from agent.sources.engines.engine_source import ScrapeResult
from agent.store.observations import ObservationStore
from agent.store.tables import engine_samples, events
from tests.analysis.failures.polled_engine import ALL, CORE, FRONT, GPU, cgroup
from tests.pipeline.kit import Inventory, stored, without
from tests.records.making import NOON
from tests.store.making import engine_sample, restart

IDLE = {fact.REQUESTS_RUNNING: 0.0, fact.STEPS: 5.0, fact.AWAKE: 1.0}


def scrape(*, started: float | None = None, **changed: float) -> ScrapeResult:
    facts: dict[tuple[str, tuple[str, ...]], float] = {
        (metric.name, ()): value for metric, value in IDLE.items()
    }
    for name, value in changed.items():
        facts[getattr(fact, name).name, ()] = value
    return ScrapeResult(
        sample=EngineSample(
            engine="chat",
            at=1.0,
            dialect="vllm",
            model="m",
            facts=facts,
            process_started_at=started,
        )
    )


USED = (gpu_facts.MEMORY_USED.name, ())


@dataclass
class PolledChat:
    """An engine with the exposition, health and host of a test, and its monitor."""

    scrape: ScrapeResult = field(default_factory=lambda: scrape())
    status: int | None = 200
    host_sample: HostSample = field(default_factory=lambda: HostSample(at=0.0, processes=ALL))
    calls: list[str] = field(default_factory=list)
    scrapes: list[ScrapeResult] = field(default_factory=list)
    host_samples: list[tuple[str, HostSample]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    gpus: Inventory = field(default_factory=lambda: Inventory({"chat": (GPU,)}))
    limits: DetectionLimits = field(default_factory=lambda: DetectionLimits(hang_s=10.0))
    before: EngineSample | None = None
    now: float = 1000.0
    clock_s: float = 70.0

    def __post_init__(self) -> None:
        self.monitor = EngineMonitor(
            "chat",
            read_engine=self.read_engine,
            read_health=self.health,
            read_host=self.read_host,
            close_host=self.close,
            gpus=self.gpus,
            limits=self.limits,
            on_scrape=self.scrapes.append,
            on_host=lambda engine, sample: self.host_samples.append((engine, sample)),
            on_event=self.on_event,
            store=lambda: self.calls.append("store"),
            monotonic=lambda: self.clock_s,
            starts=StartWatch("chat"),
            before=self.before,
        )

    def on_event(self, event: Event) -> None:
        self.calls.append(event.kind)
        self.events.append(event)

    def read_engine(self, now: float) -> ScrapeResult:
        self.calls.append("scrape")
        return self.scrape

    def health(self) -> int | None:
        self.calls.append("health")
        return self.status

    def read_host(self, now: float) -> HostSample:
        self.calls.append("host")
        return self.host_sample

    def close(self) -> None:
        self.calls.append("closed")

    def polls(self, count: int) -> list[EventKind]:
        for _ in range(count):
            self.now += 5.0
            self.clock_s += 5.0
            self.monitor.poll(self.now)
        return [event.kind for event in self.events]


def gpu(used_bytes: float) -> GpuSample:
    return GpuSample(gpu=GPU, index=0, name="NVIDIA H200", at=1.0, facts={USED: used_bytes})


def test_the_host_is_read_last() -> None:
    engine = PolledChat()
    engine.polls(1)
    engine.monitor.close()
    assert engine.calls == ["scrape", "health", "host", "store", "closed"]
    assert engine.scrapes == [engine.scrape]
    assert engine.host_samples == [("chat", engine.host_sample)]


def test_events_are_reported_before_anything_is_stored() -> None:
    """The database can be slow."""
    engine = PolledChat()
    engine.polls(1)
    engine.scrape = ScrapeResult(failure="connection")
    engine.calls.clear()
    engine.polls(1)
    assert engine.calls == ["scrape", "host", EventKind.UNREACHABLE, "store"]


def test_samples_are_stored_when_the_poll_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PolledChat, "health", lambda _chat: 1 // 0)
    engine = PolledChat()
    with pytest.raises(ZeroDivisionError):
        engine.polls(1)
    assert engine.calls == ["scrape", "store"]


def test_setting_the_wall_clock_does_not_lengthen_an_outage() -> None:
    engine = PolledChat(scrape=scrape(started=500.0))
    engine.polls(1)
    engine.scrape = ScrapeResult(failure="connection")
    engine.polls(2)
    engine.now += 3600.0
    engine.scrape = scrape(started=1010.0)
    assert engine.polls(1) == [EventKind.UNREACHABLE, EventKind.RESTART]
    assert engine.events[1].evidence["gone_s"] == 10.0
    assert engine.events[1].at == 4620.0


def test_a_restart_while_the_agent_was_stopped_has_the_last_sample_before() -> None:
    engine = PolledChat(
        before=scrape(started=500.0, REQUESTS_RUNNING=3.0).sample, scrape=scrape(started=900.0)
    )
    assert engine.polls(3) == [EventKind.RESTART]
    assert engine.events[0].evidence["requests_running"] == 3.0
    # The time of its end is unknown.
    assert engine.events[0].evidence["gone_s"] is None


@pytest.mark.parametrize("failure", ["connection", "http_status"])
def test_an_engine_that_loads_for_long_after_the_start_of_the_agent_has_only_restarted(
    failure: str,
) -> None:
    """For example after a reboot: an engine that is not up yet has not failed."""
    engine = PolledChat(
        before=scrape(started=500.0).sample, scrape=ScrapeResult(failure=failure), status=None
    )
    assert engine.polls(300) == []
    engine.scrape = scrape(started=1011.0)
    assert engine.polls(1) == [EventKind.RESTART]


def test_pressure_from_before_the_start_of_the_agent_is_not_reported() -> None:
    engine = PolledChat(before=scrape(started=500.0, PREEMPTIONS=1.0).sample)
    engine.scrape = scrape(started=500.0, PREEMPTIONS=90.0)
    assert engine.polls(2) == []
    engine.scrape = scrape(started=500.0, PREEMPTIONS=91.0)
    assert engine.polls(1) == [EventKind.KV_PRESSURE]


@pytest.mark.parametrize(
    ("failure", "health"), [("connection", []), ("timeout", []), ("http_status", ["health"])]
)
def test_the_health_is_read_only_of_an_engine_that_responds(
    failure: str, health: list[str]
) -> None:
    engine = PolledChat(scrape=ScrapeResult(failure=failure))
    engine.polls(1)
    assert engine.calls == ["scrape", *health, "host", "store"]


def test_why_a_part_of_the_machine_cannot_be_read_is_logged_once_per_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = PolledChat()
    with caplog.at_level(logging.INFO, "agent.pipeline.monitors"):
        for why in ("no such file", "no such file", "permission denied", None, "no such file"):
            unread = {} if why is None else {"log": why}
            engine.host_sample = replace(engine.host_sample, unread=unread)
            engine.polls(1)
    assert caplog.messages == [
        f"engine chat: log cannot be read: {why}"
        for why in ("no such file", "permission denied", "no such file")
    ]


def test_a_kill_by_the_kernel_has_the_gpu_memory_before_it() -> None:
    engine = PolledChat(host_sample=HostSample(at=0.0, processes=ALL, cgroup=cgroup(0)))
    engine.gpus.read(gpu(70.0))
    engine.polls(2)
    engine.gpus.read(gpu(0.0))
    engine.scrape = ScrapeResult(failure="connection")
    engine.host_sample = HostSample(at=0.0, processes=(), cgroup=cgroup(1))
    assert engine.polls(2)[0] is EventKind.HOST_OOM
    assert engine.events[0].evidence["gpu_0_memory_used_bytes"] == 70.0
    assert (engine.events[0].engine, engine.events[0].at) == ("chat", 1015.0)


def test_a_health_of_503_is_a_lost_core() -> None:
    engine = PolledChat()
    engine.polls(1)
    engine.status = 503
    engine.host_sample = HostSample(at=0.0, processes=(FRONT,))
    assert engine.polls(2) == [EventKind.ENGINE_DEAD]


def test_processes_link_an_engine_to_its_gpus() -> None:
    engine = PolledChat(gpus=Inventory({"chat": ()}))
    engine.gpus.read(
        GpuSample(gpu=GPU, index=0, name="H", at=1.0, facts={}, processes={CORE.pid: 1})
    )
    engine.polls(1)
    engine.gpus.xid(XidError(gpu=GPU, xid=79, at=1.0, count=1))
    assert engine.polls(1) == [EventKind.GPU_FAULT]


def test_the_action_that_the_driver_of_an_engines_gpu_recommends_is_reported() -> None:
    engine = PolledChat()
    sample = gpu(70.0)
    wanted = {**sample.facts, ("gpu_recovery_action", ()): 1.0}
    engine.gpus.read(replace(sample, facts=wanted))
    assert engine.polls(3) == [EventKind.GPU_FAULT]
    assert engine.events[0].evidence["recovery_action"] == "reset"


def test_the_configured_limits_are_used() -> None:
    def events_of_a_hang(hang_s: float) -> list[EventKind]:
        limits = DetectionLimits(hang_s=hang_s)
        engine = PolledChat(scrape=scrape(REQUESTS_RUNNING=1.0), limits=limits)
        return engine.polls(6)

    assert events_of_a_hang(10.0) == [EventKind.HANG]
    assert events_of_a_hang(100.0) == []


def test_a_fault_and_a_loss_of_a_gpu_without_an_engine_are_each_reported_once() -> None:
    gpus, events, clock_s = Inventory({"chat": ()}), list[Event](), count()
    monitor = UnclaimedGpuMonitor(
        gpus, on_event=events.append, store=lambda: None, monotonic=lambda: float(next(clock_s))
    )
    gpus.read(gpu(70.0))
    gpus.xid(XidError(gpu=GPU, xid=79, at=1.0, count=1))
    for at in (1000.0, 1005.0):
        monitor.poll(at)
    for at in (1010.0, 1015.0, 1020.0):
        gpus.read(replace(gpu(70.0), facts={}, problem="gpu_lost"))
        monitor.poll(at)
    fault, loss = events
    assert (fault.kind, fault.engine, fault.gpu) == (EventKind.GPU_FAULT, None, GPU)
    assert (loss.gpu, loss.evidence["problem"]) == (GPU, "gpu_lost")


AT = 1_790_000_000.0
WITHIN_S = 10.0


def event(number: int) -> Event:
    return restart(AT + number, evidence={"number": number})


@pytest.fixture
def meter() -> Meter:
    return Meter((), ["chat-0"])


class StoringAtOnce(EnginePipeline):
    def sample(self, sample: EngineSample) -> None:
        super().sample(sample)
        self.store()

    def event(self, event: Event) -> None:
        super().event(event)
        self.store()


@pytest.fixture
def engine(database: Engine, meter: Meter) -> EnginePipeline:
    return StoringAtOnce(ObservationStore(database, "tester"), meter)


def failures(meter: Meter) -> dict[str, float]:
    return {table: n for (table,), n in meter.snapshot().counters[m.STORE_FAILURES].items() if n}


def event_times(database: Engine) -> list[float]:
    return [at - AT for at in stored(database, events.c.at)]


def test_samples_and_events_are_published_before_they_are_stored(
    database: Engine, meter: Meter
) -> None:
    pipeline = EnginePipeline(ObservationStore(database, "tester"), meter)
    pipeline.sample(engine_sample(AT))
    pipeline.event(event(1))
    assert meter.snapshot().samples["chat-0"] == engine_sample(AT)
    assert meter.snapshot().counters[m.ENGINE_EVENTS]["chat-0", EventKind.RESTART] == 1
    assert (stored(database, engine_samples.c.at), event_times(database)) == ([], [])
    pipeline.store()
    pipeline.store()
    assert (stored(database, engine_samples.c.at), event_times(database)) == ([AT], [1])


def test_a_scrape_is_published_with_its_faults_its_model_and_the_known_limits(
    engine: EnginePipeline, database: Engine, meter: Meter
) -> None:
    directory = EngineDirectory([("chat-0", "http://chat")])
    publisher = ScrapePublisher(
        "chat-0", engine, meter, directory, EngineLimits({MAX_RUNNING_REQUESTS.name: 8})
    )
    publisher.publish(ScrapeResult(engine_sample(AT), faults=("value_not_finite",)))
    shown = meter.snapshot()
    assert shown.counters[m.SCRAPES]["chat-0", "ok"] == 1
    assert shown.counters[m.SCRAPES]["chat-0", "value_not_finite"] == 1
    assert shown.samples["chat-0"] is not None
    assert shown.samples["chat-0"].facts == {(MAX_RUNNING_REQUESTS.name, ()): 8.0}
    assert directory.model_of("chat-0") == "llama"
    publisher.publish(ScrapeResult(failure="timeout"))
    assert meter.snapshot().samples["chat-0"] is None
    assert meter.snapshot().counters[m.SCRAPES]["chat-0", "timeout"] == 1
    assert directory.model_of("chat-0") == "llama"
    assert stored(database, engine_samples.c.at) == [AT]


def test_a_sample_that_cannot_be_stored_is_published_counted_and_dropped(
    engine: EnginePipeline, database: Engine, meter: Meter
) -> None:
    with without(database, "engine_samples"):
        engine.sample(engine_sample(AT))
    assert meter.snapshot().samples["chat-0"] == engine_sample(AT)
    assert failures(meter) == {"engine_samples": 1}
    engine.sample(engine_sample(AT + 5))
    assert stored(database, engine_samples.c.at) == [AT + 5]


@pytest.mark.parametrize("next_is_event", [True, False], ids=["event", "sample"])
def test_events_wait_for_the_database_and_are_stored_once_in_order(
    engine: EnginePipeline, database: Engine, meter: Meter, next_is_event: bool
) -> None:
    engine.event(event(1))
    with without(database, "events"):
        for number in (2, 3, 4):
            engine.event(event(number))
        engine.sample(engine_sample(AT))
        assert stored(database, engine_samples.c.at) == [AT]
    assert event_times(database) == [1]
    for number in (5, 6):
        if next_is_event:
            engine.event(event(number))
        else:
            engine.sample(engine_sample(AT + number))
    assert event_times(database) == [1, 2, 3, 4, *([5, 6] if next_is_event else [])]
    assert failures(meter) == {"events": 4}
    counted = meter.snapshot().counters[m.ENGINE_EVENTS]["chat-0", EventKind.RESTART]
    assert counted == (6 if next_is_event else 4)


def test_of_too_many_waiting_events_the_newest_are_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch, engine: EnginePipeline, database: Engine, meter: Meter
) -> None:
    monkeypatch.setattr(monitors, "MAX_WAITING_EVENTS", 3)
    with without(database, "events"):
        for number in range(5):
            engine.event(event(number))
    engine.sample(engine_sample(AT))
    engine.event(event(5))
    assert event_times(database) == [0, 1, 2, 5]
    assert failures(meter) == {"events": 5, "events_dropped": 2}


def test_events_of_several_threads_are_each_stored_once(
    engine: EnginePipeline, database: Engine
) -> None:
    barrier = threading.Barrier(4, timeout=WITHIN_S)

    def send(first: int) -> None:
        barrier.wait()
        for number in range(first, first + 5):
            engine.event(event(number))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(send, (0, 5, 10, 15)))
    assert sorted(event_times(database)) == list(range(20))


RUNNING, STEP = fact.MAX_RUNNING_REQUESTS.name, fact.MAX_STEP_TOKENS.name
LIMITED_FRONT = EngineProcess(
    pid=7, started_after_boot_s=1.0, role=ProcessRole.FRONT, name="vllm", state="S", cpu_s=1.0
)


def facts_with(limits: EngineLimits, **facts: float) -> dict[str, float]:
    sample = engine_sample(NOON, facts={(name, ()): value for name, value in facts.items()})
    return {name: value for (name, _), value in limits.added_to(sample).facts.items()}


def host_sample(limits: dict[str, int], *processes: EngineProcess) -> HostSample:
    return HostSample(at=NOON, processes=processes, limits=limits)


def test_an_engines_own_limits_come_before_the_settings_and_these_before_its_flags() -> None:
    assert facts_with(EngineLimits({})) == {}
    limits = EngineLimits({RUNNING: 64})
    limits.host_sample(host_sample({RUNNING: 128, STEP: 2048}, LIMITED_FRONT))
    assert facts_with(limits) == {RUNNING: 64, STEP: 2048}
    assert facts_with(limits, **{RUNNING: 48.0}) == {RUNNING: 48, STEP: 2048}


def test_running_requests_are_limited_per_rank_and_steps_are_not_summed() -> None:
    ranks = fact.DATA_PARALLEL_RANKS.name
    limits = EngineLimits({RUNNING: 64, STEP: 2048})
    assert facts_with(limits, **{ranks: 4.0}) == {RUNNING: 256, STEP: 2048, ranks: 4}


def test_flags_change_at_a_restart_and_not_at_a_death() -> None:
    limits = EngineLimits({})
    limits.host_sample(host_sample({RUNNING: 128, STEP: 2048}, LIMITED_FRONT))
    limits.host_sample(host_sample({}))
    assert facts_with(limits) == {RUNNING: 128, STEP: 2048}
    limits.host_sample(host_sample({RUNNING: 32}, LIMITED_FRONT))
    assert facts_with(limits) == {RUNNING: 32}
