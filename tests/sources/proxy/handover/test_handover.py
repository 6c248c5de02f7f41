"""Each record of a worker is stored once, also if the agent ends or is away."""

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from agent.catalog.reasons import ProxyFailure
from agent.errors import StoreUnavailable
from agent.records.request import ProxyView, RequestRecord, Status
from agent.sources.proxy.handover import messages, receiving, sending
from agent.sources.proxy.handover.messages import EngineState, HandoverAddress, WorkerDied
from agent.sources.proxy.handover.receiving import HandoverReceiver
from agent.sources.proxy.handover.sending import SLOT_BYTES, HandoverSender, LeftSlots, RequestSlots
from tests.records.making import NOON, record
from tests.sources.proxy.wire import WITHIN_S


@pytest.mark.parametrize("later_run", [False, True])
def test_the_next_worker_finds_what_a_killed_one_did_not_free(later_run: bool) -> None:
    slots = RequestSlots(4)

    worker = os.fork()
    if worker == 0:
        slots.begin()
        _, second, third = map(slots.hold, (b"first", b"second", b"third"))
        slots.replace(second or 0, b"second, ended")
        slots.free(third or 0)
        slots.count_without(1)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(worker, 0)
    slots = RequestSlots.left(slots.descriptor) if later_run else slots
    assert slots.begin() == LeftSlots({0: b"first", 1: b"second, ended"}, 1)
    # They stay where they are, and the next records go elsewhere.
    assert (slots.hold(b"next"), slots.hold(b"last"), slots.hold(b"one more")) == (2, 3, None)


def test_slots_of_another_layout_are_refused() -> None:
    slots = RequestSlots(1)
    os.pwrite(slots.descriptor, (7).to_bytes(4, sys.byteorder), 0)
    with pytest.raises(ValueError, match="layout 7"):
        RequestSlots.left(slots.descriptor)


def test_memory_that_is_given_back_is_free_in_each_process() -> None:
    slots = RequestSlots(1)
    slots.release()
    assert os.fstat(slots.descriptor).st_size == 0


def test_a_record_that_is_too_large_has_no_slot() -> None:
    slots = RequestSlots(1)
    slots.begin()
    assert slots.hold(b"x" * (SLOT_BYTES + 1)) is None
    assert slots.hold(b"x" * SLOT_BYTES) == 0
    assert slots.replace(0, b"x" * (SLOT_BYTES + 1)) is None
    assert slots.hold(b"the slot is free") == 0


def test_a_half_written_slot_is_ignored() -> None:
    slots = RequestSlots(2)

    class Torn(bytes):
        def __len__(self) -> int:
            # The copy of a longer record than its slot expects fails in the middle of a write.
            return 1

    slots.begin()
    slots.hold(b"before")
    with pytest.raises(ValueError, match="different structures"):
        slots.replace(0, Torn(b"after"))
    assert slots.begin() == LeftSlots({}, 0)


UP = {"chat-0": EngineState(healthy=True, models=frozenset({"m"}))}
DOWN = {"chat-0": EngineState(healthy=False, models=None)}


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "_FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(receiving, "_ENGINES_EVERY_S", 0.001)
    monkeypatch.setattr(sending, "_RETRY_S", 0.001)
    monkeypatch.setattr(sending, "_STATUS_EVERY_S", 0.001)
    monkeypatch.setattr(sending, "BATCH_WITHIN_S", 0.001)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await asyncio.sleep(0)


class AgentSide:
    """A receiver with a store that can fail."""

    def __init__(self, address: HandoverAddress) -> None:
        self.batches: list[list[str]] = []
        self.records: list[RequestRecord] = []
        self.failure: Exception | None = None
        self.refused = 0
        self.attempts = 0
        self.failures: Counter[str] = Counter()
        self.cut: Counter[str] = Counter()
        self.spans: list[bytes] = []
        self.died: list[WorkerDied] = []
        self.engines: Mapping[str, EngineState] = UP
        self.receiver = HandoverReceiver(
            address,
            accept=self.accept,
            engines=lambda: self.engines,
            on_failure=lambda reason: self.failures.update([reason]),
            on_cut=lambda reason: self.cut.update([reason]),
            on_died=self.died.append,
            on_spans=self.spans.append,
        )

    async def accept(self, records: Sequence[RequestRecord]) -> int:
        self.attempts += 1
        if self.failure is not None:
            raise self.failure
        self.batches.append([record.trace_id for record in records])
        self.records += records
        return self.refused

    @property
    def stored(self) -> list[str]:
        return [trace_id for batch in self.batches for trace_id in batch]


