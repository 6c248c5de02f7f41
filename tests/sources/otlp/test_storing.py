"""From the wire to a committed row: the receiver in front of a real store."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from sqlalchemy import Engine, select, text

from agent.analysis.verdicts import Judge
from agent.catalog import metrics as m
from agent.catalog.metric import Metric
from agent.catalog.reasons import ExportRefused
from agent.outputs.prometheus.meter import Meter
from agent.pipeline.request_pipeline import RequestPipeline
from agent.records.objective import JudgedRequest, WriteResult
from agent.sources.otlp.span_reader import ExportContent
from agent.store.tables import requests as requests_table
from agent.store.transactions import request_write
from agent.store.writing import RequestWriter
from tests.sources.otlp.doors import DOORS, UNAVAILABLE, Door, post
from tests.sources.otlp.exports import export, vllm_span
from tests.sources.otlp.serving import WITHIN_S, ExportCounts, LoopThread, Serving, serving
from tests.store.migrated import migrated_in

PLAIN_DOORS = (DOORS[0], DOORS[2])
at_plain_doors = pytest.mark.parametrize("door", PLAIN_DOORS, ids=lambda door: door.name)


class MeterAndTold(ExportCounts):
    """The real meter, and a way to wait for its counts."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter = meter

    def exported(self, content: ExportContent) -> None:
        self.meter.exported(content)
        super().exported(content)

    def refused(self, reason: ExportRefused) -> None:
        self.meter.refused(reason)
        super().refused(reason)


@dataclass(frozen=True, slots=True)
class Storing:
    """A receiver, the database behind it and the counts on its page; `handed_in` is set when
    rows have come as far as the database."""

    served: Serving
    database: Engine
    meter: Meter
    handed_in: threading.Event

    def rows(self) -> list[dict[str, Any]]:
        """All stored requests."""
        with self.database.connect() as connection:
            return [dict(row) for row in connection.execute(select(requests_table)).mappings()]

    def outcomes(self) -> dict[str, float]:
        """How many spans had which outcome."""
        return {outcome: count for (outcome,), count in self.counted(m.SPANS).items()}

    def counted(self, metric: Metric) -> dict[tuple[str, ...], float]:
        """What a counter counted, by its labels."""
        counted = self.meter.snapshot().counters[metric]
        return {labels: count for labels, count in counted.items() if count}

    @contextmanager
    def busy(self) -> Iterator[None]:
        """The database held by another writer."""
        with self.database.connect().execution_options(writes=True) as connection:
            connection.execute(text("SELECT 1"))
            yield

    @contextmanager
    def away(self) -> Iterator[None]:
        """The database without the table that rows go to."""
        self._rename("requests", "elsewhere")
        try:
            yield
        finally:
            self._rename("elsewhere", "requests")

    def _rename(self, table: str, name: str) -> None:
        with self.database.begin() as connection:
            connection.execute(text(f"ALTER TABLE {table} RENAME TO {name}"))


@pytest.fixture
def storing(loop: LoopThread, tmp_path: Path) -> Iterator[Storing]:
    handed_in = threading.Event()
    with migrated_in(tmp_path) as database:
        write = request_write(database)

        def tell_and_write(judged: Sequence[JudgedRequest]) -> WriteResult:
            handed_in.set()
            return write(judged)

        meter, writer = Meter((), ()), RequestWriter(tell_and_write)
        pipeline = RequestPipeline(Judge(()), writer, meter)
        with loop.entered(serving(pipeline.accept, counts=MeterAndTold(meter))) as served:
            yield Storing(served, database, meter, handed_in)
        writer.close()


@at_plain_doors
def test_what_is_acknowledged_is_committed(storing: Storing, door: Door) -> None:
    spans = [vllm_span({"gen_ai.request.n": 4}, trace_id=b"t" * 16) for _ in range(4)]
    assert door.send(storing.served, export(*spans)).is_full_success
    assert [row["span_id"] for row in storing.rows()] == [span.span_id.hex() for span in spans]
    assert {row["request_id"] for row in storing.rows()} == {"chatcmpl-1"}
    assert storing.outcomes() == {"stored": 4}


