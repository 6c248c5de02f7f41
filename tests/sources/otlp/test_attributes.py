"""How the values of a span are read: spellings, types and what cannot be a fact."""

import math
from collections.abc import Mapping

import pytest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValueList
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from agent.catalog.spans import REQUEST_ATTRIBUTES, ValueType
from agent.records.request import RequestRecord
from agent.sources.otlp.span_reader import ExportContent
from tests.sources.otlp.doors import post
from tests.sources.otlp.exports import VLLM, any_value, export, pairs, span, vllm_span
from tests.sources.otlp.serving import Serving

MEGABYTE = 1_000_000

SECONDS_KEY = "gen_ai.latency.time_in_queue"
COUNT_KEY = "gen_ai.usage.prompt_tokens"
TEXT_KEY = "gen_ai.request.id"


def send(served: Serving, sent: Span) -> tuple[RequestRecord, ExportContent]:
    """The record of a span, and what was noted of it."""
    assert post(served, export(sent).SerializeToString()).is_full_success
    (content,) = served.counts.contents
    (record,) = content.records
    return record, content


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
    record, content = send(served, span({**others, key: value}))
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
def test_of_two_spellings_the_better_one_counts_in_any_order(served: Serving, step: int) -> None:
    counts = dict(list({**VLLM, **BOTH_SPELLINGS}.items())[::step])
    record, content = send(served, span(counts))
    assert (record.input_tokens, record.output_tokens, record.ttft_s) == (500, 50, 0.5)
    assert (record.request_id, record.model) == ("asked", "served")
    assert not content.screened


@pytest.mark.parametrize("step", [1, -1], ids=["better spelling first", "better spelling last"])
def test_a_better_spelling_that_cannot_be_read_does_not_hide_the_other(
    served: Serving, step: int
) -> None:
    unreadable = {
        "gen_ai.usage.input_tokens": "500",
        "gen_ai.latency.time_to_first_token": b"0.5",
        "gen_ai.request.id": "x" * MEGABYTE,
        "gen_ai.response.model": "",
    }
    counts = dict(list({**BOTH_SPELLINGS, **unreadable}.items())[::step])
    record, content = send(served, span(counts))
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
        pytest.param("gen_ai.latency.e2e", 2, 2.0, id="whole seconds"),
        pytest.param(SECONDS_KEY, 0, 0.0, id="no wait"),
        pytest.param(SECONDS_KEY, 0.0, 0.0, id="no wait as a float"),
        pytest.param(COUNT_KEY, 300.0, 300, id="tokens as a float"),
        pytest.param(COUNT_KEY, 0, 0, id="no tokens"),
        pytest.param(TEXT_KEY, "", None, id="an empty id is none"),
        pytest.param(TEXT_KEY, ["only"], "only", id="a list of one"),
        pytest.param(TEXT_KEY, "x" * 256, "x" * 256, id="a long id"),
        pytest.param(TEXT_KEY, "日本\u200b🙂'; --", "日本\u200b🙂'; --", id="any script"),
    ],
)
def test_values_of_near_types_are_read(
    served: Serving, key: str, value: object, expected: object
) -> None:
    record, content = send(served, vllm_span({key: value}))
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
        pytest.param(SECONDS_KEY, "0.5", "wrong_type", id="seconds as text"),
        pytest.param(SECONDS_KEY, True, "wrong_type", id="seconds as a truth"),
        pytest.param(SECONDS_KEY, b"1", "wrong_type", id="seconds as bytes"),
        pytest.param(SECONDS_KEY, [0.5], "wrong_type", id="seconds in a list"),
        pytest.param(SECONDS_KEY, None, "wrong_type", id="seconds never set"),
        pytest.param(SECONDS_KEY, MAP, "wrong_type", id="seconds in a map"),
        pytest.param(SECONDS_KEY, math.nan, "not_finite", id="not a number"),
        pytest.param(SECONDS_KEY, math.inf, "not_finite", id="without end"),
        pytest.param(SECONDS_KEY, -math.inf, "not_finite", id="without beginning"),
        pytest.param(SECONDS_KEY, -0.5, "negative", id="before it began"),
        pytest.param(SECONDS_KEY, -(2**63), "negative", id="long before it began"),
        pytest.param(SECONDS_KEY, 1.3, "longer_than_request", id="longer than the request"),
        pytest.param(SECONDS_KEY, 1e308, "longer_than_request", id="longer than all time"),
        pytest.param("gen_ai.latency.e2e", math.nan, "not_finite", id="no duration"),
        pytest.param("gen_ai.latency.e2e", 1e300, "longer_than_request", id="endless duration"),
        pytest.param(COUNT_KEY, "300", "wrong_type", id="tokens as text"),
        pytest.param(COUNT_KEY, 11.5, "wrong_type", id="half a token"),
        pytest.param(COUNT_KEY, math.nan, "wrong_type", id="tokens not a number"),
        pytest.param(COUNT_KEY, math.inf, "wrong_type", id="tokens without end"),
        pytest.param(COUNT_KEY, -1, "negative", id="less than no token"),
        pytest.param(COUNT_KEY, 2**63 - 1, "too_large", id="the largest number of tokens"),
        pytest.param(COUNT_KEY, 1e300, "too_large", id="a larger number of tokens"),
        pytest.param("gen_ai.usage.cached_tokens", 301, "more_than_whole", id="cached too many"),
        pytest.param("gen_ai.usage.cached_tokens", -1, "negative", id="cached too few"),
        pytest.param("gen_ai.usage.cached_tokens", 1e300, "more_than_whole", id="cached all"),
        pytest.param(
            "gen_ai.usage.reasoning.output_tokens", 12, "more_than_whole", id="thought too much"
        ),
        pytest.param(TEXT_KEY, 7, "wrong_type", id="id as a number"),
        pytest.param(TEXT_KEY, b"id", "wrong_type", id="id as bytes"),
        pytest.param(TEXT_KEY, ["a", "b"], "wrong_type", id="two ids"),
        pytest.param(TEXT_KEY, [], "wrong_type", id="a list of no ids"),
        pytest.param(TEXT_KEY, "a\0b", "control_character", id="id with a NUL"),
        pytest.param(TEXT_KEY, "x" * 257, "too_long", id="id that is too long"),
        pytest.param(TEXT_KEY, "x" * MEGABYTE, "too_long", id="id of a megabyte"),
        pytest.param("gen_ai.response.model", "m\0", "control_character", id="model with a NUL"),
        pytest.param("gen_ai.response.finish_reasons", "x" * 65, "too_long", id="long reason"),
    ],
)
def test_a_value_that_cannot_be_a_fact_is_unknown_and_counted(
    served: Serving, key: str, value: object, reason: str
) -> None:
    record, content = send(served, vllm_span({key: value}))
    name = REQUEST_ATTRIBUTES[key][0]
    assert getattr(record, name) is None
    assert content.screened == {(name, reason): 1}
    assert record.output_tokens == 11


def test_a_deep_value_of_an_id_is_read_or_refused_but_never_a_crash(served: Serving) -> None:
    record, _ = send(served, vllm_span({TEXT_KEY: DEEP, "other": DEEP}))
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
    record, content = send(served, vllm_span(unwanted))
    assert (record.request_id, record.ttft_s, content.screened) == ("chatcmpl-1", 0.2, {})
