"""The request pipeline judges requests, and counts and acknowledges them after their commit."""

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from agent.analysis.verdicts import Judge
from agent.catalog.definitions import GOODPUT, Verdict
from agent.catalog.reasons import StoreWrite
from agent.errors import StoreUnavailable
from agent.outputs.prometheus.meter import Meter
from agent.pipeline.request_pipeline import RequestPipeline
from agent.records.objective import JudgedRequest, Objective, WriteResult
from agent.records.request import RequestRecord, Status, Vantage
from agent.store.tables import requests
from agent.store.transactions import request_write
from agent.store.writing import RequestWriter
from tests.pipeline.tables import stored, without
from tests.store.migrated import migrated_in

AT = 1_790_000_000.0
CHAT = Objective(name="chat", definition=GOODPUT, target=0.95, window_s=86400.0, ttft_s=0.2)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Engine]:
    with migrated_in(tmp_path) as engine:
        yield engine


def request(number: int, ttft_s: float = 0.1) -> RequestRecord:
    """The request of this number."""
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


class RecordingMeter(Meter):
    """A meter that records the order of its calls."""

    def __init__(self) -> None:
        super().__init__((), ())
        self.calls: list[tuple[Any, ...]] = []

    def stored(self, counted: Sequence[JudgedRequest], sent: int, new: int) -> None:
        self.calls.append(("stored", [item.record.span_id for item in counted], sent, new))

    def store_failed(self, write: StoreWrite) -> None:
        self.calls.append(("store_failed", write))


class HeldWriter(RequestWriter):
    """A writer without a thread, whose commits end when a test sets their result."""

    def __init__(self) -> None:
        self.submitted: list[Sequence[JudgedRequest]] = []
        self.result: Future[WriteResult] = Future()
        self.settled: Future[list[JudgedRequest]] = Future()
        self.settled_at: list[float] = []

    def submit(self, judged: Sequence[JudgedRequest]) -> "Future[WriteResult]":
        self.submitted.append(judged)
        return self.result

    def settle(self, now: float) -> "Future[list[JudgedRequest]]":
        self.settled_at.append(now)
        return self.settled


def test_requests_are_acknowledged_and_counted_after_their_commit() -> None:
    async def accept() -> None:
        writer, meter = HeldWriter(), RecordingMeter()
        accepting = asyncio.create_task(
            RequestPipeline(Judge([CHAT]), writer, meter).accept([request(1), request(2)])
        )
        await asyncio.sleep(0)
        (judged,) = writer.submitted
        assert (accepting.done(), meter.calls) == (False, [])
        writer.result.set_result(WriteResult([judged[1]], [judged[1]]))
        await accepting
        assert meter.calls == [("stored", [request(2).span_id], 2, 1)]

    asyncio.run(accept())


def test_requests_are_judged_before_they_are_stored() -> None:
    async def accept() -> None:
        writer = HeldWriter()
        writer.result.set_result(WriteResult([], []))
        judging = RequestPipeline(Judge([CHAT]), writer, RecordingMeter())
        await judging.accept([request(1, ttft_s=0.2), request(2, ttft_s=0.3)])
        (judged,) = writer.submitted
        assert [item.record for item in judged] == [request(1, 0.2), request(2, 0.3)]
        assert [item.judgement.verdict for item in judged] == [Verdict.MET, Verdict.MISSED]

    asyncio.run(accept())


def test_an_empty_batch_is_not_committed() -> None:
    writer, meter = HeldWriter(), RecordingMeter()
    asyncio.run(RequestPipeline(Judge([]), writer, meter).accept([]))
    assert (writer.submitted, meter.calls) == ([], [])


def test_a_failed_commit_is_raised_and_counted() -> None:
    writer, meter = HeldWriter(), RecordingMeter()
    writer.result.set_exception(StoreUnavailable("the disk is full"))
    accepting = RequestPipeline(Judge([]), writer, meter).accept([request(1)])
    with pytest.raises(StoreUnavailable, match="the disk is full"):
        asyncio.run(accepting)
    assert meter.calls == [("store_failed", "requests")]


def test_a_closed_writer_is_raised_and_counted(database: Engine) -> None:
    writer, meter = RequestWriter(request_write(database)), RecordingMeter()
    writer.close()
    with pytest.raises(StoreUnavailable, match="stopping"):
        asyncio.run(RequestPipeline(Judge([]), writer, meter).accept([request(1)]))
    assert meter.calls == [("store_failed", "requests")]


def test_requests_that_were_not_stored_can_be_sent_again_and_are_counted_once(
    database: Engine,
) -> None:
    async def accept() -> None:
        records = [request(1), request(2)]
        with without(database, "requests"), pytest.raises(StoreUnavailable):
            await accepting.accept(records)
        await accepting.accept(records)
        await accepting.accept([*records, request(3)])

    meter, writer = RecordingMeter(), RequestWriter(request_write(database))
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
