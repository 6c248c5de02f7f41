"""From the wire to a committed row: the receiver in front of a real store and the real meter."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select, text

from agent.analysis.verdicts import Judge
from agent.catalog import metrics as m
from agent.catalog.metric import Metric
from agent.outputs.prometheus.meter import Meter
from agent.pipeline.request_pipeline import RequestPipeline
from agent.store.tables import requests as requests_table
from agent.store.transactions import request_write
from agent.store.writing import RequestWriter
from tests.sources.otlp.doors import DOORS, UNAVAILABLE, Door
from tests.sources.otlp.exports import export, vllm_span
from tests.sources.otlp.serving import LoopThread, Serving, serving
from tests.store.migrated import migrated_in

at_plain_doors = pytest.mark.parametrize(
    "door", [DOORS[0], DOORS[2]], ids=lambda door: str(door.name)
)


@dataclass(frozen=True, slots=True)
class Storing:
    """A receiver, the database behind it and the counts on its page."""

    served: Serving
    database: Engine
    meter: Meter

    def rows(self) -> list[dict[str, Any]]:
        """All stored requests."""
        with self.database.connect() as connection:
            return [dict(row) for row in connection.execute(select(requests_table)).mappings()]

    def counted(self, metric: Metric) -> dict[tuple[str, ...], float]:
        """What a counter counted, by its labels."""
        counted = self.meter.snapshot().counters[metric]
        return {labels: count for labels, count in counted.items() if count}

    @contextmanager
    def without_table(self) -> Iterator[None]:
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
    with migrated_in(tmp_path) as database:
        meter, writer = Meter((), ()), RequestWriter(request_write(database))
        pipeline = RequestPipeline(Judge(()), writer, meter)
        with loop.entered(serving(pipeline.accept, counter=meter)) as served:
            yield Storing(served, database, meter)
        writer.close()


@at_plain_doors
def test_what_is_acknowledged_is_committed_once_and_counted(storing: Storing, door: Door) -> None:
    spans = [vllm_span({"gen_ai.request.n": 4}, trace_id=b"t" * 16) for _ in range(4)]
    for _ in range(2):
        assert door.send(storing.served, export(*spans)).is_full_success
        assert [row["span_id"] for row in storing.rows()] == [span.span_id.hex() for span in spans]
    assert {row["request_id"] for row in storing.rows()} == {"chatcmpl-1"}
    assert storing.counted(m.SPANS) == {("stored",): 4, ("duplicate",): 4}


@at_plain_doors
def test_without_a_store_nothing_is_acknowledged_and_nothing_counted(
    storing: Storing, door: Door
) -> None:
    request = export(vllm_span(), vllm_span(trace_id=b"bad"))
    with storing.without_table():
        reply = door.send(storing.served, request)
        assert (reply.code, reply.retry_after_s) == (UNAVAILABLE, 1)
        assert storing.counted(m.SPANS) == {}
        assert storing.served.forwarded == []
    assert door.send(storing.served, request).rejected_spans == 1
    assert len(storing.rows()) == 1
    assert storing.counted(m.SPANS) == {("stored",): 1, ("rejected",): 1}
    assert storing.counted(m.EXPORTS_REFUSED) == {("busy",): 1}
    assert storing.counted(m.STORE_FAILURES) == {("requests",): 1}
    assert storing.counted(m.SPANS_REJECTED) == {("id_length",): 1}
