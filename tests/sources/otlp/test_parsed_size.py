"""The memory of bodies, counted before they are parsed."""

import inspect
import json
import random
from base64 import b64encode
from collections.abc import Callable

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agent.sources.otlp.limits import MAX_BODY_BYTES, MAX_PARSED_BYTES
from agent.sources.otlp.payload import fits
from tests.sources.otlp.exports import export, part, vllm_span

MIB = 1024 * 1024


def within(*fields: int) -> Callable[[bytes], bytes]:
    """What puts a content into a field of a field, the outermost first."""

    def wrap(content: bytes) -> bytes:
        for field in reversed(fields):
            content = part(field, content)
        return content

    return wrap


SPAN = (1, 2, 2)
MANY = {
    "resources": (within(), b"\x0a\x00"),
    "scopes": (within(1), b"\x12\x00"),
    "spans": (within(1, 2), b"\x12\x00"),
    "spans with a tag longer than needed": (within(1, 2), b"\x92\x80\x00\x00"),
    "attributes": (within(*SPAN), b"\x4a\x00"),
    "events": (within(*SPAN), b"\x5a\x00"),
    "links": (within(*SPAN), b"\x6a\x00"),
    "attributes of resources": (within(1, 1), b"\x0a\x00"),
    "values": (within(*SPAN, 9, 2, 5), b"\x0a\x00"),
    "keys of entities": (within(1, 1, 3), b"\x1a\x00"),
}


@pytest.mark.parametrize(("wrap", "empty"), MANY.values(), ids=MANY)
def test_many_empty_parts_do_not_fit(wrap: Callable[[bytes], bytes], empty: bytes) -> None:
    body = wrap(empty * 20_000)
    assert ExportTraceServiceRequest.FromString(body)
    assert not fits(body, MIB)
    assert fits(body, 20_000 * 168 + MIB)


def test_a_span_takes_twice_the_memory_of_another_part() -> None:
    spans, links = within(1, 2)(b"\x12\x00" * 20_000), within(*SPAN)(b"\x6a\x00" * 20_000)
    assert not fits(spans, 20_000 * 160)
    assert fits(links, 20_000 * 90)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(inspect.getsource(inspect).encode(), id="code"),
        pytest.param(json.dumps([{"id": n, "name": f"span {n}"} for n in range(999)]), id="JSON"),
        pytest.param("世界のトークン" * 99, id="no ASCII"),
        pytest.param(b64encode(random.Random(1).randbytes(99_999)), id="base64"),
        pytest.param(random.Random(2).randbytes(99_999), id="any bytes"),
    ],
)
def test_long_texts_fit(text: str | bytes) -> None:
    some = text if isinstance(text, bytes) else text.encode()
    body = within(*SPAN, 9, 2)(part(1, some * (MAX_BODY_BYTES // len(some))))
    assert fits(body, MAX_PARSED_BYTES)


def test_the_largest_body_of_real_spans_fits() -> None:
    one = export(vllm_span()).SerializeToString()
    assert fits(one * (MAX_BODY_BYTES // len(one)), MAX_PARSED_BYTES)
