"""A poll reads every source in an order that misses no death, and reports events."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import count

import pytest

from agent.analysis.failures import DetectionLimits
from agent.catalog import engine_facts as fact
from agent.catalog import gpu_facts
from agent.pipeline.monitors import EngineMonitor, UnclaimedGpuMonitor
from agent.records.engine import EngineSample
from agent.records.event import Event, EventKind
from agent.records.gpu import GpuSample, XidError
from agent.records.host import HostSample
from agent.sources.engines.engine_source import ScrapeResult
from tests.analysis.failures.polled_engine import ALL, CORE, FRONT, GPU, cgroup
from tests.pipeline.inventory import Inventory

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
class Engine:
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
    engine = Engine()
    engine.polls(1)
    assert engine.calls == ["scrape", "health", "host", "store"]
    assert engine.scrapes == [engine.scrape]


def test_events_are_reported_before_anything_is_stored() -> None:
    """The database can be slow."""
    engine = Engine()
    engine.polls(1)
    engine.scrape = ScrapeResult(failure="connection")
    engine.calls.clear()
    engine.polls(1)
    assert engine.calls == ["scrape", "host", EventKind.UNREACHABLE, "store"]


def test_samples_are_stored_when_the_poll_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine()
    monkeypatch.setattr(engine.monitor, "_read_health", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        engine.polls(1)
    assert engine.calls == ["scrape", "store"]


def test_setting_the_wall_clock_does_not_lengthen_an_outage() -> None:
    engine = Engine(scrape=scrape(started=500.0))
    engine.polls(1)
    engine.scrape = ScrapeResult(failure="connection")
    engine.polls(2)
    engine.now += 3600.0
    engine.scrape = scrape(started=1010.0)
    assert engine.polls(1) == [EventKind.UNREACHABLE, EventKind.RESTART]
    assert engine.events[1].evidence["gone_s"] == 10.0
    assert engine.events[1].at == 4620.0


def test_a_restart_while_the_agent_was_stopped_has_the_last_sample_before() -> None:
    engine = Engine(
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
    engine = Engine(
        before=scrape(started=500.0).sample, scrape=ScrapeResult(failure=failure), status=None
    )
    assert engine.polls(300) == []
    engine.scrape = scrape(started=1011.0)
    assert engine.polls(1) == [EventKind.RESTART]


def test_pressure_from_before_the_start_of_the_agent_is_not_reported() -> None:
    engine = Engine(before=scrape(started=500.0, PREEMPTIONS=1.0).sample)
    engine.scrape = scrape(started=500.0, PREEMPTIONS=90.0)
    assert engine.polls(2) == []
    engine.scrape = scrape(started=500.0, PREEMPTIONS=91.0)
    assert engine.polls(1) == [EventKind.KV_PRESSURE]


@pytest.mark.parametrize("failure", ["connection", "timeout"])
def test_the_health_of_an_engine_that_cannot_be_scraped_is_not_read(failure: str) -> None:
    engine = Engine(scrape=ScrapeResult(failure=failure))
    engine.polls(1)
    assert engine.calls == ["scrape", "host", "store"]


def test_the_health_is_read_also_after_an_unreadable_exposition() -> None:
    engine = Engine(scrape=ScrapeResult(failure="http_status"))
    engine.polls(1)
    assert engine.calls == ["scrape", "health", "host", "store"]


def test_host_samples_are_passed_on() -> None:
    engine = Engine()
    engine.polls(1)
    assert engine.host_samples == [("chat", engine.host_sample)]


def test_why_a_part_of_the_machine_cannot_be_read_is_logged_once_per_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Engine()
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
    engine = Engine(host_sample=HostSample(at=0.0, processes=ALL, cgroup=cgroup(0)))
    engine.gpus.read(gpu(70.0))
    engine.polls(2)
    engine.gpus.read(gpu(0.0))
    engine.scrape = ScrapeResult(failure="connection")
    engine.host_sample = HostSample(at=0.0, processes=(), cgroup=cgroup(1))
    assert engine.polls(2)[0] is EventKind.HOST_OOM
    assert engine.events[0].evidence["gpu_0_memory_used_bytes"] == 70.0
    assert (engine.events[0].engine, engine.events[0].at) == ("chat", 1015.0)


def test_a_health_of_503_is_a_lost_core() -> None:
    engine = Engine()
    engine.polls(1)
    engine.status = 503
    engine.host_sample = HostSample(at=0.0, processes=(FRONT,))
    assert engine.polls(2) == [EventKind.ENGINE_DEAD]


def test_faults_of_its_gpus_belong_to_the_engine() -> None:
    engine = Engine()
    engine.gpus.read(gpu(70.0))
    engine.gpus.xid(XidError(gpu=GPU, xid=79, at=1.0, count=1))
    assert engine.polls(3) == [EventKind.GPU_FAULT]
    assert engine.events[0].gpu == GPU


def test_the_configured_limits_are_used() -> None:
    def events_of_a_hang(hang_s: float) -> list[EventKind]:
        limits = DetectionLimits(hang_s=hang_s)
        engine = Engine(scrape=scrape(REQUESTS_RUNNING=1.0), limits=limits)
        return engine.polls(6)

    assert events_of_a_hang(10.0) == [EventKind.HANG]
    assert events_of_a_hang(100.0) == []


def test_closing_closes_the_host_source() -> None:
    engine = Engine()
    engine.monitor.close()
    assert engine.calls == ["closed"]


def faults(*xids: XidError, problems: Iterable[str] = ()) -> list[Event]:
    gpus = Inventory({"chat": ()})
    gpus.read(gpu(70.0))
    events: list[Event] = []
    clock_s = count()
    monitor = UnclaimedGpuMonitor(
        gpus, on_event=events.append, store=lambda: None, monotonic=lambda: float(next(clock_s))
    )
    for error in xids:
        gpus.xid(error)
    for problem in problems:
        gpus.read(
            GpuSample(gpu=GPU, index=0, name="NVIDIA H200", at=1.0, facts={}, problem=problem)
        )
        monitor.poll(1005.0)
    monitor.poll(1010.0)
    monitor.poll(1015.0)
    return events


def test_a_fault_of_a_gpu_without_an_engine_is_reported_once() -> None:
    (event,) = faults(XidError(gpu=GPU, xid=79, at=1.0, count=1))
    assert (event.kind, event.engine, event.gpu) == (EventKind.GPU_FAULT, None, GPU)


def test_a_lost_gpu_without_an_engine_is_reported_once() -> None:
    (event,) = faults(problems=["gpu_lost", "gpu_lost"])
    assert event.evidence["problem"] == "gpu_lost"


def test_an_xid_of_a_program_is_no_fault_of_a_gpu_without_an_engine() -> None:
    assert faults(XidError(gpu=GPU, xid=13, at=1.0, count=1)) == []


def test_processes_link_an_engine_to_its_gpus() -> None:
    engine = Engine(gpus=Inventory({"chat": ()}))
    engine.gpus.read(
        GpuSample(gpu=GPU, index=0, name="H", at=1.0, facts={}, processes={CORE.pid: 1})
    )
    engine.polls(1)
    engine.gpus.xid(XidError(gpu=GPU, xid=79, at=1.0, count=1))
    assert engine.polls(1) == [EventKind.GPU_FAULT]


def test_the_action_that_the_driver_of_an_engines_gpu_recommends_is_reported() -> None:
    engine = Engine()
    sample = gpu(70.0)
    wanted = {**sample.facts, ("gpu_recovery_action", ()): 1.0}
    engine.gpus.read(replace(sample, facts=wanted))
    assert engine.polls(3) == [EventKind.GPU_FAULT]
    assert engine.events[0].evidence["recovery_action"] == "reset"
