"""The span reader: which spans are requests, and their times and attributes."""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue, KeyValueList
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from agent.catalog.spans import REQUEST_ATTRIBUTES, ValueType
from agent.records.engine import EngineIdentity
from agent.records.request import RequestRecord, Status, Vantage
from agent.sources.otlp.payload import parse_json
from agent.sources.otlp.span_reader import ExportContent, SpanReader
from tests.sources.otlp.exports import (
    VLLM,
    any_value,
    export,
    json_bytes,
    json_spans,
    pairs,
    span,
    vllm_span,
)
from tests.sources.otlp.serving import Serving
from tests.sources.otlp.transports import post

# What strangers sent.
DATA = Path(__file__).parents[2] / "data" / "foreign"
DAY_S = 86400.0
UPTIME_S = 2.6e6

# What vLLM 0.33 sends where its core ends a request before the first token: clocks that never
# started, and a first token that never was.
NEVER_STARTED = {
    "gen_ai.latency.time_to_first_token": 0.02,
    "gen_ai.latency.e2e": 0.02,
    "gen_ai.latency.time_in_queue": -UPTIME_S,
    "gen_ai.latency.time_in_model_prefill": UPTIME_S,
    "gen_ai.latency.time_in_model_decode": 0.0,
    "gen_ai.latency.time_in_model_inference": UPTIME_S,
    "gen_ai.usage.completion_tokens": 0,
}


def send(
    served: Serving, *spans: Span, resource: Mapping[str, object] | None = None, scope: str = ""
) -> ExportContent:
    """What the receiver made of an export that it took whole."""
    sent = export(*spans, resource=resource, scope=scope)
    reply = post(served, sent.SerializeToString())
    assert reply.is_full_success, reply
    (content,) = served.counts.contents
    return content


def send_one(served: Serving, sent: Span, scope: str = "") -> tuple[RequestRecord, ExportContent]:
    """The record of a span, and what was noted of it."""
    content = send(served, sent, scope=scope)
    (record,) = content.records
    return record, content


def test_a_span_of_vllm_becomes_a_request(served: Serving) -> None:
    sent = vllm_span()
    before = time.time()
    record, content = send_one(served, sent)
    expected = RequestRecord(
        trace_id=sent.trace_id.hex(),
        span_id=sent.span_id.hex(),
        vantage=Vantage.ENGINE,
        status=Status.OK,
        started_at=record.started_at,
        ended_at=record.ended_at,
        received_at=record.received_at,
        request_id="chatcmpl-1",
        agent="tester",
        engine="chat-0",
        service_name="chat-0",
        ttft_s=0.2,
        tpot_s=0.1,
        e2e_s=1.2,
        queue_s=0.05,
        prefill_s=0.15,
        decode_s=1.0,
        input_tokens=300,
        output_tokens=11,
    )
    assert record == expected
    assert record.started_at == pytest.approx(sent.start_time_unix_nano / 1e9)
    assert record.ended_at == pytest.approx(sent.end_time_unix_nano / 1e9)
    assert before <= record.received_at <= time.time()
    assert not content.screened


def test_the_extras_of_sglang_are_kept(served: Serving) -> None:
    extras = {
        "gen_ai.usage.cached_tokens": 200,
        "gen_ai.response.model": "Qwen/Qwen3-8B",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.request.top_k": 20,
    }
    record, _ = send_one(served, vllm_span(extras, name="Req 5f1e"), "sglang server")
    known = (record.cached_tokens, record.model, record.finish_reason)
    assert known == (200, "Qwen/Qwen3-8B", "stop")


@pytest.mark.parametrize("prefill_first", [True, False])
def test_of_sglangs_prefill_and_decode_the_prefill_is_a_hop_of_the_decode(
    served: Serving, *, prefill_first: bool
) -> None:
    prefill = vllm_span({"gen_ai.usage.completion_tokens": 1}, name="prefill Req 5f1e")
    decode = vllm_span(name="decode Req 5f1e")
    sent = (prefill, decode) if prefill_first else (decode, prefill)
    content = send(served, *sent, scope="sglang server")
    found = {record.span_id: record for record in content.records}
    assert [found[each.span_id.hex()].hop for each in (prefill, decode)] == [True, None]
    assert found[prefill.span_id.hex()].e2e_s == 1.2


