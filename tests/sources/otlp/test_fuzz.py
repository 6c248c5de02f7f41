"""Whatever is sent, the receiver answers as OTLP asks, and goes on."""

import copy
import functools
import gzip
import json
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from sqlalchemy import BigInteger, Column, DateTime, String

from agent.catalog.spans import REQUEST_ATTRIBUTES
from agent.store.tables import requests as requests_table
from tests.sources.otlp.exports import any_value, export, in_json, pairs, span, vllm_span
from tests.sources.otlp.serving import Serving
from tests.sources.otlp.transports import (
    INVALID_ARGUMENT,
    JSON,
    OK,
    PROTOBUF,
    RESOURCE_EXHAUSTED,
    Reply,
    call,
    post,
)

# The same examples each time: a test that fails must fail again.
fuzz = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

GOOD = export(vllm_span(), vllm_span()).SerializeToString()
GOOD_JSON = in_json(export(vllm_span(), vllm_span()))

ANSWERS = {OK, INVALID_ARGUMENT, RESOURCE_EXHAUSTED}


def check(served: Serving, reply: Reply) -> None:
    """The answer is one of those that OTLP knows for bad data, and the next export is taken."""
    assert reply.code in ANSWERS, reply
    assert reply.http_status in (None, 200, 400, 413), reply
    served.forget()
    assert post(served, GOOD).is_full_success
    assert len(served.accepted.records) == 2


@st.composite
def spoiled(draw: st.DrawFn, good: bytes) -> bytes:
    """A good body with bytes changed, left out and put in."""
    body = bytearray(good)
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(body)))
        length = draw(st.integers(0, 4))
        body[at : at + length] = draw(st.binary(max_size=6))
    return bytes(body)


SENT: Mapping[str, tuple[bytes, Callable[[Serving, bytes], Reply]]] = {
    "http": (GOOD, post),
    "grpc": (GOOD, call),
    "gzip": (gzip.compress(GOOD), functools.partial(post, encoding="gzip")),
    "json": (json.dumps(GOOD_JSON).encode(), functools.partial(post, content_type=JSON)),
}


@pytest.mark.parametrize("name", SENT)
@fuzz
@given(data=st.data())
def test_any_bytes(served: Serving, name: str, data: st.DataObject) -> None:
    good, send = SENT[name]
    check(served, send(served, data.draw(st.binary(max_size=300) | spoiled(good))))


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(st.characters() | st.characters(categories=["Cs"]), max_size=8)
    | st.sampled_from(["0" * 32, "NaN", "-Infinity", "1e400"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["key", "value", "stringValue", "arrayValue", "values", "code", "\ud800"]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)


@st.composite
def spoiled_json(draw: st.DrawFn) -> Any:
    """A good export in JSON with something else in the place of some of its parts."""
    content = copy.deepcopy(GOOD_JSON)
    for _ in range(draw(st.integers(1, 3))):
        node: Any = content
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            inner = node[key]
            if not isinstance(inner, dict | list) or draw(st.integers(0, 5)) == 0:
                node[key] = draw(anything)
                break
            node = inner
    return content


@fuzz
@given(content=spoiled_json())
def test_any_json_in_the_place_of_any_part(served: Serving, content: Any) -> None:
    check(served, post(served, json.dumps(content).encode(), content_type=JSON))


# All that HTTP allows in a header.
header = st.text(
    st.characters(min_codepoint=0x21, max_codepoint=0xFF, exclude_characters="\x7f"), max_size=20
)


@fuzz
@given(content_type=header | st.just(PROTOBUF), encoding=header | st.just("gzip"))
def test_any_headers(served: Serving, content_type: str, encoding: str) -> None:
    reply = post(
        served,
        b"\x0a\x00",
        content_type=content_type.encode("latin-1"),
        encoding=encoding.encode("latin-1"),
    )
    assert reply.http_status in (200, 400, 415)


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.text(max_size=400),
    st.text("\0\u0001a\U0001f642", max_size=300),
    st.binary(max_size=9),
).map(any_value)
attributes = st.dictionaries(st.sampled_from(sorted(REQUEST_ATTRIBUTES)), values)
nanoseconds = st.integers(0, 2**64 - 1) | st.just(1)


@st.composite
def any_span(draw: st.DrawFn) -> Span:
    """A span of an engine with any values in it."""
    times = sorted((draw(nanoseconds), draw(nanoseconds)))
    made = span(
        draw(attributes), start_time_unix_nano=times[0] or 1, end_time_unix_nano=times[1] or 1
    )
    made.attributes.extend(pairs(draw(attributes)))
    return made


GIVEN_BY_THE_STORE = ("id", "changed", "verdict", "verdicts", "counted")


@fuzz
@given(sent=any_span(), service=values)
def test_whatever_a_span_holds_its_record_fits_the_table(
    served: Serving, sent: Span, service: Any
) -> None:
    served.forget()
    request = export(sent, resource={"service.name": service})
    assert post(served, request.SerializeToString()).is_full_success
    record = served.accepted.record
    for column in requests_table.columns:
        value = getattr(record, column.name, None)
        if value is None:
            assert column.nullable or column.name in GIVEN_BY_THE_STORE, column.name
        else:
            assert holds(column, value), (column.name, value)


YEAR_9999 = 253402300800.0


def holds(column: Column[Any], value: Any) -> bool:
    """Whether the strictest of the databases takes the value."""
    kind: Any = getattr(column.type, "impl_instance", column.type)
    if isinstance(kind, String):
        return len(value) <= (kind.length or 0) and "\0" not in value
    if isinstance(kind, BigInteger):
        return bool(0 <= value < 2**63)
    if isinstance(kind, DateTime):
        return bool(0 <= value < YEAR_9999)
    return isfinite(value)
