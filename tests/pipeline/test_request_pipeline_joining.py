"""Joining in the request pipeline: views are acknowledged at once, a request is counted once."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text

from agent.analysis.verdicts import Judge
from agent.catalog import metrics as m
from agent.outputs.prometheus.meter import Meter
from agent.pipeline.request_pipeline import RequestPipeline
from agent.records.request import ProxyView, RequestRecord, Vantage
from agent.store.transactions import Joining, request_settle, request_write
from agent.store.writing import RequestWriter
from tests.records.making import NOON, objective, record
from tests.store.migrated import migrated_in

WAIT_S = 10.0
DUE = NOON + 0.6 + WAIT_S
CHAT = objective("chat", ttft_s=0.2)
PROXY_SPAN = "a" * 16


def proxy_view(number: int) -> RequestRecord:
    """The proxy's view of the request of this number; its TTFT misses the objective."""
    return record(
        number, span_id=PROXY_SPAN, vantage=Vantage.PROXY, ttft_s=0.3, proxied=ProxyView()
    )


def engine_view(number: int, **values: Any) -> RequestRecord:
    """The engine's view of that request; its TTFT meets the objective."""
    return record(number, **({"parent_span_id": PROXY_SPAN} | values))


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Engine]:
    with migrated_in(tmp_path) as engine:
        yield engine


@pytest.fixture
def meter() -> Meter:
    return Meter([CHAT], ["chat-0"])


@pytest.fixture
def pipeline(database: Engine, meter: Meter) -> Iterator[RequestPipeline]:
    judge = Judge([CHAT])
    joining = Joining(agent="agent-0", judge=judge, wait_s=WAIT_S)
    writer = RequestWriter(request_write(database, joining), request_settle(database, joining))
    yield RequestPipeline(judge, writer, meter)
    writer.close()


def spans(meter: Meter) -> dict[str, float]:
    """Spans by result, without results of zero spans."""
    return {result: n for (result,), n in meter.snapshot().counters[m.SPANS].items() if n}


def verdicts(meter: Meter) -> dict[str, float]:
    """Requests by the objective's verdict, without verdicts of zero requests."""
    counted = meter.snapshot().counters[m.SLO_REQUESTS]
    return {str(verdict): n for (_, _, _, verdict), n in counted.items() if n}


def accept(pipeline: RequestPipeline, *records: RequestRecord) -> None:
    """Submit these records and wait until they are acknowledged."""
    asyncio.run(pipeline.accept(records))


ORDERS: dict[str, list[list[RequestRecord]]] = {
    "proxy first": [[proxy_view(1)], [engine_view(1)]],
    "engine first": [[engine_view(1)], [proxy_view(1)]],
    "together": [[proxy_view(1), engine_view(1)]],
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_a_request_of_two_views_is_counted_once_with_the_proxys_verdict(
    pipeline: RequestPipeline, meter: Meter, order: list[list[RequestRecord]]
) -> None:
    for batch in order:
        assert verdicts(meter) == {}
        accept(pipeline, *batch)
    assert verdicts(meter) == {"missed": 1}
    for batch in order:
        accept(pipeline, *batch)
    pipeline.settle(DUE)
    assert verdicts(meter) == {"missed": 1}
    assert spans(meter) == {"stored": 1, "duplicate": 1}


def test_a_single_view_is_counted_after_the_wait(pipeline: RequestPipeline, meter: Meter) -> None:
    accept(pipeline, proxy_view(1), engine_view(2), engine_view(3, parent_span_id=None))
    assert verdicts(meter) == {"met": 1}
    assert spans(meter) == {"stored": 2}
    pipeline.settle(DUE - 1)
    assert verdicts(meter) == {"met": 1}
    pipeline.settle(DUE)
    assert verdicts(meter) == {"met": 2, "missed": 1}
    pipeline.settle(DUE + 1)
    assert verdicts(meter) == {"met": 2, "missed": 1}
    assert spans(meter) == {"stored": 2}


def test_spans_of_several_choices_are_counted_as_one_request(
    pipeline: RequestPipeline, meter: Meter
) -> None:
    choices = [engine_view(1, span_id=f"{child:016x}") for child in range(3)]
    accept(pipeline, *choices[:2])
    accept(pipeline, proxy_view(1), choices[2])
    pipeline.settle(DUE)
    assert verdicts(meter) == {"missed": 1}
    assert spans(meter) == {"stored": 3}


def without_requests_table(database: Engine) -> Callable[[], None]:
    """Rename the table of requests; the result is a function that renames it back."""

    def rename(name: str, other: str) -> None:
        with database.begin() as connection:
            connection.execute(text(f"ALTER TABLE {name} RENAME TO {other}"))

    rename("requests", "elsewhere")
    return lambda: rename("elsewhere", "requests")


def test_a_failed_settling_is_counted_and_done_later(
    pipeline: RequestPipeline, meter: Meter, database: Engine
) -> None:
    accept(pipeline, proxy_view(1))
    bring_back = without_requests_table(database)
    pipeline.settle(DUE)
    bring_back()
    assert verdicts(meter) == {}
    failures = meter.snapshot().counters[m.STORE_FAILURES]
    assert {write: n for (write,), n in failures.items() if n} == {"settle": 1}
    pipeline.settle(DUE + 1)
    assert verdicts(meter) == {"missed": 1}