PHASE = {"gen_ai.latency.time_in_queue": 0.5, "gen_ai.latency.e2e": 1.0, "gen_ai.request.id": "x"}
CLIENT = {"gen_ai.request.model": "m", "gen_ai.usage.input_tokens": 3, "gen_ai.request.id": "x"}


@pytest.mark.parametrize(
    ("name", "attributes"),
    [
        ("Load model", {"code.function": "load_model", "code.lineno": 12}),
        # Those that vLLM may send below its request span, whatever they carry.
        *(
            (f"vllm_{phase}", PHASE)
            for phase in ("queue", "prefill", "decode", "async_kv_transfer")
        ),
        ("chat m", CLIENT),
        ("GET /health", {}),
    ],
)
def test_spans_of_start_up_phases_and_clients_are_no_requests(
    served: Serving, name: str, attributes: Mapping[str, object]
) -> None:
    content = send(served, span(attributes, name=name), vllm_span())
    assert (len(content.records), content.passed, content.rejected) == (1, 1, {})


def test_a_latency_makes_any_span_of_an_engines_library_a_request(served: Serving) -> None:
    sent = span({"gen_ai.latency.e2e": 2.0}, name="anything", kind=Span.SPAN_KIND_INTERNAL)
    record, _ = send_one(served, sent, "vllm.llm_engine")
    assert record.e2e_s == 2.0


@pytest.mark.parametrize(
    ("attributes", "fields", "scope"),
    [
        # Through a collector that drops scopes, and from an engine's copy of vLLM's tracing.
        ({"gen_ai.latency.e2e": 2.0}, {"kind": Span.SPAN_KIND_UNSPECIFIED}, ""),
        ({}, {}, ""),
        ({"gen_ai.latency.e2e": 2.0}, {}, "trt.llm"),
        # Of a request that was refused.
        ({}, {"kind": Span.SPAN_KIND_INTERNAL}, "vllm.v1.engine"),
    ],
)
def test_a_span_with_the_name_and_a_sign_of_an_engine_is_a_request(
    served: Serving, attributes: dict[str, object], fields: dict[str, Any], scope: str
) -> None:
    assert len(send(served, span(attributes, **fields), scope=scope).records) == 1


def test_a_clients_call_of_another_provider_is_no_request(served: Serving) -> None:
    """A span of LiveKit Agents 1.8.9, which has the name of vLLM's."""
    content = json.loads((DATA / "64-livekit-llm_request.otlp.json").read_text())
    (sent,) = json_spans(content)
    sent["startTimeUnixNano"] = str(time.time_ns() - 4_000_000_000)
    sent["endTimeUnixNano"] = str(time.time_ns())
    for body, kind in (
        (json_bytes(content), "application/json"),
        (parse_json(json_bytes(content)).message.SerializeToString(), "application/x-protobuf"),
    ):
        assert post(served, body, content_type=kind).is_full_success
    assert [(each.records, each.passed) for each in served.counts.contents] == [([], 1)] * 2


OTHER_SCOPES = st.text(min_size=1, max_size=12).filter(
    lambda name: not name.startswith(("vllm", "sglang"))
)
KEYS = st.sets(st.sampled_from([*VLLM, "gen_ai.latency.anything", "gen_ai.request.model"]))


@given(
    OTHER_SCOPES,
    st.sampled_from(["llm_request", "chat m", "POST /v1/chat/completions", "Req 1", "vllm_queue"]),
    st.sampled_from(sorted(Span.SpanKind.values())),
    KEYS,
)
def test_no_span_of_another_system_is_a_request(
    scope: str, name: str, kind: int, keys: set[str]
) -> None:
    attributes = {key: VLLM.get(key, 1.0) for key in keys}
    measured = any(key.startswith("gen_ai.latency.") for key in keys)
    assume(not (name == "llm_request" and measured and kind == Span.SPAN_KIND_SERVER))
    sent = export(span(attributes, name=name, kind=kind), scope=scope)
    content = SpanReader(lambda _: EngineIdentity(engine="chat-0", model="m"), "tester").read(
        sent, time.time()
    )
    assert (content.records, content.passed) == ([], 1)