@at_plain_doors
def test_a_span_is_stored_once_however_often_it_is_sent(storing: Storing, door: Door) -> None:
    twice = vllm_span()
    for _ in range(3):
        assert door.send(storing.served, export(twice, vllm_span(), twice)).is_full_success
    assert len(storing.rows()) == 4
    assert storing.outcomes() == {"stored": 4, "duplicate": 5}


@at_plain_doors
def test_an_answer_waits_for_the_commit(storing: Storing, door: Door) -> None:
    with ThreadPoolExecutor() as threads:
        with storing.busy():
            answer = threads.submit(door.send, storing.served, export(vllm_span()))
            assert storing.handed_in.wait(WITHIN_S)
            elsewhere = post(storing.served, b"", path="/elsewhere")
            assert elsewhere.http_status == 404
            assert not answer.done()
            assert storing.rows() == []
        assert answer.result().is_full_success
    assert len(storing.rows()) == 1


@at_plain_doors
def test_without_a_store_nothing_is_acknowledged_and_nothing_counted(
    storing: Storing, door: Door
) -> None:
    request = export(vllm_span(), vllm_span(trace_id=b"bad"))
    with storing.away():
        reply = door.send(storing.served, request)
        assert (reply.code, reply.retry_after_s) == (UNAVAILABLE, 1)
        assert storing.outcomes() == {}
        assert storing.served.forwarded == []
    assert storing.rows() == []
    assert door.send(storing.served, request).rejected_spans == 1
    assert len(storing.rows()) == 1
    assert storing.outcomes() == {"stored": 1, "rejected": 1}
    assert storing.counted(m.EXPORTS_REFUSED) == {("busy",): 1}
    assert storing.counted(m.STORE_FAILURES) == {("requests",): 1}
    assert storing.counted(m.SPANS_REJECTED) == {("id_length",): 1}


def test_rows_whose_sender_has_left_are_stored_and_counted_once(storing: Storing) -> None:
    request = export(vllm_span())
    body = request.SerializeToString()
    with storing.busy():
        with grpc.insecure_channel(f"127.0.0.1:{storing.served.grpc_port}") as channel:
            method = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
            sending = channel.unary_unary(method).future(body, timeout=WITHIN_S)
            assert storing.handed_in.wait(WITHIN_S)
            sending.cancel()
        post(storing.served, b"\xff")
    storing.served.counts.wait(lambda counts: counts.contents)
    assert len(storing.rows()) == 1
    assert storing.outcomes() == {"stored": 1}
    assert post(storing.served, body).is_full_success
    assert storing.outcomes() == {"stored": 1, "duplicate": 1}


def test_senders_at_once_are_all_stored(storing: Storing) -> None:
    doors = DOORS * 6
    spans = [vllm_span() for _ in doors]
    with ThreadPoolExecutor(8) as threads:
        replies = list(
            threads.map(lambda door, span: door.send(storing.served, export(span)), doors, spans)
        )
    assert all(reply.is_full_success for reply in replies)
    assert {row["span_id"] for row in storing.rows()} == {span.span_id.hex() for span in spans}
    assert storing.outcomes() == {"stored": len(spans)}


@pytest.mark.parametrize("age_s", [-10 * 86400.0, 10 * 86400.0])
def test_spans_of_a_wrong_clock_are_stored(storing: Storing, age_s: float) -> None:
    assert post(storing.served, export(vllm_span(age_s=age_s)).SerializeToString()).is_full_success
    (row,) = storing.rows()
    assert (row["clock_skew_s"] is None) == (age_s > 0)
    (dropped,) = storing.counted(m.VALUES_DROPPED)
    assert dropped == ("started_at", "late" if age_s > 0 else "clock_ahead")
