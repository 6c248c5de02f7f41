"""The intake stores records of proxied requests, and never delays the traffic."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from agent.errors import StoreUnavailable
from agent.pipeline import intake
from agent.pipeline.intake import RecordIntake
from agent.records.request import RequestRecord
from tests.records.making import record

WITHIN_S = 20.0


class Store:
    """A store that can fail, and the intake that writes to it."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.failure: Exception | None = None
        self.refused: list[RequestRecord] = []
        self.dropped: list[str] = []
        self.called = asyncio.Event()
        self.intake = RecordIntake(self.accept, self.dropped.append)

    async def accept(self, records: Sequence[RequestRecord]) -> int:
        self.called.set()
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        good = [record for record in records if record not in self.refused]
        self.batches.append([record.trace_id for record in good])
        return len(records) - len(good)

    @property
    def stored(self) -> list[str]:
        return [trace_id for batch in self.batches for trace_id in batch]

    def take(self, *numbers: int) -> list[str]:
        records = [record(number) for number in numbers]
        for one in records:
            self.intake.take(one)
        return [one.trace_id for one in records]


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, WITHIN_S))


@pytest.fixture(autouse=True)
def short_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "_FIRST_DELAY_S", 0.001)


def test_records_that_can_never_be_stored_are_counted_and_delay_no_other() -> None:
    async def scenario() -> None:
        store = Store()
        store.refused = [record(2)]
        store.intake.start()
        trace_ids = store.take(1, 2, 3)
        await store.intake.close(WITHIN_S)
        assert store.stored == [trace_ids[0], trace_ids[2]]
        assert store.dropped == ["record_refused"]

    run(scenario())


def test_records_are_stored_in_order_and_in_batches() -> None:
    async def scenario() -> None:
        store = Store()
        store.intake.start()
        trace_ids = store.take(*range(700))
        await store.intake.close(WITHIN_S)
        assert store.stored == trace_ids
        assert [len(batch) for batch in store.batches] == [512, 188]

    run(scenario())


def test_records_that_the_store_refuses_are_stored_later() -> None:
    async def scenario() -> None:
        store = Store()
        store.failure = StoreUnavailable("unreachable")
        store.intake.start()
        trace_ids = store.take(1, 2)
        for _ in range(3):
            store.called.clear()
            await store.called.wait()
        trace_ids += store.take(3)
        store.failure = None
        await store.intake.close(WITHIN_S)
        assert (store.stored, store.dropped) == (trace_ids, [])

    run(scenario())


def test_of_too_many_waiting_records_the_newest_are_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(intake, "MAX_WAITING_RECORDS", 3)

    async def scenario() -> None:
        store = Store()
        trace_ids = store.take(1, 2, 3, 4, 5)
        assert store.intake.waiting == 3
        store.intake.start()
        await store.intake.close(WITHIN_S)
        assert (store.stored, store.dropped) == (trace_ids[:3], ["store_behind"] * 2)

    run(scenario())


def test_a_record_that_cannot_be_stored_does_not_delay_others() -> None:
    async def scenario() -> None:
        store = Store()
        store.failure = ValueError("cannot be")
        store.intake.start()
        store.take(1)
        await store.called.wait()
        while store.intake.waiting:
            await asyncio.sleep(0)
        store.failure = None
        trace_ids = store.take(2)
        await store.intake.close(WITHIN_S)
        assert (store.stored, store.dropped) == (trace_ids, ["record_refused"])

    run(scenario())


def test_records_that_wait_for_an_unreachable_store_at_the_end_are_counted_as_dropped() -> None:
    async def scenario() -> None:
        store = Store()
        store.failure = StoreUnavailable("unreachable")
        store.intake.start()
        store.take(1, 2)
        await store.called.wait()
        await store.intake.close(WITHIN_S)
        assert (store.intake.waiting, store.dropped) == (0, ["store_away_at_stop"] * 2)

    run(scenario())