class WorkerSide:
    def __init__(
        self, address: HandoverAddress, most: int = 1000, slots: RequestSlots | None = None
    ) -> None:
        self.engines: Mapping[str, EngineState] = {}
        self.retired = asyncio.Event()
        self.sender = HandoverSender(
            address,
            0,
            slots or RequestSlots(8),
            most,
            on_engines=self.learn,
            on_retire=self.retired.set,
            live=lambda: 3,
        )

    def learn(self, engines: Mapping[str, EngineState]) -> None:
        self.engines = engines

    def take(self, *numbers: int) -> list[str]:
        records = [record(number) for number in numbers]
        for one in records:
            self.sender.take(one)
        return [one.trace_id for one in records]


@asynccontextmanager
async def listening(address: HandoverAddress) -> AsyncIterator[AgentSide]:
    agent = AgentSide(address)
    await agent.receiver.start()
    try:
        yield agent
    finally:
        await agent.receiver.close()


@asynccontextmanager
async def working(
    address: HandoverAddress,
    most: int = 1000,
    slots: RequestSlots | None = None,
    left_open: int = 0,
) -> AsyncIterator[WorkerSide]:
    worker = WorkerSide(address, most, slots)
    worker.sender.begin(left_open)
    running = asyncio.create_task(worker.sender.run())
    try:
        yield worker
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


@pytest.fixture
def address(tmp_path: Path) -> HandoverAddress:
    return HandoverAddress(tmp_path / "handover.sock", "this run")


async def test_records_are_stored_in_order_and_in_batches(address: HandoverAddress) -> None:
    async with working(address) as worker:
        trace_ids = worker.take(*range(700))
        async with listening(address) as agent:
            assert await worker.sender.flush(WITHIN_S) == 0
            assert agent.stored == trace_ids
            assert [len(batch) for batch in agent.batches] == [512, 188]


@pytest.mark.parametrize("iterations", range(20))
async def test_a_worker_that_stops_while_its_agent_goes_away_stops(
    address: HandoverAddress, iterations: int
) -> None:
    async with working(address) as worker:
        async with listening(address) as agent:
            worker.take(1)
            await until(lambda: agent.stored)
        # Some iterations of the loop later the worker reads that its connection has ended.
        for _ in range(iterations):
            await asyncio.sleep(0)