@pytest.mark.parametrize(
    ("scope", "service", "spans"),
    [
        ("vllm.model_executor.model_loader.default_loader", "chat-0", 1),
        ("vllm.model_executor.model_loader.default_loader", "unknown", 0),
        ("another.library", "chat-0", 0),
    ],
)
def test_a_span_of_an_engine_that_loads_is_kept_and_is_no_request(
    scope: str, service: str, spans: int
) -> None:
    def identify(attributes: Mapping[str, object]) -> EngineIdentity:
        name = attributes["service.name"]
        return EngineIdentity(engine=name if name == "chat-0" else None, model=None)

    loads = span({}, name="Load weights", kind=Span.SPAN_KIND_INTERNAL)
    sent = export(loads, resource={"service.name": service}, scope=scope)
    content = SpanReader(identify, "tester").read(sent, time.time())
    assert (content.records, content.passed, len(content.loading)) == ([], 1, spans)
    for each in content.loading:
        assert (each.engine, each.name) == ("chat-0", "Load weights")
        assert each.began_at == pytest.approx(loads.start_time_unix_nano / 1e9, abs=1e-6)
        assert each.ended_at - each.began_at == pytest.approx(1.2, abs=1e-6)


def test_a_request_of_four_sequences_is_four_records(served: Serving) -> None:
    trace_id = bytes(range(16))
    sequences = [vllm_span({"gen_ai.request.n": 4}, trace_id=trace_id) for _ in range(4)]
    records = send(served, *sequences).records
    assert [record.span_id for record in records] == [item.span_id.hex() for item in sequences]
    assert {(record.trace_id, record.request_id) for record in records} == {
        (trace_id.hex(), "chatcmpl-1")
    }


@pytest.mark.parametrize(("failed", "status"), [(True, Status.ERROR), (False, Status.OK)])
def test_a_span_that_says_so_is_an_error(served: Serving, failed: bool, status: Status) -> None:
    assert send_one(served, vllm_span(failed=failed))[0].status is status


def test_a_request_that_the_engine_ended_before_its_first_token_is_an_error(
    served: Serving,
) -> None:
    record, content = send_one(served, vllm_span(NEVER_STARTED))
    assert record.status is Status.ERROR
    times = (record.ttft_s, record.tpot_s, record.queue_s, record.prefill_s, record.decode_s)
    assert times == (None,) * 5
    assert (record.e2e_s, record.output_tokens) == (0.02, 0)
    assert content.screened == {
        ("queue_s", "negative"): 1,
        ("prefill_s", "longer_than_request"): 1,
        ("ttft_s", "no_output"): 1,
        ("decode_s", "no_output"): 1,
    }


@pytest.mark.parametrize(("tokens", "ttft_s", "no_output"), [(0, None, 1), (1, 0.2, 0)])
def test_without_a_second_token_there_is_no_time_per_token(
    served: Serving, tokens: int, ttft_s: float | None, no_output: int
) -> None:
    record, content = send_one(served, vllm_span({"gen_ai.usage.completion_tokens": tokens}))
    assert (record.status, record.output_tokens) == (Status.OK, tokens)
    assert (record.ttft_s, record.tpot_s) == (ttft_s, None)
    assert content.screened["ttft_s", "no_output"] == no_output


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        *(({"trace_id": b"x" * length}, "id_length") for length in (0, 15, 17, 32)),
        *(({"span_id": b"x" * length}, "id_length") for length in (0, 7, 16)),
        # All spans of a sender that sets no ids would pass for one.
        ({"trace_id": bytes(16)}, "id_zero"),
        ({"span_id": bytes(8)}, "id_zero"),
        ({"start_time_unix_nano": 0}, "span_times"),
        ({"end_time_unix_nano": 0}, "span_times"),
        ({"start_time_unix_nano": 0, "end_time_unix_nano": 0}, "span_times"),
        ({"start_time_unix_nano": 2_000_000_000, "end_time_unix_nano": 1}, "span_times"),
    ],
)
def test_a_span_that_cannot_be_placed_is_refused_and_the_next_is_not(
    served: Serving, fields: dict[str, Any], reason: str
) -> None:
    reply = post(served, export(vllm_span(**fields), vllm_span()).SerializeToString())
    assert (reply.http_status, reply.rejected_spans) == (200, 1)
    (content,) = served.counts.contents
    assert (len(content.records), content.rejected) == (1, {reason: 1})


