"""OTLP over HTTP: what is asked of paths, methods, headers and bodies."""

import asyncio
import gzip
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import requests

from agent.sources.listening import AsgiServer, open_socket
from agent.sources.otlp.http import OtlpHttp
from agent.sources.otlp.limits import MAX_BODY_BYTES, MAX_BYTES_HELD
from tests.sources.otlp.exports import export, gzip_bomb, in_json, json_bytes, vllm_span
from tests.sources.otlp.serving import WITHIN_S, LoopThread, Serving, in_hand
from tests.sources.otlp.transports import (
    INVALID_ARGUMENT,
    JSON,
    PROTOBUF,
    RESOURCE_EXHAUSTED,
    post,
    read_reply,
)

GOOD = export(vllm_span())
NOT_FOUND = 5
MIB = 1024 * 1024
in_each_format = pytest.mark.parametrize("content_type", [PROTOBUF, JSON])


@pytest.mark.parametrize(
    ("content_type", "encoding"),
    [
        ("application/x-protobuf; charset=utf-8", None),
        ("Application/X-Protobuf ;charset=utf-8", "identity"),
        ("application/x-protobuf", ""),
    ],
)
def test_a_content_type_may_have_parameters_and_any_case(
    served: Serving, content_type: str, encoding: str | None
) -> None:
    body = GOOD.SerializeToString()
    assert post(served, body, content_type=content_type, encoding=encoding).is_full_success
    json_body = json_bytes(in_json(GOOD))
    json_type = content_type.lower().replace("x-protobuf", "json")
    assert post(served, json_body, content_type=json_type, encoding=encoding).is_full_success
    assert len(served.accepted.records) == 2


def test_an_answer_to_json_is_json(served: Serving) -> None:
    bad = vllm_span(trace_id=b"short")
    answer = requests.post(
        served.traces_url, json=in_json(export(vllm_span(), bad)), timeout=WITHIN_S
    )
    assert answer.headers["Content-Type"] == JSON
    assert answer.json() == {
        "partialSuccess": {"rejectedSpans": "1", "errorMessage": "refused: 1 by id_length"}
    }


@pytest.mark.parametrize("encoding", ["gzip", "GZIP"])
def test_a_gzip_body_may_have_several_members(served: Serving, encoding: str) -> None:
    body = GOOD.SerializeToString()
    parts = (body[:7], b"", body[7:100], body[100:])
    members = b"".join(map(gzip.compress, parts))
    assert post(served, members, encoding=encoding).is_full_success
    assert served.accepted.record.request_id == "chatcmpl-1"


def test_a_gzip_body_of_nothing_is_an_export_of_nothing(served: Serving) -> None:
    assert post(served, gzip.compress(b""), encoding="gzip").is_full_success
    assert post(served, b"", encoding="gzip").is_full_success


@in_each_format
@pytest.mark.parametrize("path", ["/", "/v1/traces/", "/v1/logs", "/v1/metrics", "/v1/traces/x"])
def test_other_paths_are_not_found(served: Serving, path: str, content_type: str) -> None:
    reply = post(served, GOOD.SerializeToString(), path=path, content_type=content_type)
    assert (reply.http_status, reply.code) == (404, NOT_FOUND)
    assert reply.message == "only traces are received here, at /v1/traces"
    assert reply.headers["Content-Type"] == content_type
    assert served.counts.refused_bodies == {"no_such_path": 1}


@in_each_format
@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_only_post_is_allowed(served: Serving, method: str, content_type: str) -> None:
    reply = post(served, GOOD.SerializeToString(), method=method, content_type=content_type)
    assert (reply.http_status, reply.headers["Allow"]) == (405, "POST")
    assert reply.headers["Content-Type"] == content_type
    assert served.counts.refused_bodies == {"method": 1}


@pytest.mark.parametrize(
    "content_type", [None, "", "text/plain", "application/grpc", "application/protobuf", "garbage;"]
)
def test_other_content_types_are_not_supported(served: Serving, content_type: str | None) -> None:
    reply = post(served, GOOD.SerializeToString(), content_type=content_type)
    assert (reply.http_status, reply.code) == (415, INVALID_ARGUMENT)
    assert reply.message == f"send {PROTOBUF} or {JSON}"
    assert served.counts.refused_bodies == {"content_type": 1}


@in_each_format
@pytest.mark.parametrize("encoding", ["deflate", "br", "zstd", "gzip, gzip", "none of these"])
def test_other_encodings_are_not_supported(
    served: Serving, encoding: str, content_type: str
) -> None:
    body = GOOD.SerializeToString()
    reply = post(served, body, encoding=encoding, content_type=content_type)
    assert (reply.http_status, reply.code) == (415, INVALID_ARGUMENT)
    assert reply.headers["Content-Type"] == content_type
    assert served.counts.refused_bodies == {"content_encoding": 1}


COMPRESSED = gzip.compress(GOOD.SerializeToString())


@in_each_format
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(COMPRESSED[:-1], id="cut in the trailer"),
        pytest.param(COMPRESSED[: len(COMPRESSED) // 2], id="cut in the middle"),
        pytest.param(COMPRESSED[:5], id="cut in the header"),
        pytest.param(COMPRESSED + COMPRESSED[:9], id="second member cut"),
        pytest.param(COMPRESSED + b"\0", id="garbage after it"),
        pytest.param(COMPRESSED[:-6] + b"\0\0" + COMPRESSED[-4:], id="wrong checksum"),
        pytest.param(GOOD.SerializeToString(), id="not compressed at all"),
    ],
)
def test_a_broken_gzip_body_is_bad_data(served: Serving, body: bytes, content_type: str) -> None:
    reply = post(served, body, encoding="gzip", content_type=content_type)
    assert (reply.http_status, reply.code) == (400, INVALID_ARGUMENT)
    assert "gzip" in reply.message
    assert reply.headers["Content-Type"] == content_type
    assert served.counts.refused_bodies == {"invalid": 1}
    assert served.accepted.records == []


