"""Bodies that are no exports, or not the exports they seem."""

import inspect
import json
import random
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import Message
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from agent.sources.otlp.limits import MAX_BODY_BYTES, MAX_PARSED_BYTES
from agent.sources.otlp.payload import JSON, PROTOBUF, Body, fits, parse, parse_json
from tests.sources.otlp.exports import (
    export,
    in_json,
    json_bytes,
    json_spans,
    pairs,
    part,
    vllm_span,
)
from tests.sources.otlp.serving import LoopThread, Serving, serving
from tests.sources.otlp.transports import (
    INVALID_ARGUMENT,
    TRANSPORTS,
    Reply,
    Transport,
    at_every_transport,
    at_protobuf_transports,
    post,
)

GOOD = export(vllm_span()).SerializeToString()


def within(*fields: int) -> Callable[[bytes], bytes]:
    """What puts a content into a field of a field, the outermost first."""

    def wrap(content: bytes) -> bytes:
        for field in reversed(fields):
            content = part(field, content)
        return content

    return wrap


# The only attribute of its span is a list of a list, a hundred times.
TOO_DEEP = within(1, 2, 2, 9, 2, *[5, 1] * 100)(b"")


@at_protobuf_transports
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(GOOD[:-1], id="cut by one byte"),
        pytest.param(GOOD[: len(GOOD) // 2], id="cut in the middle"),
        pytest.param(GOOD[:1], id="cut to one byte"),
        pytest.param(GOOD + b"\x0a\x7f", id="a length beyond the end"),
        pytest.param(b"\xff" * 100, id="a number without end"),
        pytest.param(b"\x00", id="field zero"),
        pytest.param(TOO_DEEP, id="too deep"),
        pytest.param(b'{"resourceSpans": []}', id="JSON"),
        pytest.param(b"\x1f\x8b\x08\x00 not really", id="not even gzip"),
        pytest.param(
            GOOD.replace(b"llm_request", b"\xff\xfe_request"), id="a name that is no text"
        ),
    ],
)
def test_a_body_that_is_no_protobuf_is_bad_data(
    served: Serving, transport: Transport, body: bytes
) -> None:
    reply = transport.send_bytes(served, body)
    assert reply.code == INVALID_ARGUMENT
    assert reply.message.startswith("the body is no ExportTraceServiceRequest")
    assert served.counts.refused_bodies == {"invalid": 1}
    assert transport.send(served, export(vllm_span())).is_full_success


LOGS = ExportLogsServiceRequest()
LOG_RECORDS = LOGS.resource_logs.add().scope_logs.add().log_records
LOG_RECORDS.add(time_unix_nano=1, severity_text="INFO")
LOG_RECORDS.add(attributes=pairs({"gen_ai.latency.e2e": 1.0}))
METRICS = ExportMetricsServiceRequest()
# Its name stands where a span has its trace id.
METRIC = METRICS.resource_metrics.add().scope_metrics.add().metrics.add(name="x" * 17)
METRIC.sum.data_points.add(as_int=1)


@at_protobuf_transports
@pytest.mark.parametrize("sent", [LOGS, METRICS], ids=["logs", "metrics"])
def test_logs_and_metrics_are_no_spans(
    served: Serving, transport: Transport, sent: Message
) -> None:
    body = sent.SerializeToString()
    assert ExportTraceServiceRequest.FromString(body).resource_spans
    reply = transport.send_bytes(served, body)
    assert reply.code == INVALID_ARGUMENT
    assert "by id_length" in reply.message
    assert served.accepted.records == []


def send_json(served: Serving, content: object) -> Reply:
    """The answer to an export in JSON; a text is sent as it is."""
    body = content.encode() if isinstance(content, str) else content
    return post(served, body if isinstance(body, bytes) else json_bytes(body), content_type=JSON)