@pytest.mark.parametrize("lead_s", [31.0, 61.0, 3600.0, 3 * DAY_S, 500 * 365 * DAY_S])
def test_a_clock_that_is_ahead_is_reported_and_moments_are_estimated(
    served: Serving, lead_s: float
) -> None:
    record, content = send_one(served, vllm_span(age_s=-lead_s))
    assert record.ended_at == record.received_at
    assert record.started_at == pytest.approx(record.received_at - 1.2)
    assert record.clock_skew_s == pytest.approx(lead_s, abs=30)
    assert content.screened == {("started_at", "clock_ahead"): 1}


@given(st.floats(-3 * DAY_S, DAY_S))
@example(-0.5)
def test_no_request_ends_after_its_receipt_and_its_times_are_moved_together(age_s: float) -> None:
    sent, received_at = vllm_span(age_s=age_s), time.time()
    reader = SpanReader(lambda _: EngineIdentity(engine="chat-0", model="m"), "tester")
    (record,) = reader.read(export(sent), received_at).records
    assert record.ended_at == min(received_at, sent.end_time_unix_nano * 1e-9)
    assert record.ended_at - record.started_at == pytest.approx(1.2, abs=1e-3)


@pytest.mark.parametrize(("age_s", "late"), [(0.0, 0), (3700.0, 1), (20000 * DAY_S, 1)])
def test_a_late_span_is_believed(served: Serving, age_s: float, late: int) -> None:
    sent = vllm_span(age_s=age_s)
    record, content = send_one(served, sent)
    assert record.started_at == pytest.approx(sent.start_time_unix_nano / 1e9)
    assert record.ended_at == pytest.approx(sent.end_time_unix_nano / 1e9)
    assert record.clock_skew_s is None
    assert content.screened == ({("started_at", "late"): 1} if late else {})


@pytest.mark.parametrize(
    ("parent", "known", "screened"),
    [
        (b"\x00\xf0g\xaa\x0b\xa9\x02\xb7", "00f067aa0ba902b7", {}),
        (b"", None, {}),
        (bytes(8), None, {}),
        (b"12345", None, {("parent_span_id", "id_length"): 1}),
        (b"123456789", None, {("parent_span_id", "id_length"): 1}),
    ],
)
def test_the_parent_of_a_span_is_kept_where_it_can_be_one(
    served: Serving, parent: bytes, known: str | None, screened: dict[tuple[str, str], int]
) -> None:
    record, content = send_one(served, vllm_span(parent_span_id=parent))
    assert record.parent_span_id == known
    assert content.screened == screened


def test_each_resource_of_an_export_is_an_engine_of_its_own(served: Serving) -> None:
    request = export(vllm_span(), resource={"service.name": "a"})
    request.MergeFrom(export(vllm_span(), vllm_span(), resource={"service.name": "b"}))
    request.MergeFrom(export(vllm_span(), resource={"telemetry.sdk.name": "opentelemetry"}))
    assert post(served, request.SerializeToString()).is_full_success
    assert [record.engine for record in served.accepted.records] == ["a", "b", "b", None]


