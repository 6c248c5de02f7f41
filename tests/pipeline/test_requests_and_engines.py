"""What was seen is stored, and only then counted and acknowledged; the store may come and go."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select, text

from agent.analysis.verdicts import Judge
from agent.catalog import metrics as m
from agent.catalog.definitions import GOODPUT, Verdict
from agent.catalog.engine_facts import MAX_RUNNING_REQUESTS
from agent.catalog.reasons import StoreWrite
from agent.errors import StoreUnavailable
from agent.outputs.prometheus.meter import Meter
from agent.pipeline import engine_pipeline
from agent.pipeline.engine_limits import EngineLimits
from agent.pipeline.engine_pipeline import EnginePipeline, ScrapePublisher
from agent.pipeline.request_pipeline import RequestPipeline
from agent.records.engine import EngineSample
from agent.records.event import Confidence, Event, EventKind
from agent.records.objective import JudgedRequest, Objective
from agent.records.request import RequestRecord, Status, Vantage
from agent.records.write_result import WriteResult
from agent.sources.engines.directory import EngineDirectory
from agent.sources.engines.engine_source import ScrapeResult
from agent.store.connection import open_engine
from agent.store.migrating import upgrade
from agent.store.observations import ObservationStore
from agent.store.tables import engine_samples, events, requests
from agent.store.writing import RequestWriter, request_write

AT = 1_790_000_000.0
WITHIN_S = 10.0

CHAT = Objective(name="chat", definition=GOODPUT, target=0.95, window_s=86400.0, ttft_s=0.2)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Engine]:
    engine = open_engine(f"sqlite:///{tmp_path / 'goodput.db'}")
    upgrade(engine)
    yield engine
    engine.dispose()


@contextmanager
def without(database: Engine, table: str) -> Iterator[None]:
    """The database while a table is away."""
    rename(database, table, "elsewhere")
    try:
        yield
    finally:
        rename(database, "elsewhere", table)


def rename(database: Engine, table: str, name: str) -> None:
    """Give a table another name."""
    with database.begin() as connection:
        connection.execute(text(f"ALTER TABLE {table} RENAME TO {name}"))


def stored(database: Engine, column: Any) -> list[Any]:
    """The values of a column, oldest row first."""
    with database.connect() as connection:
        return list(connection.scalars(select(column).order_by(column.table.c.id)))


def request(number: int, ttft_s: float = 0.1) -> RequestRecord:
    """The request of that number."""
    return RequestRecord(
        trace_id=f"{number:032x}",
        span_id=f"{number:016x}",
        vantage=Vantage.ENGINE,
        status=Status.OK,
        started_at=AT,
        ended_at=AT + 1,
        received_at=AT + 2,
        ttft_s=ttft_s,
    )


class Counted(Meter):
    """A meter that notes the order of its calls."""

    def __init__(self) -> None:
        super().__init__((), ())
        self.calls: list[tuple[Any, ...]] = []

    def stored(self, counted: Sequence[JudgedRequest], sent: int, new: int) -> None:
        self.calls.append(("stored", [item.record.span_id for item in counted], sent, new))

    def store_failed(self, what: StoreWrite) -> None:
        self.calls.append(("store_failed", what))


class HeldWriter(RequestWriter):
    """A writer whose commits are done when a test says so. It has no thread."""

    def __init__(self) -> None:
        self.submitted: list[Sequence[JudgedRequest]] = []
        self.answer: Future[WriteResult] = Future()
        self.settled: Future[list[JudgedRequest]] = Future()
        self.settled_at: list[float] = []

    def submit(self, judged: Sequence[JudgedRequest]) -> "Future[WriteResult]":
        self.submitted.append(judged)
        return self.answer

    def settle(self, now: float) -> "Future[list[JudgedRequest]]":
        self.settled_at.append(now)
        return self.settled


def test_requests_are_acknowledged_and_counted_when_they_are_committed() -> None:
    async def accept() -> None:
        writer, meter = HeldWriter(), Counted()
        accepting = asyncio.create_task(
            RequestPipeline(Judge([CHAT]), writer, meter).accept([request(1), request(2)])
        )
        await asyncio.sleep(0)
        (judged,) = writer.submitted
        assert (accepting.done(), meter.calls) == (False, [])
        writer.answer.set_result(WriteResult([judged[1]], [judged[1]]))
        await accepting
        assert meter.calls == [("stored", [request(2).span_id], 2, 1)]

    asyncio.run(accept())


def test_requests_are_judged_before_they_are_stored() -> None:
    async def accept() -> None:
        writer = HeldWriter()
        writer.answer.set_result(WriteResult([], []))
        judging = RequestPipeline(Judge([CHAT]), writer, Counted())
        await judging.accept([request(1, ttft_s=0.2), request(2, ttft_s=0.3)])
        (judged,) = writer.submitted
        assert [item.record for item in judged] == [request(1, 0.2), request(2, 0.3)]
        assert [item.judgement.verdict for item in judged] == [Verdict.MET, Verdict.MISSED]

    asyncio.run(accept())


def test_no_requests_ask_for_no_commit() -> None:
    writer, meter = HeldWriter(), Counted()
    asyncio.run(RequestPipeline(Judge([]), writer, meter).accept([]))
    assert (writer.submitted, meter.calls) == ([], [])


def test_a_failed_commit_is_passed_on_and_counted_as_such() -> None:
    writer, meter = HeldWriter(), Counted()
    writer.answer.set_exception(StoreUnavailable("the disk is full"))
    accepting = RequestPipeline(Judge([]), writer, meter).accept([request(1)])
    with pytest.raises(StoreUnavailable, match="the disk is full"):
        asyncio.run(accepting)
    assert meter.calls == [("store_failed", "requests")]


def test_a_writer_that_takes_nothing_is_passed_on_and_counted(database: Engine) -> None:
    writer, meter = RequestWriter(request_write(database)), Counted()
    writer.close()
    with pytest.raises(StoreUnavailable, match="stopping"):
        asyncio.run(RequestPipeline(Judge([]), writer, meter).accept([request(1)]))
    assert meter.calls == [("store_failed", "requests")]


def test_what_was_not_stored_may_be_handed_in_again_and_is_counted_once(database: Engine) -> None:
    async def accept() -> None:
        records = [request(1), request(2)]
        with without(database, "requests"), pytest.raises(StoreUnavailable):
            await accepting.accept(records)
        await accepting.accept(records)
        await accepting.accept([*records, request(3)])

    meter, writer = Counted(), RequestWriter(request_write(database))
    accepting = RequestPipeline(Judge([]), writer, meter)
    asyncio.run(accept())
    writer.close()
    ids = [request(number).span_id for number in (1, 2, 3)]
    assert stored(database, requests.c.span_id) == ids
    assert meter.calls == [
        ("store_failed", "requests"),
        ("stored", ids[:2], 2, 2),
        ("stored", ids[2:], 3, 1),
    ]


def sample(at: float) -> EngineSample:
    """A reading of an engine's page."""
    return EngineSample(engine="chat-0", at=at, dialect="vllm", model="llama", facts={})