NO_JSON, NO_SPANS = "the body is no JSON", "none of the 1 spans can be read"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        *(
            (text, NO_JSON)
            for text in ("", "{", '{"resourceSpans": [}', "\ufeff\ufeff{}", "9" * 10_000)
        ),
        ("[" * 100_000, NO_JSON),
        ('{"a":' * 100_000, NO_JSON),
        (b'{"a": "\xff"}', ""),
        ("[]", "the body holds a JSON list, not an object"),
        ("null", "the body holds a JSON NoneType, not an object"),
        ('"resourceSpans"', "the body holds a JSON str, not an object"),
        ("NaN", "the body holds a JSON float, not an object"),
        ('{"resourceSpans": {"scopeSpans": []}}', NO_SPANS),
        ('{"resourceSpans": "all"}', NO_SPANS),
        ('{"resourceSpans": [1, null]}', "none of the 2 spans can be read"),
        ('{"resourceSpans": [{"scopeSpans": 7}]}', NO_SPANS),
        ('{"resourceSpans": [{"scopeSpans": [{"spans": {}}]}]}', NO_SPANS),
    ],
    ids=lambda text: text[:40],
)
def test_a_body_that_is_no_export_in_json_is_bad_data(
    served: Serving, body: str | bytes, message: str
) -> None:
    reply = send_json(served, body)
    assert (reply.http_status, reply.code) == (400, INVALID_ARGUMENT)
    assert reply.message.startswith(message)
    assert served.counts.refused_bodies == {"invalid": 1}


@pytest.mark.parametrize(
    "content",
    [{}, {"resourceSpans": None}, {"resourceSpans": []}, {"unknown": [1]}, {"resourceSpans": [{}]}],
)
def test_json_without_spans_is_an_export_of_nothing(served: Serving, content: object) -> None:
    assert send_json(served, content).is_full_success


def test_json_may_have_numbers_as_text_ids_in_capitals_and_unknown_fields(served: Serving) -> None:
    content = in_json(export(vllm_span()))
    (span,) = json_spans(content)
    span["startTimeUnixNano"], span["endTimeUnixNano"] = 10**18, str(10**18 + 5)
    span["traceId"], span["spanId"] = "5B8EFFF798038103D269B633813FC60C", "EEE19B7EC3C1B174"
    span["kind"], span["flags"], span["new in 2030"] = 2, 257, {"a": []}
    content["resourceSpans"][0]["new in 2031"] = "b"
    doubled = json.dumps(content).replace('"name":', '"name": "first", "name":')
    assert send_json(served, doubled).is_full_success
    record = served.accepted.record
    assert record.trace_id == "5b8efff798038103d269b633813fc60c"
    assert record.started_at == pytest.approx(1e9)
    assert record.input_tokens == 300


@pytest.mark.parametrize(
    ("parent", "known", "screened"),
    [
        ("00f067aa0ba902b7", "00f067aa0ba902b7", {}),
        ("00F067AA0BA902B7", "00f067aa0ba902b7", {}),
        ("", None, {}),
        (None, None, {}),
        ("0" * 16, None, {}),
        ("00f067aa0b", None, {("parent_span_id", "id_length"): 1}),
        ("AABnqgupArc=", None, {("parent_span_id", "id_length"): 1}),
        (12, None, {("parent_span_id", "id_length"): 1}),
    ],
)
def test_the_parent_of_a_span_in_json_is_kept_where_it_can_be_one(
    served: Serving, parent: object, known: str | None, screened: dict[tuple[str, str], int]
) -> None:
    content = in_json(export(vllm_span()))
    json_spans(content)[0]["parentSpanId"] = parent
    assert send_json(served, content).is_full_success
    assert served.accepted.record.parent_span_id == known
    assert served.counts.contents[0].screened == screened


Change = Callable[[dict[str, Any]], object]


def put(key: str, value: object) -> Change:
    return lambda span: span.__setitem__(key, value)


def put_value(value: object) -> Change:
    return lambda span: span["attributes"][0].__setitem__("value", value)


