"""How many senders share one receiver: room, threads and the end."""

import asyncio
import gzip
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from types import SimpleNamespace

import psutil
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from agent.errors import StoreUnavailable
from agent.records.engine import EngineIdentity
from agent.records.request import RequestRecord
from agent.sources.otlp import receiver
from agent.sources.otlp.limits import (
    KEPT_FOR_SMALL_BYTES,
    MAX_BODY_BYTES,
    MAX_BYTES_HELD,
    MIB,
    RECORD_BYTES,
    SMALL_BYTES,
    SMALL_PROTOBUF_BYTES,
    MemoryBudget,
    NoRoom,
)
from agent.sources.otlp.span_reader import SpanReader
from tests.real_parts.waiting import eventually
from tests.sources.otlp.exports import export, gzip_bomb, span, vllm_span
from tests.sources.otlp.serving import (
    UNSTORABLE,
    WITHIN_S,
    LoopThread,
    Serving,
    by_service_name,
    in_hand,
    serving,
)
from tests.sources.otlp.transports import (
    INVALID_ARGUMENT,
    OK,
    PROTOBUF_TRANSPORTS,
    RESOURCE_EXHAUSTED,
    TRANSPORTS,
    UNAVAILABLE,
    Transport,
    Wire,
    at_every_transport,
    at_protobuf_transports,
    post,
)

GOOD = export(vllm_span())


@at_every_transport
def test_too_much_in_hand_is_reported_and_room_is_given_back(
    loop: LoopThread, served: Serving, transport: Transport
) -> None:
    with in_hand(loop, served, MAX_BYTES_HELD - 10):
        reply = transport.send(served, GOOD)
        assert (reply.code, reply.retry_after_s) == (RESOURCE_EXHAUSTED, 1)
        assert reply.http_status in (None, 503)
        assert reply.message.endswith("bytes of spans are being stored; send again in a moment")
        assert transport.send(served, export()).code == RESOURCE_EXHAUSTED
    assert served.counts.refused_bodies == {"no_room": 2}
    assert transport.send(served, GOOD).is_full_success


class Senders:
    """The precedence of senders: how many are inside, and how many were."""

    def __init__(self) -> None:
        self.inside = self.entered = 0

    def __enter__(self) -> None:
        self.inside += 1
        self.entered += 1

    def __exit__(self, *_: object) -> None:
        self.inside -= 1


@at_every_transport
def test_a_sender_has_precedence_until_its_export_is_stored_or_refused(
    loop: LoopThread, transport: Transport
) -> None:
    senders, inside = Senders(), list[int]()

    async def accept(_records: Sequence[RequestRecord]) -> int:
        inside.append(senders.inside)
        if len(inside) == 2:
            raise StoreUnavailable("not now")
        return 0

    with loop.entered(serving(accept, precedence=senders)) as served:
        codes = [transport.send(served, GOOD).code for _ in range(2)]
        assert codes == [OK, UNAVAILABLE]
        assert not transport.send_bytes(served, b"\xff" * 1000).is_full_success
    assert (inside, senders.inside) == ([1, 1], 0)


def test_a_long_body_that_finds_no_room_gives_back_what_it_had(
    loop: LoopThread, served: Serving
) -> None:
    chunk = bytes(100_000)
    with in_hand(loop, served, MAX_BYTES_HELD - 5 * len(chunk)):
        for _ in range(3):
            reply = post(served, iter([chunk] * 10))
            assert (reply.http_status, reply.retry_after_s) == (503, 1)
        assert post(served, GOOD.SerializeToString()).is_full_success
    with in_hand(loop, served, MAX_BYTES_HELD):
        pass


def test_a_large_export_holds_its_bytes_and_records_until_it_is_stored(
    loop: LoopThread, served: Serving
) -> None:
    served.accepted.gate = asyncio.Event()
    plain = GOOD.SerializeToString()
    body = gzip.compress(plain)
    with ThreadPoolExecutor() as threads:
        sending = threads.submit(post, served, body, encoding="gzip")
        assert served.accepted.entered.wait(WITHIN_S)
        held_bytes = served.receiver.fill * MAX_BYTES_HELD
        loop.call(served.accepted.gate.set)
        assert sending.result().is_full_success
    assert held_bytes == len(body) + len(plain) + RECORD_BYTES


