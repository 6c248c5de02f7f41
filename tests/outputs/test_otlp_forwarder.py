"""The queue of the forwarder, its pauses between tries, and its counts of lost bodies."""

import gzip
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import grpc
import pytest

from agent.outputs import otlp_forwarder
from agent.outputs.otlp_forwarder import Forwarder, OtlpBody, SendResult, destination
from tests.outputs.otlp_destinations import (
    JSON,
    WITHIN_S,
    Body,
    Destination,
    ForwardCounts,
    GrpcResponse,
    HttpResponse,
    forward,
    forwarding,
    grpc_destination,
    http_destination,
)
from tests.real_parts.ports import free_port


@pytest.mark.parametrize(
    ("body", "encoding"),
    [
        (Body(b"\x0a\x00any bytes\xff"), None),
        (Body(gzip.compress(b"x" * 100, 9), gzipped=True), "gzip"),
        (Body(b'{"resourceSpans": []}', JSON), None),
        (Body(gzip.compress(b"{}", 1), JSON, gzipped=True), "gzip"),
    ],
    ids=["protobuf", "protobuf gzip", "json", "json gzip"],
)
def test_over_http_the_same_bytes_arrive(body: Body, encoding: str | None) -> None:
    with http_destination() as to:
        counts = forward(to, body)
    (received,) = to.received
    assert (received.content, received.path) == (body.content, "/v1/traces")
    assert received.headers["Content-Type"] == body.content_type
    assert received.headers.get("Content-Encoding") == encoding
    assert (counts.sent, counts.dropped) == (1, {})


@pytest.mark.parametrize(
    ("configured", "path"), [("", "/v1/traces"), ("/", "/v1/traces"), ("/otlp/t", "/otlp/t")]
)
def test_a_url_without_a_path_gets_the_path_of_otlp(configured: str, path: str) -> None:
    with http_destination() as to:
        to.url += configured
        forward(to, Body(b"x"))
    assert to.received[0].path == path


def test_over_grpc_the_message_arrives() -> None:
    bodies = (Body(b"one"), Body(gzip.compress(b"two") + gzip.compress(b"+"), gzipped=True))
    with grpc_destination() as to:
        counts = forward(to, *bodies)
    assert to.contents == [b"one", b"two+"]
    assert (counts.sent, counts.dropped) == (2, {})


def test_json_to_grpc_is_dropped_and_later_bodies_are_sent() -> None:
    with grpc_destination() as to:
        counts = forward(to, Body(b"{}", JSON), Body(b"after"))
    assert to.contents == [b"after"]
    assert (counts.sent, counts.dropped) == (1, {"json_to_grpc": 1})


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_http_is_retried_after_the_statuses_of_otlp(status: int) -> None:
    with http_destination(HttpResponse(status), HttpResponse(status), HttpResponse(200)) as to:
        counts = forward(to, Body(b"x"), Body(b"y"))
    assert to.contents == [b"x", b"x", b"x", b"y"]
    assert (counts.sent, counts.dropped) == (2, {})


@pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 413, 415, 500, 501])
def test_http_is_not_retried_after_other_statuses(status: int) -> None:
    with http_destination(HttpResponse(status), HttpResponse(200)) as to:
        counts = forward(to, Body(b"x"), Body(b"y"))
    assert to.contents == [b"x", b"y"]
    assert (counts.sent, counts.dropped) == (1, {f"http_{status}": 1})


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed_and_the_body_is_dropped(status: int) -> None:
    with http_destination(HttpResponse(status, {"Location": "/login"}), HttpResponse(200)) as to:
        counts = forward(to, Body(b"x"))
    assert to.contents == [b"x"]
    assert (counts.sent, counts.dropped) == (0, {f"http_{status}": 1})


@pytest.mark.parametrize(
    "code",
    ["CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS"],
)
def test_grpc_is_retried_after_the_codes_of_otlp(code: str) -> None:
    again = GrpcResponse(grpc.StatusCode[code])
    with grpc_destination(again, again, GrpcResponse(grpc.StatusCode.OK)) as to:
        counts = forward(to, Body(b"x"))
    assert to.contents == [b"x"] * 3
    assert (counts.sent, counts.dropped) == (1, {})