@pytest.mark.parametrize("members", [1, 3])
def test_a_gzip_bomb_is_too_large(served: Serving, members: int) -> None:
    reply = post(served, gzip_bomb(MAX_BODY_BYTES + 3, members), encoding="gzip")
    assert (reply.http_status, reply.code) == (413, RESOURCE_EXHAUSTED)
    assert reply.retry_after_s is None
    assert served.counts.refused_bodies == {"too_large": 1}


def test_a_body_of_very_many_gzip_members_is_read_in_time(served: Serving) -> None:
    # Work that grows with the square of their number would take minutes.
    assert post(served, gzip.compress(b"") * 200_000, encoding="gzip").is_full_success


def body_of(size_bytes: int) -> bytes:
    """A good export of exactly so many bytes, with spans of up to a MiB."""
    spans = [vllm_span({"gen_ai.prompt": "x" * MIB}) for _ in range(size_bytes // MIB - 1)]
    body = export(*spans).SerializeToString()
    padded = vllm_span(name="x" * MIB)
    rest = export(padded).SerializeToString()
    padded.name = padded.name[: size_bytes - len(body) - len(rest)]
    return body + export(padded).SerializeToString()


def test_the_limit_is_4_mib(served: Serving) -> None:
    assert MAX_BODY_BYTES == 4 * 1024 * 1024
    body = body_of(MAX_BODY_BYTES)
    assert len(body) == MAX_BODY_BYTES
    assert post(served, body).is_full_success
    assert len(served.accepted.records) == 4
    reply = post(served, body + b"\0")
    assert (reply.http_status, reply.code) == (413, RESOURCE_EXHAUSTED)
    assert served.counts.refused_bodies == {"too_large": 1}


def test_a_body_may_come_in_chunks_of_unknown_number(served: Serving) -> None:
    body = GOOD.SerializeToString()
    assert post(served, (bytes([byte]) for byte in body)).is_full_success
    assert served.accepted.record.request_id == "chatcmpl-1"
    bomb = gzip_bomb(MAX_BODY_BYTES + 1)
    assert post(served, iter([bomb[:9], bomb[9:]]), encoding="gzip").http_status == 413


def test_a_connection_outlives_what_is_refused_on_it(served: Serving) -> None:
    body, large = GOOD.SerializeToString(), b"\0" * 1_000_000
    headers = {"Content-Type": PROTOBUF}
    with requests.Session() as session:
        for url in (served.traces_url + "x", served.traces_url, served.traces_url):
            answer = session.post(url, data=large, headers=headers, timeout=WITHIN_S)
            assert answer.status_code in (400, 404)
        answer = session.post(served.traces_url, data=body, headers=headers, timeout=WITHIN_S)
    assert read_reply(answer).is_full_success


@contextmanager
def half_sent(port: int, sent: bytes = b"half a body") -> Iterator[socket.socket]:
    """A connection on which a part of a larger body was sent."""
    head = (
        "POST /v1/traces HTTP/1.1\r\nHost: agent\r\n"
        f"Content-Type: {PROTOBUF}\r\nContent-Length: {len(sent) + 1}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", port), timeout=WITHIN_S) as connection:
        connection.sendall(head.encode() + sent)
        yield connection


def test_a_sender_that_leaves_in_the_middle_of_its_body_is_counted(served: Serving) -> None:
    with half_sent(served.http_port):
        pass
    served.counts.wait(lambda counts: counts.refused_bodies)
    assert served.counts.refused_bodies == {"client_gone": 1}
    assert post(served, GOOD.SerializeToString()).is_full_success


def test_a_sender_that_stalls_gives_its_room_back(loop: LoopThread, served: Serving) -> None:
    async def start() -> AsgiServer:
        listening = open_socket("otlp.http", "127.0.0.1", 0)
        server = AsgiServer(OtlpHttp(served.receiver, body_within_s=0.05), listening)
        server.start()
        return server

    server = loop.run(start())
    try:
        with half_sent(server.port) as connection:
            answer = b"".join(iter(lambda: connection.recv(65536), b"")).lower()
    finally:
        loop.run(server.stop())
    assert answer.startswith(b"http/1.1 503 ")
    assert b"\r\nretry-after: 1\r\n" in answer
    assert b"\r\nconnection: close\r\n" in answer
    assert served.counts.refused_bodies == {"too_slow": 1}
    with in_hand(loop, served, MAX_BYTES_HELD):
        pass


def test_a_sender_that_leaves_while_its_rows_are_stored_is_counted_once(
    loop: LoopThread, served: Serving
) -> None:
    served.accepted.gate = asyncio.Event()
    body = GOOD.SerializeToString()
    with half_sent(served.http_port, body[:-1]) as connection:
        connection.sendall(body[-1:])
        assert served.accepted.entered.wait(WITHIN_S)
    loop.call(served.accepted.gate.set)
    served.counts.wait(lambda counts: counts.contents)
    assert len(served.accepted.records) == len(served.counts.contents) == len(served.forwarded) == 1
    assert not served.counts.refused_bodies