LARGE = export(vllm_span({"gen_ai.prompt": "x" * SMALL_PROTOBUF_BYTES}), resource={"slow": True})
SLOW = export(vllm_span(), resource={"slow": True})


@pytest.mark.parametrize(
    "send",
    [
        lambda served: post(served, LARGE.SerializeToString()),
        lambda to: post(to, gzip.compress(SLOW.SerializeToString()), encoding="gzip"),
        lambda served: TRANSPORTS[4].send(served, SLOW),
    ],
    ids=["large", "gzip", "json"],
)
def test_what_takes_long_to_read_delays_nobody_else(
    loop: LoopThread, send: Callable[[Serving], object]
) -> None:
    reading, go_on = threading.Event(), threading.Event()

    def identify(attributes: Mapping[str, object]) -> EngineIdentity:
        if "slow" in attributes:
            reading.set()
            assert go_on.wait(WITHIN_S)
        return EngineIdentity(engine=None, model=None)

    with loop.entered(serving(identify=identify)) as served, ThreadPoolExecutor() as threads:
        slow = threads.submit(send, served)
        assert reading.wait(WITHIN_S)
        try:
            for transport in TRANSPORTS[0], TRANSPORTS[2]:
                assert transport.send(served, GOOD).is_full_success
            assert not slow.done()
        finally:
            go_on.set()
        slow.result()
    assert len(served.accepted.records) == 3


def test_closing_waits_for_what_is_being_stored(loop: LoopThread) -> None:
    with loop.entered(serving()) as served, ThreadPoolExecutor() as threads:
        served.accepted.gate = asyncio.Event()
        sending = threads.submit(post, served, GOOD.SerializeToString())
        assert served.accepted.entered.wait(WITHIN_S)
        closing = threads.submit(loop.run, served.receiver.close())
        loop.run(asyncio.sleep(0))
        assert not closing.done()
        loop.call(served.accepted.gate.set)
        closing.result()
        assert sending.result().is_full_success
    assert len(served.accepted.records) == len(served.counts.contents) == 1


@at_every_transport
def test_spans_that_can_never_be_stored_are_refused_and_the_others_acknowledged(
    served: Serving, transport: Transport
) -> None:
    served.accepted.unstorable = 1
    reply = transport.send(served, export(vllm_span(), vllm_span(span_id=b"another1")))
    assert (reply.rejected_spans, reply.message) == (1, "refused: 1 by unstorable")


def test_memory_is_held_until_there_is_no_more_and_given_back() -> None:
    budget = MemoryBudget(10 * MIB, 2 * MIB)
    with budget.reserve() as first:
        first.add(5 * MIB)
        first.add(3 * MIB)
        with budget.reserve() as second, pytest.raises(NoRoom, match="8388608 bytes of spans"):
            second.add(2 * MIB)
        assert budget.fill == 0.8
    assert budget.fill == 0


def test_large_exports_leave_memory_for_eight_small_ones() -> None:
    budget = MemoryBudget()
    with ExitStack() as stack:
        with suppress(NoRoom):
            while True:
                stack.enter_context(budget.reserve()).add(2 * MIB)
        for _ in range(8):
            stack.enter_context(budget.reserve()).add(SMALL_BYTES)
        with budget.reserve() as late, pytest.raises(NoRoom):
            late.add(1)


def test_the_records_of_an_export_take_what_the_budget_counts() -> None:
    request = export(*(span({}) for _ in range(1000)))
    tracemalloc.start()
    try:
        read = SpanReader(by_service_name, "tester").read(request, time.time())
        taken_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken_bytes / len(read.records) == pytest.approx(RECORD_BYTES, rel=0.1)


def test_the_most_spans_of_one_body_have_memory() -> None:
    # Two ids and two times, with their tags.
    most_spans = MAX_BODY_BYTES // (2 + 18 + 10 + 9 + 9)
    needed_bytes = 2 * MAX_BODY_BYTES + most_spans * RECORD_BYTES
    assert needed_bytes <= MAX_BYTES_HELD - KEPT_FOR_SMALL_BYTES


