"""Bodies that are stored in batches are one export: counted, refused, forwarded as a whole."""

import gzip
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from agent.errors import StoreUnavailable
from agent.records.request import RequestRecord
from agent.sources.otlp import receiver
from agent.sources.otlp.limits import MAX_BYTES_HELD
from tests.sources.otlp.exports import export, span, vllm_span
from tests.sources.otlp.serving import LoopThread, Serving, in_hand, serving
from tests.sources.otlp.transports import (
    INVALID_ARGUMENT,
    OK,
    PROTOBUF_TRANSPORTS,
    TRANSPORTS,
    UNAVAILABLE,
    Transport,
    post,
)

# More than two batches.
BATCH_SPANS = 100
SPANS = 2 * BATCH_SPANS + 10

# The way of a large body depends on its format, not on its transport.
at_each_format = pytest.mark.parametrize(
    "transport", [TRANSPORTS[2], TRANSPORTS[3], TRANSPORTS[4]], ids=lambda transport: transport.name
)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "BATCH_SPANS", BATCH_SPANS)


def short_span(**fields: Any) -> Span:
    """A span of an engine with one attribute."""
    return span({"gen_ai.request.id": "short"}, **fields)


@at_each_format
def test_all_spans_are_stored_in_batches_and_counted_once(
    loop: LoopThread, transport: Transport
) -> None:
    sizes: list[int] = []
    records: list[RequestRecord] = []

    async def accept(batch: Sequence[RequestRecord]) -> int:
        sizes.append(len(batch))
        records.extend(batch)
        return 1

    sent = [short_span() for _ in range(SPANS)]
    bad = [short_span(trace_id=b"short"), short_span(start_time_unix_nano=0)]
    request = export(bad[0], *sent, bad[1], resource={"service.name": 7})
    with loop.entered(serving(accept)) as served:
        reply = transport.send(served, request)
        (counted,) = served.counts.contents
        assert len(served.forwarded) == 1
    batches = len(sizes)
    assert batches >= 3
    assert max(sizes) <= BATCH_SPANS
    assert [record.span_id for record in records] == [span.span_id.hex() for span in sent]
    assert counted.rejected == {"id_length": 1, "span_times": 1, "unstorable": batches}
    assert counted.screened["service_name", "wrong_type"] == 1
    assert reply.rejected_spans == 2 + batches


@at_each_format
def test_a_failure_in_the_middle_is_reported_and_all_comes_again(
    loop: LoopThread, transport: Transport
) -> None:
    stored: list[str] = []
    failing = [False, True, False, False, False]

    async def accept(batch: Sequence[RequestRecord]) -> int:
        if failing and failing.pop(0):
            raise StoreUnavailable("not now")
        stored.extend(record.span_id for record in batch)
        return 0

    sent = [short_span() for _ in range(SPANS)]
    with loop.entered(serving(accept)) as served:
        assert transport.send(served, export(*sent)).code == UNAVAILABLE
        assert (served.counts.contents, served.forwarded) == ([], [])
        assert 0 < len(stored) < SPANS
        assert transport.send(served, export(*sent)).is_full_success
        with in_hand(loop, served, MAX_BYTES_HELD):
            pass
    # The batches before the failure came twice; the store knows such rows.
    assert set(stored) == {span.span_id.hex() for span in sent}


@pytest.mark.parametrize("transport", PROTOBUF_TRANSPORTS, ids=lambda transport: transport.name)
@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda body: body[:-1], id="cut"),
        # Invalid UTF-8 in a text of the last span; only a parser finds it.
        pytest.param(
            lambda body: body[::-1].replace(b"tseuqer", b"\xfeseuqer", 1)[::-1], id="text"
        ),
    ],
)
def test_nothing_is_stored_of_a_body_that_is_bad_at_its_end(
    served: Serving, transport: Transport, spoil: Callable[[bytes], bytes]
) -> None:
    body = export(*(short_span() for _ in range(SPANS))).SerializeToString()
    assert transport.send_bytes(served, spoil(body)).code == INVALID_ARGUMENT
    assert served.accepted.records == []
    assert transport.send_bytes(served, body).is_full_success


def test_a_body_that_takes_too_long_is_reported(
    served: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = gzip.compress(export(vllm_span()).SerializeToString())
    with monkeypatch.context() as changed:
        changed.setattr(receiver, "STORED_WITHIN_S", -1.0)
        reply = post(served, body, encoding="gzip")
    assert (reply.http_status, reply.retry_after_s) == (503, 1)
    assert reply.message == "the spans are not stored after -1 s; send smaller batches"
    assert post(served, body, encoding="gzip").code == OK


def test_an_agent_that_stops_stores_no_large_body(loop: LoopThread) -> None:
    body = gzip.compress(export(vllm_span()).SerializeToString())
    with loop.entered(serving()) as served:
        served.receiver.stop()
        reply = post(served, body, encoding="gzip")
        assert (reply.http_status, reply.retry_after_s) == (503, 1)
        assert "stopping" in reply.message
        # A small export costs no time, so it is still taken.
        assert post(served, export(vllm_span()).SerializeToString()).is_full_success
