"""Passing bodies on in the forwarder's own time: pauses, a bounded queue, every loss counted."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import grpc
import pytest

from agent.outputs import otlp_forwarder
from agent.outputs.otlp_forwarder import Forwarder, OtlpBody, SendResult, destination
from tests.outputs.forwarding import Body, ForwardCounts, forward, forwarding
from tests.outputs.otlp_destinations import (
    WITHIN_S,
    Destination,
    GrpcAnswer,
    HttpAnswer,
    grpc_destination,
    http_destination,
)
from tests.real_parts.ports import free_port

HOURS_S = 3600.0


@pytest.mark.parametrize(
    ("make", "answers"),
    [
        (http_destination, [HttpAnswer(429, {"Retry-After": "0"}), HttpAnswer(200)]),
        (
            grpc_destination,
            [
                GrpcAnswer(grpc.StatusCode.UNAVAILABLE, retry_after_s=0.0),
                GrpcAnswer(grpc.StatusCode.OK),
            ],
        ),
    ],
    ids=["http", "grpc"],
)
def test_the_delay_that_is_asked_for_replaces_our_own(
    make: Callable[..., AbstractContextManager[Destination]], answers: list[object]
) -> None:
    with make(*answers) as to:
        counts = forward(to, Body(b"x"), first_delay_s=HOURS_S)
    assert (len(to.received), counts.taken) == (2, 1)


class Scripted:
    """A destination without a wire, for the pauses between tries."""

    def __init__(self, *outcomes: SendResult) -> None:
        self._outcomes = list(outcomes)
        self.tries: list[OtlpBody] = []
        self.closed = False

    def send(self, payload: OtlpBody) -> SendResult:
        self.tries.append(payload)
        return self._outcomes.pop(0)

    def close(self) -> None:
        self.closed = True


class Pauses(threading.Event):
    """Notes how long it is waited for, and does not wait."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.noted.append(timeout)
        return self.is_set()


BUSY = SendResult("http_503", retry=True)


def pauses(monkeypatch: pytest.MonkeyPatch, *outcomes: SendResult) -> list[float | None]:
    """The pauses of a forwarder whose first delay is a second."""
    noted = Pauses()
    to = Scripted(*outcomes)
    with forwarding(to, first_delay_s=1.0) as (forwarder, counts):
        monkeypatch.setattr(forwarder, "_closing", noted)
        forwarder.forward(Body(b"x"))
        counts.wait_for(1)
    assert len(to.tries) == len(outcomes)
    return noted.noted


def test_pauses_double_and_the_last_try_is_followed_by_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert pauses(monkeypatch, *[BUSY] * otlp_forwarder.MAX_TRIES) == [1, 2, 4, 8, 16]


@pytest.mark.parametrize(
    ("asked_s", "paused_s"),
    [(7.0, 7.0), (0.0, 0.0), (1e6, otlp_forwarder.MAX_ASKED_DELAY_S), (float("inf"), 300.0)],
)
def test_a_delay_is_honoured_within_reason(
    monkeypatch: pytest.MonkeyPatch, asked_s: float, paused_s: float
) -> None:
    asking = SendResult("http_503", retry=True, retry_after_s=asked_s)
    assert pauses(monkeypatch, asking, SendResult()) == [paused_s]