BOMB = gzip_bomb(4 * MIB + 1)
LONG_TEXTS = {"gen_ai.request.id": "x" * MIB, "gen_ai.prompt": "y" * MIB}
LONG = export(vllm_span(LONG_TEXTS), resource={"service.name": "z" * MIB})
UNSTORABLE_LONG = export(vllm_span({**LONG_TEXTS, "gen_ai.request.id": UNSTORABLE}))


def hostile_round(alone: Wire) -> None:
    """Bodies of which each takes megabytes, refused and taken."""
    assert post(alone, BOMB, encoding="gzip").http_status == 413
    for transport in PROTOBUF_TRANSPORTS:
        assert transport.send(alone, LONG).is_full_success
        assert transport.send(alone, UNSTORABLE_LONG).code == UNAVAILABLE
        assert transport.send_bytes(alone, transport.encode(LONG)[:-1]).code == INVALID_ARGUMENT


@pytest.mark.slow
def test_hostile_bodies_leave_nothing_behind() -> None:
    command = [sys.executable, "-m", "tests.sources.otlp.serving"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as started:
        assert started.stdout is not None
        grpc_port, http_port = map(int, started.stdout.readline().split())
        alone = SimpleNamespace(grpc_port=grpc_port, http_port=http_port)
        memory = psutil.Process(started.pid).memory_info
        for _ in range(2):
            hostile_round(alone)
        early_bytes = memory().rss
        for _ in range(5):
            hostile_round(alone)
        # The bombs that stay would be 20 MiB, the refused texts of one transport 16 MiB. What the
        # last body took may be given back a moment after its reply.
        limit_bytes = early_bytes + 12 * MIB
        eventually(lambda: memory().rss < limit_bytes, within_s=WITHIN_S, what="its memory")
        # It ends when its standard input does.
        started.communicate()


BATCH_SPANS = 100
SPANS = 2 * BATCH_SPANS + 10

# The way of a large body depends on its format, not on its transport.
at_each_format = pytest.mark.parametrize(
    "transport", [TRANSPORTS[2], TRANSPORTS[3], TRANSPORTS[4]], ids=lambda transport: transport.name
)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "BATCH_SPANS", BATCH_SPANS)


def short_spans() -> list[Span]:
    """Spans of an engine with one attribute each, for more than two batches."""
    return [span({"gen_ai.request.id": "short"}) for _ in range(SPANS)]


@at_each_format
def test_all_spans_are_stored_in_batches_and_counted_once(
    served: Serving, transport: Transport
) -> None:
    served.accepted.unstorable = 1
    sent, bad = short_spans(), [vllm_span(trace_id=b"short"), vllm_span(start_time_unix_nano=0)]
    reply = transport.send(served, export(bad[0], *sent, bad[1], resource={"service.name": 7}))
    (counted,) = served.counts.contents
    batches = len(served.accepted.batches)
    assert batches >= 3
    assert max(served.accepted.batches) <= BATCH_SPANS
    stored = [record.span_id for record in served.accepted.records]
    assert stored == [span.span_id.hex() for span in sent]
    assert counted.rejected == {"id_length": 1, "span_times": 1, "unstorable": batches}
    assert counted.screened["service_name", "wrong_type"] == 1
    assert reply.rejected_spans == 2 + batches
    assert len(served.forwarded) == 1


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

    sent = short_spans()
    with loop.entered(serving(accept)) as served:
        assert transport.send(served, export(*sent)).code == UNAVAILABLE
        assert (served.counts.contents, served.forwarded) == ([], [])
        assert 0 < len(stored) < SPANS
        assert transport.send(served, export(*sent)).is_full_success
        with in_hand(loop, served, MAX_BYTES_HELD):
            pass
    # The batches before the failure came twice; the store knows such rows.
    assert set(stored) == {span.span_id.hex() for span in sent}


@at_protobuf_transports
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
    body = export(*short_spans()).SerializeToString()
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