def event(number: int) -> Event:
    """The event of that number."""
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
    """A pipeline that is calls to store after each thing that it takes."""

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
    """The writes that the database did not take, by what was written."""
    return {what: n for (what,), n in meter.snapshot().counters[m.STORE_FAILURES].items() if n}


def event_times(database: Engine) -> list[float]:
    """When the stored events happened, in seconds after the first, in the order of their rows."""
    return [at - AT for at in stored(database, events.c.at)]


def test_what_is_seen_is_shown_and_counted_before_it_is_stored(
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


def test_a_reading_is_shown_and_stored(
    engine: EnginePipeline, database: Engine, meter: Meter
) -> None:
    engine.sample(sample(AT))
    assert meter.snapshot().samples["chat-0"] == sample(AT)
    assert stored(database, engine_samples.c.at) == [AT]


def test_a_reading_that_cannot_be_stored_is_shown_counted_and_gone(
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


@pytest.mark.parametrize("next_is_event", [True, False], ids=["event", "reading"])
def test_events_wait_for_the_database_and_are_stored_once_in_their_order(
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


def test_a_reading_is_stored_though_events_have_to_wait(
    engine: EnginePipeline, database: Engine
) -> None:
    with without(database, "events"):
        engine.event(event(1))
        engine.sample(sample(AT))
        assert stored(database, engine_samples.c.at) == [AT]


def test_of_too_many_waiting_events_the_newest_are_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch, engine: EnginePipeline, database: Engine, meter: Meter
) -> None:
    monkeypatch.setattr(engine_pipeline, "MAX_WAITING_EVENTS", 3)
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
    together = threading.Barrier(4, timeout=WITHIN_S)

    def tell(first: int) -> None:
        together.wait()
        for number in range(first, first + 5):
            engine.event(event(number))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(tell, (0, 5, 10, 15)))
    assert sorted(event_times(database)) == list(range(20))
