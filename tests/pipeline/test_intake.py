"""Records of proxied requests reach the store, whatever it does, and never hold up the traffic."""

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
    """A store that may be away, and the intake before it."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.failure: Exception | None = None
        self.dropped: list[str] = []
        self.asked = asyncio.Event()
        self.intake = RecordIntake(self.accept, self.dropped.append)

    async def accept(self, records: Sequence[RequestRecord]) -> None:
        self.asked.set()
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        self.batches.append([record.trace_id for record in records])

    @property
    def stored(self) -> list[str]:
        return [trace_id for batch in self.batches for trace_id in batch]

    def take(self, *numbers: int) -> list[str]:
        records = [record(number) for number in numbers]
        for one in records:
            self.intake.take(one)
        return [one.trace_id for one in records]


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, WITHIN_S))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "_FIRST_DELAY_S", 0.001)


def test_records_are_stored_in_their_order_and_together() -> None:
    async def story() -> None:
        store = Store()
        store.intake.start()
        taken = store.take(*range(700))
        await store.intake.close()
        assert store.stored == taken
        assert [len(batch) for batch in store.batches] == [512, 188]

    run(story())


def test_what_the_store_does_not_take_now_it_gets_later() -> None:
    async def story() -> None:
        store = Store()
        store.failure = StoreUnavailable("away")
        store.intake.start()
        taken = store.take(1, 2)
        for _ in range(3):
            store.asked.clear()
            await store.asked.wait()
        taken += store.take(3)
        store.failure = None
        await store.intake.close()
        assert (store.stored, store.dropped) == (taken, [])

    run(story())


def test_of_too_many_waiting_records_the_newest_are_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(intake, "MAX_WAITING_RECORDS", 3)

    async def story() -> None:
        store = Store()
        taken = store.take(1, 2, 3, 4, 5)
        assert store.intake.waiting == 3
        store.intake.start()
        await store.intake.close()
        assert (store.stored, store.dropped) == (taken[:3], ["store_behind"] * 2)

    run(story())


def test_what_the_store_never_takes_holds_nothing_up() -> None:
    async def story() -> None:
        store = Store()
        store.failure = ValueError("cannot be")
        store.intake.start()
        store.take(1)
        await store.asked.wait()
        while store.intake.waiting:
            await asyncio.sleep(0)
        store.failure = None
        taken = store.take(2)
        await store.intake.close()
        assert (store.stored, store.dropped) == (taken, ["record_refused"])

    run(story())


def test_a_store_that_is_away_at_the_end_costs_what_waits_and_it_is_counted() -> None:
    async def story() -> None:
        store = Store()
        store.failure = StoreUnavailable("away")
        store.intake.start()
        store.take(1, 2)
        await store.asked.wait()
        await store.intake.close()
        assert (store.intake.waiting, store.dropped) == (0, ["store_away_at_stop"] * 2)

    run(story())
