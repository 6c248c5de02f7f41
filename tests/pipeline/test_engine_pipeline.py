"""The engine pipeline publishes samples and events before it stores them."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import Engine

from agent.catalog import metrics as m
from agent.catalog.engine_facts import MAX_RUNNING_REQUESTS
from agent.outputs.prometheus.meter import Meter
from agent.pipeline import monitors
from agent.pipeline.monitors import EngineLimits, EnginePipeline, ScrapePublisher
from agent.records.engine import EngineSample
from agent.records.event import Confidence, Event, EventKind
from agent.sources.engines.directory import EngineDirectory
from agent.sources.engines.engine_source import ScrapeResult
from agent.store.observations import ObservationStore
from agent.store.tables import engine_samples, events
from tests.pipeline.tables import stored, without
from tests.store.migrated import migrated_in

AT = 1_790_000_000.0
WITHIN_S = 10.0


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Engine]:
    with migrated_in(tmp_path) as engine:
        yield engine


def sample(at: float) -> EngineSample:
    """A sample of the engine."""
    return EngineSample(engine="chat-0", at=at, dialect="vllm", model="llama", facts={})


def event(number: int) -> Event:
    """The event of this number."""
    return Event(
        at=AT + number,
        engine="chat-0",
        kind=EventKind.RESTART,
        confidence=Confidence.CERTAIN,
        evidence={"number": number},
    )


@pytest.fixture
def meter() -> Meter:
    return Meter((), ["chat-0"])


class StoringAtOnce(EnginePipeline):
    """A pipeline that stores after each sample and event."""

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
    """Failed writes by table."""
    return {table: n for (table,), n in meter.snapshot().counters[m.STORE_FAILURES].items() if n}


def event_times(database: Engine) -> list[float]:
    """Times of the stored events in seconds after `AT`, in the order of their rows."""
    return [at - AT for at in stored(database, events.c.at)]


def test_samples_and_events_are_published_before_they_are_stored(
    database: Engine, meter: Meter
) -> None:
    pipeline = EnginePipeline(ObservationStore(database, "tester"), meter)
    pipeline.sample(sample(AT))
    pipeline.event(event(1))
    assert meter.snapshot().samples["chat-0"] == sample(AT)
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
    publisher.publish(ScrapeResult(sample(AT), faults=("value_not_finite",)))
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


def test_a_sample_is_published_and_stored(
    engine: EnginePipeline, database: Engine, meter: Meter
) -> None:
    engine.sample(sample(AT))
    assert meter.snapshot().samples["chat-0"] == sample(AT)
    assert stored(database, engine_samples.c.at) == [AT]


def test_a_sample_that_cannot_be_stored_is_published_counted_and_dropped(
    engine: EnginePipeline, database: Engine, meter: Meter
) -> None:
    with without(database, "engine_samples"):
        engine.sample(sample(AT))
    assert meter.snapshot().samples["chat-0"] == sample(AT)
    assert failures(meter) == {"engine_samples": 1}
    engine.sample(sample(AT + 5))
    assert stored(database, engine_samples.c.at) == [AT + 5]


def test_an_event_is_counted_and_stored(
    engine: EnginePipeline, database: Engine, meter: Meter
) -> None:
    engine.event(event(1))
    assert event_times(database) == [1]
    assert meter.snapshot().counters[m.ENGINE_EVENTS]["chat-0", EventKind.RESTART] == 1
    assert failures(meter) == {}


@pytest.mark.parametrize("next_is_event", [True, False], ids=["event", "sample"])
def test_events_wait_for_the_database_and_are_stored_once_in_order(
    engine: EnginePipeline, database: Engine, meter: Meter, next_is_event: bool
) -> None:
    engine.event(event(1))
    with without(database, "events"):
        for number in (2, 3, 4):
            engine.event(event(number))
        engine.sample(sample(AT))
    assert event_times(database) == [1]
    for number in (5, 6):
        if next_is_event:
            engine.event(event(number))
        else:
            engine.sample(sample(AT + number))
    assert event_times(database) == [1, 2, 3, 4, *([5, 6] if next_is_event else [])]
    assert failures(meter) == {"events": 4}
    counted = meter.snapshot().counters[m.ENGINE_EVENTS]["chat-0", EventKind.RESTART]
    assert counted == (6 if next_is_event else 4)


def test_a_sample_is_stored_while_events_wait(engine: EnginePipeline, database: Engine) -> None:
    with without(database, "events"):
        engine.event(event(1))
        engine.sample(sample(AT))
        assert stored(database, engine_samples.c.at) == [AT]


def test_of_too_many_waiting_events_the_newest_are_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch, engine: EnginePipeline, database: Engine, meter: Meter
) -> None:
    monkeypatch.setattr(monitors, "MAX_WAITING_EVENTS", 3)
    with without(database, "events"):
        for number in range(5):
            engine.event(event(number))
    engine.sample(sample(AT))
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