SURROGATE = "\ud800"
SPACED = "5b 8e ff f7 98 03 81 03 d2 69 b6 33 81 3f c6"
BASE64 = "W47/95gDgQPSabYzgT/GDA=="
WRONG_IDS = [
    *(put("traceId", i) for i in (BASE64, "00", SPACED, "g" * 32, 12, None, SURROGATE * 32)),
    put("spanId", "7uGbfsPBsXQ="),
    lambda span: span.pop("spanId"),
]
WRONG_TIMES = ["now", -1, 2**64, 1e300, float("inf"), 0.5, "9" * 5000, [1]]
WRONG_VALUES: list[object] = [
    SURROGATE,
    {"stringValue": SURROGATE},
    {SURROGATE: 1},
    *({"doubleValue": value} for value in (float("nan"), float("inf"))),
    *({"intValue": value} for value in ("x", 2**63, 0.5)),
    {"boolValue": "yes"},
    {"stringValue": "a", "intValue": 1},
    {"bytesValue": 7},
    {"arrayValue": [1]},
]
UNREADABLE = [
    *(put("attributes", a) for a in ({"gen_ai.latency.e2e": 1.0}, "x", [1, 2], [None])),
    *(put("name", name) for name in (SURROGATE, 5)),
    *(put("startTimeUnixNano", time) for time in WRONG_TIMES),
    *(put("status", status) for status in ([1], SURROGATE)),
    *map(put_value, WRONG_VALUES),
]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        *((change, "id_length") for change in WRONG_IDS),
        *((change, "unreadable") for change in UNREADABLE),
    ],
)
def test_a_bad_span_in_json_is_refused_and_its_neighbours_are_kept(
    served: Serving, change: Change, reason: str
) -> None:
    sent = [vllm_span(), vllm_span(), vllm_span()]
    content = in_json(export(*sent))
    change(json_spans(content)[1])
    reply = send_json(served, content)
    assert (reply.http_status, reply.rejected_spans) == (200, 1)
    assert reply.message == f"refused: 1 by {reason}"
    kept = [record.span_id for record in served.accepted.records]
    assert kept == [sent[0].span_id.hex(), sent[2].span_id.hex()]
    assert served.counts.contents[0].rejected == {reason: 1}


def nested(depth: int, inner: object, wrap: Callable[[object], object]) -> object:
    for _ in range(depth):
        inner = wrap(inner)
    return inner


@pytest.mark.parametrize("depth", [60, 200, 300])
def test_a_value_that_is_too_deep_costs_only_its_span(served: Serving, depth: int) -> None:
    content = in_json(export(vllm_span(), vllm_span()))
    deep = nested(depth, {"stringValue": "x"}, lambda value: {"arrayValue": {"values": [value]}})
    put_value(deep)(json_spans(content)[0])
    assert send_json(served, content).rejected_spans == 1
    assert len(served.accepted.records) == 1


@pytest.mark.parametrize(
    "unread",
    [
        pytest.param({"links": nested(400, {}, lambda link: {"links": [link]})}, id="deep links"),
        pytest.param({"links": [{"traceId": "odd"}], "kind": "odd"}, id="odd ids"),
        pytest.param({"events": "none", "kind": SURROGATE, "traceState": 5}, id="wrong types"),
    ],
)
def test_what_is_not_read_of_a_span_may_be_anything(
    served: Serving, unread: dict[str, Any]
) -> None:
    content = in_json(export(vllm_span()))
    json_spans(content)[0].update(unread)
    assert send_json(served, content).is_full_success
    assert served.accepted.record.request_id == "chatcmpl-1"


@pytest.mark.parametrize(
    "unreadable",
    [5, "x", ["a"], {"attributes": {"service.name": "x"}}, {"attributes": [SURROGATE]}],
)
def test_an_unreadable_resource_does_not_cost_its_spans(
    served: Serving, unreadable: object
) -> None:
    content = in_json(export(vllm_span()))
    content["resourceSpans"][0]["resource"] = unreadable
    assert send_json(served, content).is_full_success
    assert served.accepted.record.engine is None
    assert served.counts.contents[0].screened == {("resource", "unreadable"): 1}


