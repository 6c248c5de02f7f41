"""The memory of bodies, counted before they are parsed."""

from collections.abc import Callable

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agent.sources.otlp.limits import MAX_BODY_BYTES, MAX_PARSED_BYTES
from agent.sources.otlp.parsed_size import fits
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


def test_a_part_that_is_too_deep_to_be_parsed_takes_nothing() -> None:
    body = b""
    for _ in range(20_000):
        body = part(5, part(1, body))
    assert fits(within(*SPAN, 9, 2)(body), MIB)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"\xff" * MIB, id="a number without end"),
        pytest.param(b"\x0b\x0c" * MIB, id="groups"),
        pytest.param(b"\x09" * MIB, id="fixed numbers cut off"),
        pytest.param(b"\x0f" * MIB, id="an unknown wire type"),
        pytest.param(part(1, part(2, part(2, part(5, b"\x12" * MIB)))), id="one long name"),
    ],
)
def test_what_makes_no_parts_fits_and_ends(body: bytes) -> None:
    assert fits(body, MIB)


def test_the_largest_body_of_real_spans_fits() -> None:
    one = export(vllm_span()).SerializeToString()
    assert fits(one * (MAX_BODY_BYTES // len(one)), MAX_PARSED_BYTES)
