"""Requests that reach a destination, and the responses after which the forwarder retries."""

import gzip

import grpc
import pytest

from tests.outputs.forwarding import JSON, Body, forward
from tests.outputs.otlp_destinations import (
    GrpcResponse,
    HttpResponse,
    grpc_destination,
    http_destination,
)


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