@pytest.mark.parametrize("key", ["resourceSpans", "scopeSpans", "spans"])
def test_what_is_no_object_does_not_cost_its_neighbours(served: Serving, key: str) -> None:
    content = in_json(export(vllm_span()))
    resource_spans = content["resourceSpans"][0]
    lists = {
        "resourceSpans": content["resourceSpans"],
        "scopeSpans": resource_spans["scopeSpans"],
        "spans": resource_spans["scopeSpans"][0]["spans"],
    }
    lists[key][:0] = [7, "x", None]
    reply = send_json(served, content)
    assert (reply.rejected_spans, reply.message) == (3, "refused: 3 by unreadable")
    assert served.accepted.record.request_id == "chatcmpl-1"


def test_a_list_that_is_none_does_not_cost_its_neighbours(served: Serving) -> None:
    content = in_json(export(vllm_span()))
    content["resourceSpans"].append({"scopeSpans": {"spans": []}})
    assert send_json(served, content).rejected_spans == 1
    assert served.accepted.record.request_id == "chatcmpl-1"


MARKED = "vendor=x,goodput=unsampled"


def forwarded_ids(bodies: list[Body]) -> list[bytes]:
    """The ids of the spans in forwarded bodies, which hold no others."""
    assert not any(body.gzipped for body in bodies)
    read = {JSON: parse_json, PROTOBUF: parse}
    return [
        span.span_id
        for body in bodies
        for resource_spans in read[body.content_type](body.content).message.resource_spans
        for scope_spans in resource_spans.scope_spans
        for span in scope_spans.spans
    ]


@at_every_transport
def test_a_marked_span_is_stored_and_not_forwarded(served: Serving, transport: Transport) -> None:
    marked = vllm_span(trace_state=MARKED)
    states = ("", "vendor=x", "goodput=unsampled-not", "my-goodput=unsampled")
    others = [vllm_span({"note": "goodput=unsampled"}, trace_state=state) for state in states]
    assert transport.send(served, export(marked, *others)).is_full_success
    assert len(served.accepted.records) == 1 + len(others)
    assert forwarded_ids(served.forwarded) == [span.span_id for span in others]


def test_the_rest_of_an_export_stays_as_it_was(served: Serving) -> None:
    request = export(vllm_span(links=[Span.Link(trace_state="a=b")]), vllm_span(trace_state=MARKED))
    request.resource_spans[0].schema_url = "https://opentelemetry.io/schemas/1.44.0"
    TRANSPORTS[0].send(served, request)
    (body,) = served.forwarded
    kept = ExportTraceServiceRequest.FromString(body.content)
    del request.resource_spans[0].scope_spans[0].spans[1]
    assert (kept, body.content_type) == (request, PROTOBUF)


def test_json_stays_json(served: Serving) -> None:
    content = in_json(export(vllm_span(), vllm_span(trace_state=MARKED)))
    send_json(served, content)
    (body,) = served.forwarded
    del content["resourceSpans"][0]["scopeSpans"][0]["spans"][1]
    assert (body.content, body.content_type) == (json_bytes(content), JSON)


def test_the_clients_decision_can_be_overridden(loop: LoopThread) -> None:
    with loop.entered(serving(client_sampling=False)) as served:
        request = export(vllm_span(trace_state=MARKED))
        assert TRANSPORTS[0].send(served, request).is_full_success
        (body,) = served.forwarded
    assert ExportTraceServiceRequest.FromString(body.content) == request


MIB = 1024 * 1024


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
        inspect.getsource(inspect).encode(),
        json_bytes([{"id": n, "name": f"span {n}"} for n in range(999)]),
        "世界のトークン".encode() * 99,
        b64encode(random.Random(1).randbytes(99_999)),
        random.Random(2).randbytes(99_999),
    ],
    ids=["code", "JSON", "no ASCII", "base64", "any bytes"],
)
def test_long_texts_fit(text: bytes) -> None:
    body = within(*SPAN, 9, 2)(part(1, text * (MAX_BODY_BYTES // len(text))))
    assert fits(body, MAX_PARSED_BYTES)


def test_the_largest_body_of_real_spans_fits() -> None:
    one = export(vllm_span()).SerializeToString()
    assert fits(one * (MAX_BODY_BYTES // len(one)), MAX_PARSED_BYTES)