@pytest.mark.parametrize(
    "asked", ["Wed, 21 Oct 2026 07:28:00 GMT", "", "-1", "1.5", "soon", "\xb2", "1e3", "9" * 400]
)
def test_an_odd_delay_does_not_stop_the_forwarder(asked: str) -> None:
    first = HttpAnswer(400, {"Retry-After": asked})
    with http_destination(first, HttpAnswer(200)) as to:
        counts = forward(to, Body(b"x"), Body(b"y"))
    assert (counts.taken, counts.dropped) == (1, {"http_400": 1})


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_destination_that_is_not_there_is_counted(
    monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.setattr(otlp_forwarder, "MAX_TRIES", 2)
    nobody = Destination([], url=f"{scheme}://127.0.0.1:{free_port()}")
    counts = forward(nobody, Body(b"x"))
    reason = {"http": "unreachable", "grpc": "grpc_unavailable"}[scheme]
    assert (counts.taken, counts.dropped) == (0, {reason: 1})


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_destination_that_never_answers_is_counted(
    monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.setattr(otlp_forwarder, "MAX_TRIES", 1)
    monkeypatch.setattr(otlp_forwarder, "TIMEOUT_S", 0.05)
    makers: dict[str, Callable[[], AbstractContextManager[Destination]]] = {
        "http": http_destination,
        "grpc": grpc_destination,
    }
    with makers[scheme]() as to:
        to.open_gate.clear()
        counts = forward(to, Body(b"x"))
    reason = {"http": "unreachable", "grpc": "grpc_deadline_exceeded"}[scheme]
    assert (counts.taken, counts.dropped) == (0, {reason: 1})


def test_a_body_that_cannot_be_sent_does_not_stop_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with grpc_destination() as to:
        counts = forward(to, Body(b"no gzip", gzipped=True), Body(b"after"))
    assert to.contents == [b"after"]
    assert (counts.taken, counts.dropped) == (1, {"failed": 1})
    assert "could not be forwarded" in caplog.text


@contextmanager
def hanging() -> Iterator[tuple[Destination, Forwarder, ForwardCounts]]:
    """A forwarder whose destination holds its first body and does not answer."""
    with http_destination() as to:
        to.open_gate.clear()
        with forwarding(destination(to.url)) as (forwarder, counts):
            forwarder.forward(Body(b"first"))
            to.wait_for(1)
            try:
                yield to, forwarder, counts
            finally:
                to.open_gate.set()


def test_a_full_queue_drops_the_newest_and_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp_forwarder, "MAX_QUEUE_BYTES", 20)
    with hanging() as (to, forwarder, counts):
        for content in (b"second", b"third", b"ten bytes!", b"4th"):
            forwarder.forward(Body(content))
        # The first one counts for as long as the destination has not taken it.
        assert forwarder.queued_bytes == len(b"firstsecondthird4th")
        assert counts.dropped == {"queue_full": 1}
        to.open_gate.set()
        counts.wait_for(5)
        assert to.contents == [b"first", b"second", b"third", b"4th"]
        assert (counts.taken, forwarder.queued_bytes) == (4, 0)


def test_small_bodies_do_not_queue_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp_forwarder, "MAX_QUEUE_BODIES", 3)
    with hanging() as (_, forwarder, counts):
        for _ in range(10):
            forwarder.forward(Body(b""))
        assert counts.dropped == {"queue_full": 8}


def test_stopping_sends_what_waits() -> None:
    with http_destination() as to, forwarding(destination(to.url)) as (forwarder, counts):
        for number in range(20):
            forwarder.forward(Body(b"%d" % number))
        forwarder.close(grace_s=WITHIN_S)
        assert to.contents == [b"%d" % number for number in range(20)]
        assert (counts.taken, counts.dropped, forwarder.queued_bytes) == (20, {}, 0)


def test_stopping_counts_what_could_not_be_sent_also_what_is_on_its_way() -> None:
    with hanging() as (to, forwarder, counts):
        forwarder.forward(Body(b"second"))
        forwarder.close(grace_s=0.0)
        assert (counts.taken, counts.dropped, forwarder.queued_bytes) == (0, {"stopping": 2}, 0)
        to.open_gate.set()
    assert (counts.taken, counts.dropped) == (0, {"stopping": 2})


def test_stopping_does_not_sit_out_a_pause_but_tries_once_more() -> None:
    with http_destination(HttpAnswer(503), HttpAnswer(200)) as to:
        with forwarding(destination(to.url), first_delay_s=HOURS_S) as (forwarder, counts):
            forwarder.forward(Body(b"x"))
            to.wait_for(1)
            forwarder.close(grace_s=WITHIN_S)
        assert (len(to.received), counts.taken) == (2, 1)


def test_stopping_does_not_hammer_on_a_busy_destination() -> None:
    with http_destination(HttpAnswer(503)) as to:
        with forwarding(destination(to.url), first_delay_s=HOURS_S) as (forwarder, counts):
            for _ in range(3):
                forwarder.forward(Body(b"x"))
            to.wait_for(1)
            forwarder.close(grace_s=WITHIN_S)
        # The first once more, each of the others once.
        assert (len(to.received), counts.dropped) == (4, {"http_503": 3})


def test_what_comes_after_the_end_is_counted() -> None:
    to = Scripted()
    with forwarding(to) as (forwarder, counts):
        forwarder.close(grace_s=WITHIN_S)
        forwarder.forward(Body(b"late"))
    assert (counts.dropped, to.tries, to.closed) == ({"stopping": 1}, [], True)
