"""The queue of the forwarder, its pauses between tries, and its counts of lost bodies."""

import gzip
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

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


Make = Callable[..., AbstractContextManager[Destination]]
MAKERS: dict[str, Make] = {"http": http_destination, "grpc": grpc_destination}
HOURS_S = 3600.0


def test_over_grpc_the_message_arrives_and_what_it_cannot_be_is_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    two = Body(gzip.compress(b"two") + gzip.compress(b"+"), gzipped=True)
    bodies = (Body(b"one"), Body(b"{}", JSON), two, Body(b"no gzip", gzipped=True), Body(b"three"))
    with grpc_destination() as to:
        counts = forward(to, *bodies)
    assert to.contents == [b"one", b"two+", b"three"]
    assert (counts.sent, counts.dropped) == (3, {"json_to_grpc": 1, "failed": 1})
    assert "could not be forwarded" in caplog.text


def _http(status: int, **headers: str) -> HttpResponse:
    return HttpResponse(status, {name.replace("_", "-"): text for name, text in headers.items()})


def _grpc(code: str, **given: Any) -> GrpcResponse:
    return GrpcResponse(grpc.StatusCode[code], **given)


@pytest.mark.parametrize(
    "again",
    [
        *(_http(status) for status in (429, 502, 503, 504)),
        *(
            _grpc(code)
            for code in ("CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "DATA_LOSS")
        ),
        _grpc("UNAVAILABLE"),
        # With a delay it will have room again; one that is unreadable is ignored.
        _grpc("RESOURCE_EXHAUSTED", retry_after_s=0.0),
        _grpc("UNAVAILABLE", details=b"\xff\xff"),
    ],
    ids=str,
)
def test_a_body_is_sent_again_after_the_responses_of_otlp(
    again: HttpResponse | GrpcResponse,
) -> None:
    in_the_end = _http(200) if isinstance(again, HttpResponse) else _grpc("OK")
    make = MAKERS["http" if isinstance(again, HttpResponse) else "grpc"]
    with make(again, again, in_the_end) as to:
        counts = forward(to, Body(b"x"), Body(b"y"))
    assert to.contents == [b"x", b"x", b"x", b"y"]
    assert (counts.sent, counts.dropped) == (2, {})


@pytest.mark.parametrize(
    ("final", "reason"),
    [
        *((_http(status), f"http_{status}") for status in (400, 401, 404, 408, 413, 500, 501)),
        # A redirect is not followed.
        *((_http(status, Location="/login"), f"http_{status}") for status in (301, 303, 307)),
        *(
            (_grpc(code), f"grpc_{code.lower()}")
            for code in ("INVALID_ARGUMENT", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED", "INTERNAL")
        ),
        *(
            (_http(400, Retry_After=header), "http_400")
            for header in ("Wed, 21 Oct 2026 07:28:00 GMT", "", "-1", "1.5", "\xb2", "9" * 400)
        ),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_body_is_dropped_after_other_responses_and_the_next_one_is_sent(
    final: HttpResponse | GrpcResponse, reason: str
) -> None:
    in_the_end = _http(200) if isinstance(final, HttpResponse) else _grpc("OK")
    make = MAKERS["http" if isinstance(final, HttpResponse) else "grpc"]
    with make(final, in_the_end) as to:
        counts = forward(to, Body(b"x"), Body(b"y"))
    assert to.contents == [b"x", b"y"]
    assert (counts.sent, counts.dropped) == (1, {reason: 1})


@pytest.mark.parametrize(
    ("scheme", "responses"),
    [
        ("http", [_http(429, Retry_After="0"), _http(200)]),
        ("grpc", [_grpc("UNAVAILABLE", retry_after_s=0.0), _grpc("OK")]),
    ],
)
def test_the_retry_delay_of_a_response_replaces_our_own(
    scheme: str, responses: list[object]
) -> None:
    with MAKERS[scheme](*responses) as to:
        counts = forward(to, Body(b"x"), first_delay_s=HOURS_S)
    assert (len(to.received), counts.sent) == (2, 1)


@pytest.mark.parametrize(
    ("scheme", "absent", "silent"),
    [
        ("http", "unreachable", "unreachable"),
        ("grpc", "grpc_unavailable", "grpc_deadline_exceeded"),
    ],
)
def test_a_destination_that_is_absent_or_never_responds_is_counted(
    monkeypatch: pytest.MonkeyPatch, scheme: str, absent: str, silent: str
) -> None:
    monkeypatch.setattr(otlp_forwarder, "MAX_TRIES", 1)
    nowhere = Destination([], url=f"{scheme}://127.0.0.1:{free_port()}")
    counts = forward(nowhere, Body(b"x"))
    assert (counts.sent, counts.dropped) == (0, {absent: 1})
    monkeypatch.setattr(otlp_forwarder, "TIMEOUT_S", 0.05)
    with MAKERS[scheme]() as to:
        to.open_gate.clear()
        counts = forward(to, Body(b"x"))
    assert (counts.sent, counts.dropped) == (0, {silent: 1})


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


@contextmanager
def hanging() -> Iterator[tuple[Destination, Forwarder, ForwardCounts]]:
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


def test_closing_ends_a_pause_and_tries_each_queued_body_once_more() -> None:
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