@pytest.mark.parametrize(
    "code", ["INVALID_ARGUMENT", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED", "INTERNAL", "UNKNOWN"]
)
def test_grpc_is_not_retried_after_other_codes(code: str) -> None:
    with grpc_destination(GrpcResponse(grpc.StatusCode[code])) as to:
        counts = forward(to, Body(b"x"))
    assert to.contents == [b"x"]
    assert (counts.sent, counts.dropped) == (0, {f"grpc_{code.lower()}": 1})


def test_an_exhausted_grpc_destination_with_a_retry_delay_is_retried() -> None:
    exhausted = GrpcResponse(grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after_s=0.0)
    with grpc_destination(exhausted, GrpcResponse(grpc.StatusCode.OK)) as to:
        counts = forward(to, Body(b"x"))
    assert (len(to.received), counts.sent) == (2, 1)


def test_an_unreadable_retry_delay_is_ignored() -> None:
    garbage = GrpcResponse(grpc.StatusCode.UNAVAILABLE, details=b"\xff\xff")
    with grpc_destination(garbage, GrpcResponse(grpc.StatusCode.OK)) as to:
        counts = forward(to, Body(b"x"))
    assert (len(to.received), counts.sent) == (2, 1)


HOURS_S = 3600.0


@pytest.mark.parametrize(
    ("make", "responses"),
    [
        (http_destination, [HttpResponse(429, {"Retry-After": "0"}), HttpResponse(200)]),
        (
            grpc_destination,
            [
                GrpcResponse(grpc.StatusCode.UNAVAILABLE, retry_after_s=0.0),
                GrpcResponse(grpc.StatusCode.OK),
            ],
        ),
    ],
    ids=["http", "grpc"],
)
def test_the_retry_delay_of_a_response_replaces_our_own(
    make: Callable[..., AbstractContextManager[Destination]], responses: list[object]
) -> None:
    with make(*responses) as to:
        counts = forward(to, Body(b"x"), first_delay_s=HOURS_S)
    assert (len(to.received), counts.sent) == (2, 1)


class Scripted:
    """A destination without a connection that returns scripted results."""

    def __init__(self, *results: SendResult) -> None:
        self._results = list(results)
        self.tries: list[OtlpBody] = []
        self.closed = False

    def send(self, payload: OtlpBody) -> SendResult:
        self.tries.append(payload)
        return self._results.pop(0)

    def close(self) -> None:
        self.closed = True


class Pauses(threading.Event):
    """Records the time-out of each wait and returns at once."""

    def __init__(self) -> None:
        super().__init__()
        self.timeouts: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.timeouts.append(timeout)
        return self.is_set()


BUSY = SendResult("http_503", retry=True)


def pauses(monkeypatch: pytest.MonkeyPatch, *results: SendResult) -> list[float | None]:
    """Return the pauses of a forwarder whose first delay is one second."""
    recorded = Pauses()
    to = Scripted(*results)
    with forwarding(to, first_delay_s=1.0) as (forwarder, counts):
        monkeypatch.setattr(forwarder, "_closing", recorded)
        forwarder.forward(Body(b"x"))
        counts.wait_for(1)
    assert len(to.tries) == len(results)
    return recorded.timeouts


def test_pauses_double_and_no_pause_follows_the_last_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert pauses(monkeypatch, *[BUSY] * otlp_forwarder.MAX_TRIES) == [1, 2, 4, 8, 16]


@pytest.mark.parametrize(
    ("retry_after_s", "paused_s"),
    [(7.0, 7.0), (0.0, 0.0), (1e6, otlp_forwarder.MAX_RETRY_AFTER_S), (float("inf"), 300.0)],
)
def test_a_retry_delay_is_honoured_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch, retry_after_s: float, paused_s: float
) -> None:
    busy = SendResult("http_503", retry=True, retry_after_s=retry_after_s)
    assert pauses(monkeypatch, busy, SendResult()) == [paused_s]