@pytest.mark.parametrize(
    ("service_name", "reason"),
    [
        ("x" * 1_000_000, "too_long"),
        ("chat\0", "control_character"),
        (7, "wrong_type"),
        (True, "wrong_type"),
    ],
)
def test_an_unusable_service_name_is_counted_and_its_spans_kept(
    served: Serving, service_name: object, reason: str
) -> None:
    resource = {"service.name": service_name, "prompt": "y" * 1_000_000}
    content = send(served, vllm_span(), vllm_span(), resource=resource)
    assert [record.service_name for record in content.records] == [None, None]
    assert content.screened["service_name", reason] == 1


def test_a_resource_may_hold_anything(served: Serving) -> None:
    request = export(vllm_span())
    request.resource_spans[0].resource.attributes.extend(
        KeyValue(key="service.name", value=any_value(value))
        for value in (None, b"chat", ["chat"], "", "last")
    )
    request.resource_spans[0].resource.attributes.add()
    assert post(served, request.SerializeToString()).is_full_success
    assert served.accepted.record.service_name == "last"


MEGABYTE = 1_000_000

SECONDS_KEY = "gen_ai.latency.time_in_queue"
COUNT_KEY = "gen_ai.usage.prompt_tokens"
TEXT_KEY = "gen_ai.request.id"


SPELLINGS = sorted(
    (name, rank, key, kind) for key, (name, kind, rank) in REQUEST_ATTRIBUTES.items()
)


@pytest.mark.parametrize(
    ("name", "rank", "key", "kind"), SPELLINGS, ids=[key for _, _, key, _ in SPELLINGS]
)
def test_every_spelling_is_read(
    served: Serving, name: str, rank: int, key: str, kind: ValueType
) -> None:
    value = {ValueType.SECONDS: 0.01, ValueType.COUNT: 2, ValueType.TEXT: "counts"}[kind]
    counts = {"gen_ai.usage.prompt_tokens": 9, "gen_ai.usage.completion_tokens": 9}
    others = {k: v for k, v in counts.items() if REQUEST_ATTRIBUTES[k][0] != name}
    record, content = send_one(served, span({**others, key: value}))
    assert (getattr(record, name), content.screened) == (value, {})


BOTH_SPELLINGS = {
    "gen_ai.usage.input_tokens": 500,
    "gen_ai.usage.prompt_tokens": 400,
    "llm.token_count.prompt": 300,
    "gen_ai.usage.output_tokens": 50,
    "gen_ai.usage.completion_tokens": 40,
    "gen_ai.latency.time_to_first_token": 0.5,
    "gen_ai.response.time_to_first_chunk": 0.6,
    "gen_ai.request.id": "asked",
    "gen_ai.response.id": "answered",
    "gen_ai.response.model": "served",
    "gen_ai.request.model": "wanted",
}


@pytest.mark.parametrize("step", [1, -1], ids=["better spelling first", "better spelling last"])
def test_of_two_spellings_the_better_one_that_can_be_read_counts(
    served: Serving, step: int
) -> None:
    counts = {**VLLM, **BOTH_SPELLINGS}
    record, content = send_one(served, span(dict([*counts.items()][::step])))
    assert (record.input_tokens, record.output_tokens, record.ttft_s) == (500, 50, 0.5)
    assert (record.request_id, record.model) == ("asked", "served")
    assert not content.screened
    served.forget()
    unreadable = {
        "gen_ai.usage.input_tokens": "500",
        "gen_ai.latency.time_to_first_token": b"0.5",
        "gen_ai.request.id": "x" * MEGABYTE,
        "gen_ai.response.model": "",
    }
    counts = {**BOTH_SPELLINGS, **unreadable}
    record, content = send_one(served, span(dict([*counts.items()][::step])))
    assert (record.input_tokens, record.ttft_s) == (400, 0.6)
    assert (record.request_id, record.model) == ("answered", "wanted")
    assert content.screened == {
        ("input_tokens", "wrong_type"): 1,
        ("ttft_s", "wrong_type"): 1,
        ("request_id", "too_long"): 1,
    }


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("gen_ai.latency.e2e", 2, 2.0),
        (SECONDS_KEY, 0, 0.0),
        (SECONDS_KEY, 0.0, 0.0),
        (COUNT_KEY, 300.0, 300),
        (COUNT_KEY, 0, 0),
        (TEXT_KEY, "", None),
        (TEXT_KEY, ["only"], "only"),
        (TEXT_KEY, "x" * 256, "x" * 256),
        (TEXT_KEY, "日本\u200b🙂'; --", "日本\u200b🙂'; --"),
    ],
)
def test_values_of_near_types_are_read(
    served: Serving, key: str, value: object, expected: object
) -> None:
    record, content = send_one(served, vllm_span({key: value}))
    name = REQUEST_ATTRIBUTES[key][0]
    assert (getattr(record, name), type(getattr(record, name))) == (expected, type(expected))
    assert not content.screened


