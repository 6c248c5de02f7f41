"""How many senders share one receiver: room, threads and the end."""

import asyncio
import gzip
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import pytest

from agent.errors import StoreUnavailable
from agent.outputs.otlp_forwarder import destination
from agent.records.engine import EngineIdentity
from agent.records.request import RequestRecord
from agent.sources.otlp.limits import MAX_BYTES_HELD, RECORD_BYTES, SMALL_PROTOBUF_BYTES
from tests.outputs.otlp_destinations import (
    Destination,
    forwarding,
    grpc_destination,
    http_destination,
)
from tests.sources.otlp.exports import export, vllm_span
from tests.sources.otlp.serving import WITHIN_S, LoopThread, Serving, in_hand, serving
from tests.sources.otlp.transports import (
    OK,
    PROTOBUF_TRANSPORTS,
    RESOURCE_EXHAUSTED,
    TRANSPORTS,
    UNAVAILABLE,
    Transport,
    post,
)

GOOD = export(vllm_span())
at_every_transport = pytest.mark.parametrize(
    "transport", TRANSPORTS, ids=lambda transport: transport.name
)


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
    ("name", "send"),
    [
        ("large", lambda served: post(served, LARGE.SerializeToString())),
        ("gzip", lambda to: post(to, gzip.compress(SLOW.SerializeToString()), encoding="gzip")),
        ("json", lambda served: TRANSPORTS[4].send(served, SLOW)),
    ],
)
def test_what_takes_long_to_read_delays_nobody_else(
    loop: LoopThread, name: str, send: Callable[[Serving], object]
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


DESTINATIONS = pytest.mark.parametrize(
    "make", [http_destination, grpc_destination], ids=["http", "grpc"]
)
Make = Callable[[], AbstractContextManager[Destination]]


@DESTINATIONS
def test_a_destination_that_hangs_delays_no_answer(loop: LoopThread, make: Make) -> None:
    with make() as to, forwarding(destination(to.url)) as (forwarder, counts):
        to.open_gate.clear()
        with loop.entered(serving(forward=forwarder.forward)) as served:
            first = export(vllm_span())
            assert PROTOBUF_TRANSPORTS[0].send(served, first).is_full_success
            to.wait_for(1)
            later = [export(vllm_span()) for _ in PROTOBUF_TRANSPORTS]
            for transport, request in zip(PROTOBUF_TRANSPORTS, later, strict=True):
                assert transport.send(served, request).is_full_success
            assert len(served.accepted.records) == 1 + len(later)
            assert (counts.sent, counts.dropped) == (0, {})
            to.open_gate.set()
            counts.wait_for(1 + len(later))
    assert counts.sent == 1 + len(later)
    assert len(to.received) == 1 + len(later)
