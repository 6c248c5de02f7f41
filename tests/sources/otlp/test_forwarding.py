"""The receiver in front of a forwarder: no destination can delay an answer."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from agent.outputs.otlp_forwarder import destination
from tests.outputs.otlp_destinations import (
    Destination,
    forwarding,
    grpc_destination,
    http_destination,
)
from tests.sources.otlp.doors import PROTOBUF_DOORS
from tests.sources.otlp.exports import export, vllm_span
from tests.sources.otlp.serving import LoopThread, serving

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
            assert PROTOBUF_DOORS[0].send(served, first).is_full_success
            to.wait_for(1)
            later = [export(vllm_span()) for _ in PROTOBUF_DOORS]
            for door, request in zip(PROTOBUF_DOORS, later, strict=True):
                assert door.send(served, request).is_full_success
            assert len(served.accepted.records) == 1 + len(later)
            assert (counts.sent, counts.dropped) == (0, {})
            to.open_gate.set()
            counts.wait_for(1 + len(later))
    assert counts.sent == 1 + len(later)
    assert len(to.received) == 1 + len(later)
