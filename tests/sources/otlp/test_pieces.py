"""Large protobuf exports in pieces: protobuf's own parser says what a body holds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from agent.errors import PayloadInvalid, PayloadTooLarge
from agent.sources.otlp.limits import MAX_PARTS, MAX_SPAN_BYTES, PIECE_BYTES, PIECE_SPANS
from agent.sources.otlp.pieces import Piece, split, varint
from tests.sources.otlp.exports import export, pairs, part, vllm_span

KIB = 1024

# Each span as (attributes of its resource, name of its scope, span).
Found = list[tuple[bytes, str, bytes]]


def spans_of(body: bytes) -> Found:
    """The spans of an export by protobuf's own parser, in order."""
    return [
        (resource, scope_spans.scope.name, span.span_id)
        for resource_spans in ExportTraceServiceRequest.FromString(body).resource_spans
        for resource in [resource_spans.resource.SerializeToString()]
        for scope_spans in resource_spans.scope_spans
        for span in scope_spans.spans
    ]


def check(body: bytes) -> list[Piece]:
    """The pieces of a body, which hold its spans in their order and are no larger than allowed."""
    pieces = list(split(body))
    assert [span for piece in pieces for span in spans_of(piece.content)] == spans_of(body)
    for piece in pieces:
        assert len(spans_of(piece.content)) <= 2 * PIECE_SPANS
    return pieces


def span(number: int, size_bytes: int = 0) -> Span:
    return Span(span_id=number.to_bytes(8, "big"), name="x" * size_bytes)


def resource(name: str, *scopes: ScopeSpans) -> ResourceSpans:
    made = ResourceSpans(scope_spans=scopes, schema_url="https://example.com/resource")
    made.resource.attributes.extend(pairs({"service.name": name}))
    return made


def scope(name: str, *spans: Span) -> ScopeSpans:
    made = ScopeSpans(spans=spans, schema_url="https://example.com/scope")
    made.scope.name = name
    return made


def body_of(*resources: ResourceSpans) -> bytes:
    return ExportTraceServiceRequest(resource_spans=resources).SerializeToString()


sizes = st.sampled_from([0, 0, 0, 100, 20 * KIB, 200 * KIB, 600 * KIB])
counts = st.sampled_from([0, 1, 2, 3, PIECE_SPANS - 1, PIECE_SPANS, PIECE_SPANS + 1])


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.lists(st.lists(st.tuples(counts, sizes), max_size=3), max_size=3))
def test_the_pieces_hold_all_spans_with_their_resource_and_scope(
    sent: list[list[tuple[int, int]]],
) -> None:
    numbers = iter(range(1, 1_000_000))
    resources = [
        resource(
            f"r{place}" * 20,
            *(
                scope(f"s{place}", *(span(next(numbers), size if size < 1000 or not k % 1000 else 0)
                      for k in range(count)))
                for count, size in scopes
            ),
        )
        for place, scopes in enumerate(sent)
    ]  # fmt: skip
    check(body_of(*resources))


def test_a_resource_that_goes_on_in_the_next_piece_is_known_as_the_same() -> None:
    many = [span(number) for number in range(1, 2 * PIECE_SPANS + 2)]
    pieces = check(
        body_of(resource("a", scope("s", span(10**6))), resource("b", scope("s", *many)))
    )
    assert [piece.continues for piece in pieces] == [False] + [True] * (len(pieces) - 1)
    assert len(pieces) == 3


def test_a_resource_after_its_spans_is_read() -> None:
    spans = part(2, scope("s", *map(span, range(1, 5000))).SerializeToString())
    header = resource("late").SerializeToString()
    check(part(1, spans + header))


def test_many_scopes_and_a_long_resource_stay_few_pieces() -> None:
    scopes = [scope("", span(number)) for number in range(1, 4000)]
    long = resource("long" * 60_000, *scopes)
    assert sum(len(piece.content) for piece in check(body_of(long))) < 4 * 240_000 + 200 * KIB


def test_many_resources_with_long_attributes_make_no_long_pieces() -> None:
    resources = [resource("r" * 100 * KIB, scope("s", span(number))) for number in range(1, 40)]
    assert max(len(piece.content) for piece in check(body_of(*resources))) < PIECE_BYTES + 110 * KIB


def test_a_span_that_is_too_large_is_left_out_and_counted() -> None:
    spans = [span(1), span(2, MAX_SPAN_BYTES), span(3), span(4, MAX_SPAN_BYTES - 100)]
    pieces = list(split(body_of(resource("r", scope("s", *spans)))))
    found = [found[2][-1] for piece in pieces for found in spans_of(piece.content)]
    assert found == [1, 3, 4]
    assert sum(piece.large_spans for piece in pieces) == 1


def test_a_resource_that_is_too_large_is_left_out_and_counted() -> None:
    large = resource("r" * MAX_SPAN_BYTES, scope("s", span(1)))
    pieces = list(split(body_of(large, resource("q", scope("s", span(2))))))
    assert sum(piece.large_resources for piece in pieces) == 1
    first, second = [found for piece in pieces for found in spans_of(piece.content)]
    assert (first[0], first[2][-1], second[2][-1]) == (b"", 1, 2)
    assert b"q" in second[0]


def test_an_export_of_nothing_has_no_pieces() -> None:
    assert list(split(b"")) == []
    assert list(split(export().SerializeToString())) == []


@pytest.mark.parametrize("empty", [b"\x0a\x00", part(1, b"\x12\x00" * 100), b"\x10\x00"])
def test_a_body_has_a_maximum_of_parts(empty: bytes) -> None:
    with pytest.raises(PayloadTooLarge, match="over 250000 spans, scopes and resources"):
        list(split(empty * (MAX_PARTS + 1)))


GOOD = body_of(resource("r", scope("s", *map(span, range(1, 50)))))


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(GOOD[:-1], id="cut by one byte"),
        pytest.param(GOOD + b"\x0a\x7f", id="a length beyond the end"),
        pytest.param(part(1, b"\x12\x7f"), id="a length beyond its message"),
        pytest.param(GOOD + b"\xff" * 100, id="a number without end"),
        pytest.param(GOOD + b"\x0a" + b"\x80" * 9 + b"\x7f" + GOOD, id="a length of 2 ** 63"),
        pytest.param(b"\x00\x00" + GOOD, id="field zero"),
        pytest.param(GOOD + b"\x0b\x0c", id="groups"),
        pytest.param(GOOD + b"\x09", id="a fixed number cut off"),
    ],
)
def test_what_is_no_protobuf_is_invalid(body: bytes) -> None:
    with pytest.raises(PayloadInvalid, match="no ExportTraceServiceRequest"):
        list(split(body))


@pytest.mark.parametrize("number", [0, 1, 127, 128, 300, 2**32, 2**63, 2**64 - 1])
def test_numbers_are_read_as_protobuf_writes_them(number: int) -> None:
    body = Span(start_time_unix_nano=1, flags=0, dropped_links_count=min(number, 2**32 - 1))
    written = body.SerializeToString()
    if number:
        at = written.rindex(b"\x70") + 1
        assert varint(written, at) == (min(number, 2**32 - 1), len(written))


def test_real_spans_are_whole() -> None:
    sent = [vllm_span() for _ in range(3000)]
    body = export(*sent).SerializeToString()
    whole = ExportTraceServiceRequest()
    for piece in split(body):
        whole.MergeFromString(piece.content)
    spans = [s for r in whole.resource_spans for c in r.scope_spans for s in c.spans]
    assert spans == sent
