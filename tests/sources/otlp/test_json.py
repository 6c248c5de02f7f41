"""JSON as strangers write it: what cannot be read costs nothing beside it."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from agent.sources.otlp.limits import MAX_JSON_VALUES
from tests.sources.otlp.doors import INVALID_ARGUMENT, JSON, Reply, post
from tests.sources.otlp.exports import export, in_json, json_bytes, json_spans, vllm_span
from tests.sources.otlp.serving import Serving


def send_json(served: Serving, content: object) -> Reply:
    """The answer to an export in JSON; a string is sent as it is."""
    body = content.encode() if isinstance(content, str) else json_bytes(content)
    return post(served, body, content_type=JSON)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("", "the body is no JSON"),
        ("{", "the body is no JSON"),
        ('{"resourceSpans": [}', "the body is no JSON"),
        ("\ufeff\ufeff{}", "the body is no JSON"),
        ("[" * 100_000, "the body is no JSON"),
        ('{"a":' * 100_000, "the body is no JSON"),
        ("9" * 10_000, "the body is no JSON"),
        ("[]", "the body holds a JSON list, not an object"),
        ("null", "the body holds a JSON NoneType, not an object"),
        ('"resourceSpans"', "the body holds a JSON str, not an object"),
        ("NaN", "the body holds a JSON float, not an object"),
        ('{"resourceSpans": {"scopeSpans": []}}', "none of the 1 spans can be read"),
        ('{"resourceSpans": "all"}', "none of the 1 spans can be read"),
        ('{"resourceSpans": [1, null]}', "none of the 2 spans can be read"),
        ('{"resourceSpans": [{"scopeSpans": 7}]}', "none of the 1 spans can be read"),
        ('{"resourceSpans": [{"scopeSpans": [{"spans": {}}]}]}', "none of the 1 spans"),
    ],
    ids=lambda text: text[:40],
)
def test_a_body_that_is_no_export_in_json_is_bad_data(
    served: Serving, body: str, message: str
) -> None:
    reply = send_json(served, body)
    assert (reply.http_status, reply.code) == (400, INVALID_ARGUMENT)
    assert reply.message.startswith(message)
    assert served.counts.refused_bodies == {"invalid": 1}


def test_json_that_is_no_utf_8_is_bad_data(served: Serving) -> None:
    reply = post(served, b'{"a": "\xff"}', content_type=JSON)
    assert (reply.http_status, reply.code) == (400, INVALID_ARGUMENT)


@pytest.mark.parametrize(
    "content",
    [{}, {"resourceSpans": None}, {"resourceSpans": []}, {"unknown": [1]}, {"resourceSpans": [{}]}],
)
def test_json_without_spans_is_an_export_of_nothing(served: Serving, content: object) -> None:
    assert send_json(served, content).is_full_success


def test_whole_numbers_in_json_may_be_text_and_unknown_fields_are_no_fault(
    served: Serving,
) -> None:
    content = in_json(export(vllm_span()))
    (span,) = json_spans(content)
    span["startTimeUnixNano"], span["endTimeUnixNano"] = 10**18, str(10**18 + 5)
    span["kind"] = 2
    span["flags"], span["new in 2030"] = 257, {"a": []}
    content["resourceSpans"][0]["new in 2031"] = "b"
    assert send_json(served, content).is_full_success
    assert served.accepted.record.started_at == pytest.approx(1e9)
    assert served.accepted.record.input_tokens == 300


def test_ids_in_json_may_have_capitals(served: Serving) -> None:
    content = in_json(export(vllm_span()))
    (span,) = json_spans(content)
    span["traceId"], span["spanId"] = "5B8EFFF798038103D269B633813FC60C", "EEE19B7EC3C1B174"
    assert send_json(served, content).is_full_success
    assert served.accepted.record.trace_id == "5b8efff798038103d269b633813fc60c"


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
    """A change of one field of a span."""
    return lambda span: span.__setitem__(key, value)


def put_value(value: object) -> Change:
    """A change of the value of the first attribute of a span."""
    return lambda span: span["attributes"][0].__setitem__("value", value)


SURROGATE = "\ud800"
WRONG_IDS = [
    pytest.param(put("traceId", "W47/95gDgQPSabYzgT/GDA=="), id="trace id in base64"),
    pytest.param(put("spanId", "7uGbfsPBsXQ="), id="span id in base64"),
    pytest.param(put("traceId", "00"), id="short trace id"),
    pytest.param(put("traceId", "5b 8e ff f7 98 03 81 03 d2 69 b6 33 81 3f c6"), id="spaces"),
    pytest.param(put("traceId", "g" * 32), id="trace id that is not hexadecimal"),
    pytest.param(put("traceId", 12), id="trace id as a number"),
    pytest.param(put("traceId", None), id="no trace id"),
    pytest.param(put("traceId", SURROGATE * 32), id="trace id of half characters"),
    pytest.param(lambda span: span.pop("spanId"), id="span id left out"),
]
UNREADABLE = [
    pytest.param(put("attributes", {"gen_ai.latency.e2e": 1.0}), id="attributes as an object"),
    pytest.param(put("attributes", "x"), id="attributes as text"),
    pytest.param(put("attributes", [1, 2]), id="attributes that are numbers"),
    pytest.param(put("attributes", [None]), id="attributes that are null"),
    pytest.param(put("name", SURROGATE), id="half a character in the name"),
    pytest.param(put("name", 5), id="a number for a name"),
    pytest.param(put("startTimeUnixNano", "now"), id="time as a word"),
    pytest.param(put("startTimeUnixNano", -1), id="time below zero"),
    pytest.param(put("startTimeUnixNano", 2**64), id="time too large"),
    pytest.param(put("startTimeUnixNano", 1e300), id="time much too large"),
    pytest.param(put("startTimeUnixNano", float("inf")), id="time without end"),
    pytest.param(put("startTimeUnixNano", 0.5), id="half a nanosecond"),
    pytest.param(put("startTimeUnixNano", "9" * 5000), id="time of five thousand digits"),
    pytest.param(put("startTimeUnixNano", [1]), id="time in a list"),
    pytest.param(put("status", [1]), id="status as a list"),
    pytest.param(put("status", SURROGATE), id="half a character for a status"),
    pytest.param(put_value(SURROGATE), id="half a character for a value"),
    pytest.param(put_value({"stringValue": SURROGATE}), id="half a character in a value"),
    pytest.param(put_value({SURROGATE: 1}), id="half a character in a key"),
    pytest.param(put_value({"doubleValue": float("nan")}), id="a number that is none"),
    pytest.param(put_value({"doubleValue": float("inf")}), id="a number without end"),
    pytest.param(put_value({"intValue": "x"}), id="an int that is text"),
    pytest.param(put_value({"intValue": 2**63}), id="an int too large"),
    pytest.param(put_value({"intValue": 0.5}), id="an int that is a half"),
    pytest.param(put_value({"boolValue": "yes"}), id="a truth as text"),
    pytest.param(put_value({"stringValue": "a", "intValue": 1}), id="two values in one"),
    pytest.param(put_value({"bytesValue": 7}), id="bytes as a number"),
    pytest.param(put_value({"arrayValue": [1]}), id="a list as a list"),
]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param(*case.values, reason, id=case.id)
        for cases, reason in ((WRONG_IDS, "id_length"), (UNREADABLE, "unreadable"))
        for case in cases
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
    assert [record.span_id for record in served.accepted.records] == [
        sent[0].span_id.hex(),
        sent[2].span_id.hex(),
    ]
    assert served.counts.contents[0].rejected == {reason: 1}


def nested(depth: int, inner: object, wrap: Callable[[object], object]) -> object:
    """A value wrapped so many times."""
    for _ in range(depth):
        inner = wrap(inner)
    return inner


def in_array(value: object) -> object:
    """An AnyValue that is a list of one."""
    return {"arrayValue": {"values": [value]}}


@pytest.mark.parametrize("depth", [60, 200, 300])
def test_a_value_that_is_too_deep_costs_only_its_span(served: Serving, depth: int) -> None:
    content = in_json(export(vllm_span(), vllm_span()))
    put_value(nested(depth, {"stringValue": "x"}, in_array))(json_spans(content)[0])
    reply = send_json(served, content)
    assert reply.rejected_spans == 1
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


@pytest.mark.parametrize("value", ["{}", "[]", "[0,0]", '{"a":1}'])
def test_json_that_would_fill_the_memory_is_too_large(served: Serving, value: str) -> None:
    values = ",".join([value] * (MAX_JSON_VALUES // 2 + 1))
    reply = send_json(served, f'{{"resourceSpans": [{values}]}}')
    assert reply.http_status == 413
    assert served.counts.refused_bodies == {"too_large": 1}


def test_duplicate_keys_in_json_are_no_crash(served: Serving) -> None:
    text = json.dumps(in_json(export(vllm_span())))
    doubled = text.replace('"name":', '"name": "first", "name":')
    assert send_json(served, doubled).is_full_success