async def test_an_agent_that_stops_while_a_worker_is_connected_logs_no_error(
    address: HandoverAddress, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening(address) as agent, working(address):
        await until(lambda: agent.receiver.workers)
        await agent.receiver.close()
        assert agent.receiver.workers == 0
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_while_the_store_is_away_counts_are_known_and_records_wait(
    address: HandoverAddress,
) -> None:
    async with working(address) as worker, listening(address) as agent:
        agent.failure = StoreUnavailable("the database is away")
        trace_ids = worker.take(1)
        await until(lambda: agent.attempts > 1)
        assert await worker.sender.flush(0.0) == 0, "the agent has it"
        trace_ids += worker.take(2, 3)
        worker.sender.client_cut("malformed")
        await until(lambda: (agent.receiver.waiting, agent.receiver.live) == (3, 3))
        await until(lambda: agent.cut == {"malformed": 1})
        agent.failure = None
        assert await worker.sender.flush(WITHIN_S) == 0
        assert (agent.stored, agent.failures) == (trace_ids, {})


def opened(number: int) -> RequestRecord:
    error = ProxyView(error=ProxyFailure.WORKER_DIED)
    return record(number, status=Status.ERROR, ended_at=NOON, proxied=error)


async def test_a_worker_takes_over_what_a_killed_one_left(address: HandoverAddress) -> None:
    slots = RequestSlots(8)
    killed = WorkerSide(address, slots=slots)
    killed.sender.begin(0)
    for number in (1, 2, 3, 4):
        killed.sender.opened(opened(number))
    killed.sender.lost(opened(1).span_id)
    # The agent is away, so its ended requests are in the killed worker alone.
    ended = killed.take(2, 5)
    async with working(address, slots=slots, left_open=3), listening(address) as agent:
        await until(lambda: len(agent.records) == 4)
        await until(lambda: agent.failures)
    failed = [each for each in agent.records if each.status is Status.ERROR]
    assert sorted(each.trace_id for each in agent.records if each not in failed) == ended
    assert [each.trace_id for each in failed] == [opened(number).trace_id for number in (3, 4)]
    assert all(each.ended_at > NOON for each in failed)
    assert agent.died == [WorkerDied(worker=0, open=3, rows=2, lost=0)]
    assert agent.failures == {"worker_died": 3}


async def test_records_without_a_readable_slot_are_lost_with_their_worker_and_counted(
    address: HandoverAddress,
) -> None:
    slots = RequestSlots(3)
    killed = WorkerSide(address, slots=slots)
    killed.sender.begin(0)
    slots.hold(b"no record")
    killed.take(1, 2, 3)
    killed.sender.take(record(4, model="m" * 2000))
    async with working(address, slots=slots), listening(address) as agent:
        await until(lambda: agent.died and len(agent.records) == 2)
        assert agent.died == [WorkerDied(worker=0, open=0, rows=0, lost=2)]
        await until(lambda: agent.failures == {"worker_died": 2, "record_refused": 1})


async def test_slots_are_free_again_when_the_agent_has_stored_their_records(
    address: HandoverAddress,
) -> None:
    slots = RequestSlots(2)
    async with listening(address), working(address, slots=slots) as worker:
        for number in range(0, 10, 2):
            worker.sender.opened(opened(number))
            worker.take(number, number + 1)
            assert await worker.sender.flush(WITHIN_S) == 0
    assert slots.begin() == LeftSlots({}, 0)


async def test_a_worker_that_ends_hands_over_its_last_counts_and_spans(
    address: HandoverAddress,
) -> None:
    async with listening(address) as agent:
        async with working(address) as worker:
            worker.sender.failed("relay")
            worker.sender.client_cut("slow")
            worker.sender.take_spans(b"spans")
            await worker.sender.flush(WITHIN_S)
        await until(lambda: (agent.failures, agent.cut) == ({"relay": 1}, {"slow": 1}))
        await until(lambda: agent.spans == [b"spans"])


async def test_a_record_goes_to_the_agent_at_once_if_none_went_a_moment_ago(
    address: HandoverAddress,
) -> None:
    sending.BATCH_WITHIN_S = 2 * WITHIN_S
    async with working(address) as worker, listening(address) as agent:
        first = worker.take(1)
        await until(lambda: agent.stored == first)


async def test_waiting_records_are_bounded_by_number_and_by_size(address: HandoverAddress) -> None:
    for kept, model in ((8, "m"), (2, "m" * 3000)):
        worker = WorkerSide(address, most=8)
        for number in range(9):
            worker.sender.take(record(number, model=model))
        assert await worker.sender.flush(0.0) == kept


async def test_records_that_can_never_be_stored_are_counted_and_delay_no_other(
    address: HandoverAddress,
) -> None:
    async with working(address) as worker, listening(address) as agent:
        agent.failure = ValueError("cannot be")
        worker.take(1)
        assert await worker.sender.flush(WITHIN_S) == 0
        agent.failure, agent.refused = None, 1
        trace_ids = worker.take(2, 3)
        assert await worker.sender.flush(WITHIN_S) == 0
        assert agent.stored == trace_ids
        assert agent.failures == {"record_refused": 2}


async def test_of_too_many_waiting_records_the_newest_are_dropped_and_counted(
    address: HandoverAddress,
) -> None:
    async with working(address, most=3) as worker:
        trace_ids = worker.take(1, 2, 3, 4, 5)
        async with listening(address) as agent:
            await until(lambda: agent.failures == {"store_behind": 2})
            assert await worker.sender.flush(WITHIN_S) == 0
            assert agent.stored == trace_ids[:3]


async def test_a_worker_knows_what_the_agent_knows_of_the_engines(address: HandoverAddress) -> None:
    async with working(address) as worker, listening(address) as agent:
        await until(lambda: worker.engines == UP)
        agent.engines = DOWN
        await until(lambda: worker.engines == DOWN)


async def test_a_worker_of_an_earlier_run_is_told_to_retire_and_loses_no_record(
    address: HandoverAddress,
) -> None:
    async with working(HandoverAddress(address.socket, "an earlier run")) as worker:
        trace_ids = worker.take(1)
        async with listening(address) as agent:
            await worker.retired.wait()
            assert await worker.sender.flush(WITHIN_S) == 0
            assert agent.stored == trace_ids


async def test_records_of_another_version_are_refused_and_counted(
    address: HandoverAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiving, "RECORD_FIELDS", (*messages.RECORD_FIELDS, "new_field"))
    async with working(address) as worker, listening(address) as agent:
        worker.take(1, 2)
        assert await worker.sender.flush(WITHIN_S) == 0
        assert (agent.stored, agent.failures) == ([], {"record_refused": 2})


async def test_a_message_over_the_limit_ends_the_connection_and_no_other(
    address: HandoverAddress,
) -> None:
    async with listening(address) as agent, working(address) as worker:
        reader, writer = await asyncio.open_unix_connection(address.socket)
        writer.write((messages.MAX_MESSAGE_BYTES + 1).to_bytes(4))
        assert await reader.read() == messages.framed(messages.Engines(UP))
        writer.close()
        trace_ids = worker.take(1)
        assert await worker.sender.flush(WITHIN_S) == 0
        assert agent.stored == trace_ids
