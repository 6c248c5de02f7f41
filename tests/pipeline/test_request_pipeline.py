"""The request pipeline: requests are labelled, judged, stored, joined, counted, acknowledged."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest
from sqlalchemy import Engine

from agent.analysis.verdicts import Judge
from agent.catalog import metrics as m
from agent.catalog.definitions import Verdict
from agent.catalog.reasons import StoreWrite
from agent.catalog.time_units import DAY_S
from agent.errors import StoreUnavailable
from agent.outputs.prometheus.meter import Meter
from agent.pipeline.request_pipeline import (
    OTHER_TENANT,
    ClientLabels,
    RequestPipeline,
    TenantLabels,
)
from agent.records.objective import JudgedRequest, Settled, WriteResult
from agent.records.request import ProxyView, RequestRecord, Status, Vantage
from agent.sources.engines.directory import EngineDirectory
from agent.store.joining import FINAL_AFTER_S
from agent.store.tables import requests
from agent.store.transactions import Joining, request_settle, request_write
from agent.store.writing import RequestWriter
from tests.pipeline.kit import stored, without
from tests.records.making import NOON, objective, record

CHAT = objective("chat", ttft_s=0.2)


class RecordingMeter(Meter):
    def __init__(self) -> None:
        super().__init__((), ())
        self.calls: list[tuple[Any, ...]] = []

    def stored(
        self,
        counted: Sequence[JudgedRequest],
        sent: int,
        new: int,
        *,
        final: Sequence[JudgedRequest] | None = None,
    ) -> None:
        assert list(final or ()) == list(counted)
        self.calls.append(("stored", [item.record.span_id for item in counted], sent, new))

    def store_failed(self, write: StoreWrite) -> None:
        self.calls.append(("store_failed", write))


class HeldWriter(RequestWriter):
    """A writer without a thread, whose commits end when a test sets their result."""

    def __init__(self) -> None:
        self.submitted: list[Sequence[JudgedRequest]] = []
        self.result: Future[WriteResult] = Future()
        self.settled: Future[Settled] = Future()
        self.settled_at: list[float] = []

    def submit(self, judged: Sequence[JudgedRequest]) -> "Future[WriteResult]":
        self.submitted.append(judged)
        return self.result

    def settle(self, now: float) -> "Future[Settled]":
        self.settled_at.append(now)
        return self.settled


def test_requests_are_acknowledged_and_counted_after_their_commit() -> None:
    async def accept() -> None:
        writer, meter = HeldWriter(), RecordingMeter()
        accepting = asyncio.create_task(
            RequestPipeline(Judge([CHAT]), writer, meter).accept([record(1), record(2)])
        )
        await asyncio.sleep(0)
        (judged,) = writer.submitted
        assert (accepting.done(), meter.calls) == (False, [])
        writer.result.set_result(WriteResult([judged[1]], [judged[1]], [judged[1]]))
        await accepting
        assert meter.calls == [("stored", [record(2).span_id], 2, 1)]

    asyncio.run(accept())


def test_records_are_completed_before_they_are_judged_and_counted_ones_are_passed_on() -> None:
    writer, counted = HeldWriter(), list[JudgedRequest]()
    judged = Judge([CHAT]).judged(record(1))
    writer.result.set_result(WriteResult([judged], [judged], [judged]))
    pipeline = RequestPipeline(
        Judge([CHAT]),
        writer,
        RecordingMeter(),
        counted.extend,
        complete=lambda record: record._replace(ttft_s=0.3),
    )
    asyncio.run(pipeline.accept([record(1)]))
    assert [item.judgement.verdict for item in writer.submitted[0]] == [Verdict.MISSED]
    assert counted == [judged]


def test_a_request_whose_own_row_was_counted_is_not_counted_again() -> None:
    writer, meter = HeldWriter(), RecordingMeter()
    judged = Judge([CHAT]).judged(record(1))
    writer.result.set_result(WriteResult([judged], [judged], [judged]))
    pipeline = RequestPipeline(
        Judge([CHAT]), writer, meter, was_counted=lambda each: each.span_id == record(1).span_id
    )
    asyncio.run(pipeline.accept([record(1)]))
    assert [call[1] for call in meter.calls] == [[]]


def test_an_empty_batch_is_not_committed() -> None:
    writer, meter = HeldWriter(), RecordingMeter()
    asyncio.run(RequestPipeline(Judge([]), writer, meter).accept([]))
    assert (writer.submitted, meter.calls) == ([], [])


def test_requests_that_were_not_stored_can_be_sent_again_and_are_counted_once(
    database: Engine,
) -> None:
    async def accept() -> None:
        records = [record(1), record(2)]
        with without(database, "requests"), pytest.raises(StoreUnavailable):
            await accepting.accept(records)
        await accepting.accept(records)
        await accepting.accept([*records, record(3)])

    meter, writer = RecordingMeter(), RequestWriter(request_write(database))
    accepting = RequestPipeline(Judge([]), writer, meter)
    asyncio.run(accept())
    writer.close()
    ids = [record(number).span_id for number in (1, 2, 3)]
    assert stored(database, requests.c.span_id) == ids
    assert meter.calls == [
        ("store_failed", "requests"),
        ("stored", ids[:2], 2, 2),
        ("stored", ids[2:], 3, 1),
    ]


WAIT_S = 10.0
DUE = NOON + 0.6 + WAIT_S
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
def meter() -> Meter:
    return Meter([CHAT], ["chat-0"])


@pytest.fixture
def pipeline(database: Engine, meter: Meter) -> Iterator[RequestPipeline]:
    judge = Judge([CHAT])
    joining = Joining(judge=judge, wait_s=WAIT_S)
    writer = RequestWriter(request_write(database, joining), request_settle(database, joining))
    yield RequestPipeline(judge, writer, meter)
    writer.close()


def spans(meter: Meter) -> dict[str, float]:
    return {result: n for (result,), n in meter.snapshot().counters[m.SPANS].items() if n}


def verdicts(meter: Meter) -> dict[str, float]:
    counted = meter.snapshot().counters[m.SLO_REQUESTS]
    return {str(verdict): n for (_, _, _, verdict), n in counted.items() if n}


def accept(pipeline: RequestPipeline, *records: RequestRecord) -> None:
    asyncio.run(pipeline.accept(records))


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


def test_a_failed_settling_is_counted_and_done_later(
    pipeline: RequestPipeline, meter: Meter, database: Engine
) -> None:
    accept(pipeline, proxy_view(1))
    with without(database, "requests"):
        pipeline.settle(DUE)
    assert verdicts(meter) == {}
    failures = meter.snapshot().counters[m.STORE_FAILURES]
    assert {write: n for (write,), n in failures.items() if n} == {"settle": 1}
    pipeline.settle(DUE + 1)
    assert verdicts(meter) == {"missed": 1}


def test_a_verdict_is_counted_when_it_is_final_and_the_request_after_its_wait(
    pipeline: RequestPipeline, meter: Meter
) -> None:
    def requests() -> float:
        return sum(meter.snapshot().counters[m.REQUESTS].values())

    accept(pipeline, engine_view(1, ttft_s=None), engine_view(2, ttft_s=None))
    pipeline.settle(DUE)
    assert (requests(), verdicts(meter)) == (2, {})
    # The user's view comes late.
    accept(pipeline, proxy_view(1))
    assert (requests(), verdicts(meter)) == (2, {"missed": 1})
    pipeline.settle(NOON + 0.6 + FINAL_AFTER_S)
    pipeline.settle(NOON + 0.6 + FINAL_AFTER_S + 1)
    assert (requests(), verdicts(meter)) == (2, {"missed": 1, "undetermined": 1})


ENGINES = (("chat-0", "http://a:8000"), ("chat-1", "http://b:8000"))


def proxied(model: str | None = "llama", tenant: str | None = None, **given: Any) -> RequestRecord:
    view: dict[str, Any] = {"vantage": Vantage.PROXY, "proxied": ProxyView()}
    return record(1, model=model, tenant=tenant, **(view | given))


@dataclass
class Labelling:
    known: Iterable[str] = ()
    places: int = 3
    replaced: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.directory = EngineDirectory(ENGINES)
        self.labels = ClientLabels(
            answered=self.directory.learn_answered,
            is_served=self.directory.is_served,
            tenants=TenantLabels(self.known, self.places),
            on_replaced=self._count,
        )

    def _count(self, label: str) -> None:
        self.replaced[label] += 1

    def model(self, name: str, **given: Any) -> str | None:
        return self.labels.labelled(proxied(name, **given)).model

    def tenant(self, name: str, **given: Any) -> str | None:
        return self.labels.labelled(proxied("llama", name, **given)).tenant


@pytest.fixture
def listing() -> Labelling:
    labelling = Labelling()
    labelling.directory.learn_served("chat-0", frozenset({"llama", "sql-adapter"}))
    labelling.directory.learn_served("chat-1", frozenset({"qwen"}))
    return labelling


# Models


def test_models_and_adapters_that_an_engine_lists_are_labels(listing: Labelling) -> None:
    sent = [proxied(name) for name in ("llama", "sql-adapter", "qwen", None)]
    assert [listing.labels.labelled(item) for item in sent] == sent
    assert listing.replaced == {}


@pytest.mark.parametrize("status", Status)
def test_any_other_name_is_unknown_and_stays_in_the_row(listing: Labelling, status: Status) -> None:
    labelled = listing.labels.labelled(proxied("lama", "acme", status=status))
    assert labelled.model is None
    assert labelled.proxied == ProxyView(
        requested_model="lama", requested_tenant="acme" if labelled.tenant != "acme" else None
    )
    assert listing.replaced["model"] == 1


def test_a_model_that_is_loaded_after_a_thousand_inventions_is_a_label(listing: Labelling) -> None:
    assert {listing.model(f"made-up-{number}") for number in range(1500)} == {None}
    assert listing.model("loaded-later") is None
    listing.directory.learn_served("chat-1", frozenset({"qwen", "loaded-later"}))
    assert listing.model("loaded-later") == "loaded-later"
    assert listing.replaced == {"model": 1501}


def test_the_model_of_an_engines_exposition_is_a_label_without_a_list() -> None:
    labelling = Labelling()
    assert labelling.model("llama", status=Status.ERROR) is None
    labelling.directory.learn_model("chat-0", "llama")
    assert labelling.model("llama", status=Status.ERROR) == "llama"


def test_an_engine_that_keeps_its_list_to_itself_shows_its_models_by_answering() -> None:
    labelling = Labelling()
    labelling.directory.learn_served("chat-1", frozenset({"qwen"}))
    typo = {"engine": "chat-0", "status": Status.INVALID}
    assert labelling.model("lama", **typo) is None
    assert labelling.model("llama", engine="chat-0") == "llama"
    assert labelling.model("llama", **typo) == "llama"
    # An engine that answers to every name cannot make labels without limit.
    names = {labelling.model(f"made-up-{number}", engine="chat-0") for number in range(1500)}
    assert len(names - {None}) == 99
    # One that lists its models is not believed more than its list.
    assert labelling.model("gpt-4", engine="chat-1") is None
    assert labelling.model("x", engine=None) is None


def test_a_span_is_left_as_it_is(listing: Labelling) -> None:
    span = record(1, model="anything", tenant="anyone")
    assert listing.labels.labelled(span) is span


# Tenants


def test_invented_tenants_share_one_label_and_known_ones_never_lose_theirs() -> None:
    labelling = Labelling(known=("acme", "late"), places=10)
    labelling.directory.learn_model("chat-0", "llama")
    assert labelling.tenant("acme") == "acme"
    seen = Counter(labelling.tenant(f"made-up-{number}") for number in range(1500))
    assert len(seen) == 11
    assert seen[OTHER_TENANT] == labelling.replaced["tenant"] == 1490
    assert (labelling.tenant("acme"), labelling.tenant("late")) == ("acme", "late")
    row = labelling.labels.labelled(proxied("llama", "one-more"))
    assert row.proxied == ProxyView(requested_tenant="one-more")


def test_an_invented_key_that_the_engine_refuses_takes_no_place() -> None:
    labelling = Labelling(places=1)
    refused = {"status": Status.INVALID, "http_status": 401}
    assert {labelling.tenant(f"key-{number}", **refused) for number in range(50)} == {OTHER_TENANT}
    assert labelling.tenant("key-real", status=Status.ERROR) == "key-real"
    assert labelling.tenant("key-real", **refused) == "key-real"


def test_a_tenant_that_was_not_seen_for_a_day_gives_up_its_place() -> None:
    places = TenantLabels((), 2)
    assert places.may_be_label("a", NOON, may_take=True)
    assert places.may_be_label("b", NOON, may_take=True)
    assert places.may_be_label("a", NOON + DAY_S - 1, may_take=True)
    assert not places.may_be_label("c", NOON + DAY_S - 1, may_take=True)
    assert places.may_be_label("c", NOON + DAY_S, may_take=True)
    assert not places.may_be_label("b", NOON + DAY_S, may_take=True)
    assert places.may_be_label("a", NOON + DAY_S, may_take=False)


def test_without_places_only_known_tenants_are_labels() -> None:
    places = TenantLabels(("acme",), 0)
    assert places.may_be_label("acme", NOON, may_take=True)
    assert not places.may_be_label("other-inc", NOON, may_take=True)