MAP = AnyValue(kvlist_value=KeyValueList(values=pairs({"a": 1})))
DEEP = any_value("deep")
for _ in range(40):
    DEEP = any_value([DEEP])


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        *((SECONDS_KEY, value, "wrong_type") for value in ("0.5", True, b"1", [0.5], None, MAP)),
        *((SECONDS_KEY, value, "not_finite") for value in (math.nan, math.inf, -math.inf)),
        *((SECONDS_KEY, value, "negative") for value in (-0.5, -(2**63))),
        *((SECONDS_KEY, value, "longer_than_request") for value in (1.3, 1e308)),
        ("gen_ai.latency.e2e", math.nan, "not_finite"),
        ("gen_ai.latency.e2e", 1e300, "longer_than_request"),
        *((COUNT_KEY, value, "wrong_type") for value in ("300", 11.5, math.nan, math.inf)),
        (COUNT_KEY, -1, "negative"),
        *((COUNT_KEY, value, "too_large") for value in (2**63 - 1, 1e300)),
        ("gen_ai.usage.cached_tokens", -1, "negative"),
        *(("gen_ai.usage.cached_tokens", value, "more_than_whole") for value in (301, 1e300)),
        ("gen_ai.usage.reasoning.output_tokens", 12, "more_than_whole"),
        *((TEXT_KEY, value, "wrong_type") for value in (7, b"id", ["a", "b"], [])),
        *((TEXT_KEY, "x" * length, "too_long") for length in (257, MEGABYTE)),
        (TEXT_KEY, "a\0b", "control_character"),
        ("gen_ai.response.model", "m\0", "control_character"),
        ("gen_ai.response.finish_reasons", "x" * 65, "too_long"),
    ],
)
def test_a_value_that_cannot_be_a_fact_is_unknown_and_counted(
    served: Serving, key: str, value: object, reason: str
) -> None:
    record, content = send_one(served, vllm_span({key: value}))
    name = REQUEST_ATTRIBUTES[key][0]
    assert getattr(record, name) is None
    assert content.screened == {(name, reason): 1}
    assert record.output_tokens == 11


def test_a_deep_value_of_an_id_is_read_or_refused_but_never_a_crash(served: Serving) -> None:
    record, _ = send_one(served, vllm_span({TEXT_KEY: DEEP, "other": DEEP}))
    assert record.request_id == "deep"


@pytest.mark.parametrize(
    "unwanted",
    [
        pytest.param({"gen_ai.prompt": "x" * MEGABYTE}, id="a megabyte of prompt"),
        pytest.param({"x" * MEGABYTE: 1}, id="a megabyte of key"),
        pytest.param({"": None, "gen_ai.latency.": "?", "a\0b": "\0"}, id="odd keys"),
        pytest.param({f"key-{number}": number for number in range(20_000)}, id="many"),
    ],
)
def test_what_is_not_wanted_does_no_harm(served: Serving, unwanted: Mapping[str, object]) -> None:
    record, content = send_one(served, vllm_span(unwanted))
    assert (record.request_id, record.ttft_s, content.screened) == ("chatcmpl-1", 0.2, {})
