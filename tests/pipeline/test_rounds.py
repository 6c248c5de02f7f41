"""One round looks at everything, in an order in which a death is not missed, and tells of it."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from agent.analysis.failures import Limits
from agent.catalog import engine_facts as fact
from agent.catalog import gpu_facts
from agent.pipeline.gpu_links import GpuLinks
from agent.pipeline.rounds import EngineRounds, UnclaimedGpuRounds
from agent.records.engine import EngineSample
from agent.records.event import Event, EventKind
from agent.records.gpu import GpuSample, XidSeen
from agent.records.host import HostSighting
from agent.sources.engines.watch import PageLook
from tests.analysis.failure_polls import ALL, CORE, FRONT, GPU, cgroup

IDLE = {fact.REQUESTS_RUNNING: 0.0, fact.STEPS: 5.0, fact.AWAKE: 1.0}


def page(**changed: float) -> PageLook:
    facts: dict[tuple[str, tuple[str, ...]], float] = {
        (metric.name, ()): value for metric, value in IDLE.items()
    }
    for name, value in changed.items():
        facts[getattr(fact, name).name, ()] = value
    return PageLook(
        sample=EngineSample(engine="chat", at=1.0, dialect="vllm", model="m", facts=facts)
    )


USED = (gpu_facts.MEMORY_USED.name, ())


@dataclass
class Engine:
    """An engine whose page, health and machine are as a test says, and the rounds over it."""

    page: PageLook = field(default_factory=lambda: page())
    status: int | None = 200
    sighting: HostSighting = field(default_factory=lambda: HostSighting(at=0.0, processes=ALL))
    asked: list[str] = field(default_factory=list)
    seen_of_host: list[tuple[str, HostSighting]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    links: GpuLinks = field(default_factory=lambda: GpuLinks({"chat": (GPU,)}))
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.rounds = EngineRounds(
            "chat",
            page=self,
            health=self.health,
            host=self,
            gpus=self.links,
            limits=Limits(hang_s=10.0),
            on_host=lambda engine, seen: self.seen_of_host.append((engine, seen)),
            on_event=self.events.append,
        )

    def poll(self, now: float) -> PageLook:
        self.asked.append("page")
        return self.page

    def health(self) -> int | None:
        self.asked.append("health")
        return self.status

    def look(self, now: float) -> HostSighting:
        self.asked.append("host")
        return self.sighting

    def close(self) -> None:
        self.asked.append("closed")

    def rounds_of(self, count: int) -> list[EventKind]:
        for _ in range(count):
            self.now += 5.0
            self.rounds.poll(self.now)
        return [event.kind for event in self.events]


def gpu(used_bytes: float) -> GpuSample:
    return GpuSample(gpu=GPU, index=0, name="NVIDIA H200", at=1.0, facts={USED: used_bytes})


def test_the_host_is_looked_at_last() -> None:
    engine = Engine()
    engine.rounds_of(1)
    assert engine.asked == ["page", "health", "host"]


@pytest.mark.parametrize("failure", ["connection", "timeout"])
def test_who_does_not_answer_is_not_asked_for_its_health(failure: str) -> None:
    engine = Engine(page=PageLook(failure=failure))
    engine.rounds_of(1)
    assert engine.asked == ["page", "host"]


def test_an_unreadable_page_still_has_its_health_asked() -> None:
    engine = Engine(page=PageLook(failure="http_status"))
    engine.rounds_of(1)
    assert engine.asked == ["page", "health", "host"]


def test_what_was_seen_of_the_machine_is_handed_on() -> None:
    engine = Engine()
    engine.rounds_of(1)
    assert engine.seen_of_host == [("chat", engine.sighting)]


def test_a_kill_by_the_kernel_is_told_with_what_the_gpus_held_before() -> None:
    engine = Engine(sighting=HostSighting(at=0.0, processes=ALL, cgroup=cgroup(0)))
    engine.links.sample(gpu(70.0))
    engine.rounds_of(2)
    engine.links.sample(gpu(0.0))
    engine.page = PageLook(failure="connection")
    engine.sighting = HostSighting(at=0.0, processes=(), cgroup=cgroup(1))
    assert engine.rounds_of(2)[0] is EventKind.HOST_OOM
    assert engine.events[0].evidence["gpu_0_memory_used_bytes"] == 70.0
    assert (engine.events[0].engine, engine.events[0].at) == ("chat", 1015.0)


def test_a_health_of_503_tells_of_a_lost_core() -> None:
    engine = Engine()
    engine.rounds_of(1)
    engine.status = 503
    engine.sighting = HostSighting(at=0.0, processes=(FRONT,))
    assert engine.rounds_of(2) == [EventKind.ENGINE_DEAD]


def test_the_faults_of_its_gpus_are_the_engines() -> None:
    engine = Engine()
    engine.links.sample(gpu(70.0))
    engine.links.xid(XidSeen(gpu=GPU, xid=79, at=1.0, count=1))
    assert engine.rounds_of(3) == [EventKind.GPU_FAULT]
    assert engine.events[0].gpu == GPU


def test_the_limits_are_those_of_the_settings() -> None:
    def stood_still(hang_s: float) -> list[EventKind]:
        engine = Engine(page=page(REQUESTS_RUNNING=1.0))
        engine.rounds._limits = Limits(hang_s=hang_s)
        return engine.rounds_of(6)

    assert stood_still(10.0) == [EventKind.HANG]
    assert stood_still(100.0) == []


def test_closing_lets_go_of_the_machine() -> None:
    engine = Engine()
    engine.rounds.close()
    assert engine.asked == ["closed"]


def faults(*xids: XidSeen, problems: Iterable[str] = ()) -> list[Event]:
    links = GpuLinks({"chat": ()})
    links.sample(gpu(70.0))
    events: list[Event] = []
    rounds = UnclaimedGpuRounds(links, events.append)
    for seen in xids:
        links.xid(seen)
    for problem in problems:
        links.sample(
            GpuSample(gpu=GPU, index=0, name="NVIDIA H200", at=1.0, facts={}, problem=problem)
        )
        rounds.poll(1005.0)
    rounds.poll(1010.0)
    rounds.poll(1015.0)
    return events


def test_a_fault_of_a_gpu_without_an_engine_is_told_once() -> None:
    (event,) = faults(XidSeen(gpu=GPU, xid=79, at=1.0, count=1))
    assert (event.kind, event.engine, event.gpu) == (EventKind.GPU_FAULT, None, GPU)


def test_a_lost_gpu_without_an_engine_is_told_once() -> None:
    (event,) = faults(problems=["gpu_lost", "gpu_lost"])
    assert event.evidence["problem"] == "gpu_lost"


def test_a_programs_xid_is_no_fault_of_a_gpu_without_an_engine() -> None:
    assert faults(XidSeen(gpu=GPU, xid=13, at=1.0, count=1)) == []


def test_processes_link_an_engine_to_its_gpus() -> None:
    engine = Engine(links=GpuLinks({"chat": ()}))
    engine.links.sample(
        GpuSample(gpu=GPU, index=0, name="H", at=1.0, facts={}, processes={CORE.pid: 1})
    )
    engine.rounds_of(1)
    engine.links.xid(XidSeen(gpu=GPU, xid=79, at=1.0, count=1))
    assert engine.rounds_of(1) == [EventKind.GPU_FAULT]