@pytest.mark.parametrize(
    "header", ["Wed, 21 Oct 2026 07:28:00 GMT", "", "-1", "1.5", "soon", "\xb2", "1e3", "9" * 400]
)
def test_an_invalid_retry_delay_does_not_stop_the_forwarder(header: str) -> None:
    first = HttpResponse(400, {"Retry-After": header})
    with http_destination(first, HttpResponse(200)) as to:
        counts = forward(to, Body(b"x"), Body(b"y"))
    assert (counts.sent, counts.dropped) == (1, {"http_400": 1})


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_an_unreachable_destination_is_counted(
    monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.setattr(otlp_forwarder, "MAX_TRIES", 2)
    absent = Destination([], url=f"{scheme}://127.0.0.1:{free_port()}")
    counts = forward(absent, Body(b"x"))
    reason = {"http": "unreachable", "grpc": "grpc_unavailable"}[scheme]
    assert (counts.sent, counts.dropped) == (0, {reason: 1})


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_destination_that_never_responds_is_counted(
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
    assert (counts.sent, counts.dropped) == (0, {reason: 1})


def test_a_body_that_cannot_be_sent_does_not_stop_the_next_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with grpc_destination() as to:
        counts = forward(to, Body(b"no gzip", gzipped=True), Body(b"after"))
    assert to.contents == [b"after"]
    assert (counts.sent, counts.dropped) == (1, {"failed": 1})
    assert "could not be forwarded" in caplog.text


@contextmanager
def hanging() -> Iterator[tuple[Destination, Forwarder, ForwardCounts]]:
    """A forwarder whose destination received the first body and does not respond."""
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
        # The first body counts until the destination responds.
        assert forwarder.queued_bytes == len(b"firstsecondthird4th")
        assert counts.dropped == {"queue_full": 1}
        to.open_gate.set()
        counts.wait_for(5)
        assert to.contents == [b"first", b"second", b"third", b"4th"]
        assert (counts.sent, forwarder.queued_bytes) == (4, 0)


def test_the_queue_holds_a_limited_number_of_small_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp_forwarder, "MAX_QUEUE_BODIES", 3)
    with hanging() as (_, forwarder, counts):
        for _ in range(10):
            forwarder.forward(Body(b""))
        assert counts.dropped == {"queue_full": 8}


def test_closing_sends_the_queue() -> None:
    with http_destination() as to, forwarding(destination(to.url)) as (forwarder, counts):
        for number in range(20):
            forwarder.forward(Body(b"%d" % number))
        forwarder.close(grace_s=WITHIN_S)
        assert to.contents == [b"%d" % number for number in range(20)]
        assert (counts.sent, counts.dropped, forwarder.queued_bytes) == (20, {}, 0)


def test_closing_counts_unsent_bodies_also_the_one_in_transit() -> None:
    with hanging() as (to, forwarder, counts):
        forwarder.forward(Body(b"second"))
        forwarder.close(grace_s=0.0)
        assert (counts.sent, counts.dropped, forwarder.queued_bytes) == (0, {"stopping": 2}, 0)
        to.open_gate.set()
    assert (counts.sent, counts.dropped) == (0, {"stopping": 2})


def test_closing_ends_a_pause_and_tries_once_more() -> None:
    with http_destination(HttpResponse(503), HttpResponse(200)) as to:
        with forwarding(destination(to.url), first_delay_s=HOURS_S) as (forwarder, counts):
            forwarder.forward(Body(b"x"))
            to.wait_for(1)
            forwarder.close(grace_s=WITHIN_S)
        assert (len(to.received), counts.sent) == (2, 1)


def test_closing_tries_each_queued_body_once_at_a_busy_destination() -> None:
    with http_destination(HttpResponse(503)) as to:
        with forwarding(destination(to.url), first_delay_s=HOURS_S) as (forwarder, counts):
            for _ in range(3):
                forwarder.forward(Body(b"x"))
            to.wait_for(1)
            forwarder.close(grace_s=WITHIN_S)
        # The first body is tried twice, the others once.
        assert (len(to.received), counts.dropped) == (4, {"http_503": 3})


def test_a_body_after_closing_is_counted() -> None:
    to = Scripted()
    with forwarding(to) as (forwarder, counts):
        forwarder.close(grace_s=WITHIN_S)
        forwarder.forward(Body(b"late"))
    assert (counts.dropped, to.tries, to.closed) == ({"stopping": 1}, [], True)
