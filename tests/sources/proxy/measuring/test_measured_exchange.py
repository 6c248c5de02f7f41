"""The record of one exchange."""

import json
from typing import Any

import pytest

from agent.records.request import RequestRecord, Status
from agent.sources.proxy.exchange import Ending
from agent.sources.proxy.measuring.json_values import JsonReader
from agent.sources.proxy.measuring.measured_exchange import MeasuringOptions
from agent.sources.proxy.measuring.response_readers import MAX_BODY_BYTES
from agent.sources.proxy.measuring.stream_reader import MAX_DEFERRED_PIECES
from tests.sources.proxy.measuring.playing import (
    ARRIVED_AT,
    ARRIVED_AT_S,
    JSON_HEAD,
    MODEL,
    REQUESTS,
    STREAM_HEAD,
    Setup,
    events,
    ids_in,
    play,
    recorded,
    recorded_whole,
    route,
)

CHAT = "/v1/chat/completions"
FAILED = {
    Ending.CLIENT_GONE: (Status.CANCELLED, "client_gone"),
    Ending.ENGINE_GONE: (Status.ERROR, "engine_gone"),
    Ending.UNREACHABLE: (Status.ERROR, "unreachable"),
    Ending.TIMEOUT: (Status.TIMEOUT, "timeout"),
    Ending.REFUSED: (Status.ERROR, "refused"),
}


@pytest.mark.parametrize(
    ("method", "path", "wanted"),
    [
        ("POST", "/v1/chat/completions", True),
        ("POST", "/v1/completions", True),
        ("POST", "/v1/responses", True),
        ("POST", "/v1/messages", True),
        ("GET", "/v1/chat/completions", False),
        ("POST", "/v1/messages/count_tokens", False),
        ("POST", "/v1/embeddings", False),
    ],
)
def test_only_posts_to_generation_routes_are_measured(method: str, path: str, wanted: bool) -> None:
    assert Setup().measuring.wants(method, path) is wanted


def test_the_record_has_ids_engine_model_route_and_times() -> None:
    played = play("chat.usage", headers=((b"x-request-id", b"mine"),))
    record = played.record
    fields = (record.agent, record.engine, record.model, record.route, record.request_id)
    assert fields == ("agent-0", "chat-0", "tiny-llama", CHAT, "mine")
    assert (record.started_at, record.ended_at) == (ARRIVED_AT, ARRIVED_AT + 28)
    assert record.received_at == record.ended_at
    assert (record.e2e_s, record.http_status) == (28, 200)
    assert played.view.streamed is True
    assert played.exchange.model == "tiny-llama"


# Endings


@pytest.mark.parametrize(("ending", "outcome"), FAILED.items())
def test_an_exchange_without_a_response_has_the_status_of_its_ending(
    ending: Ending, outcome: Any
) -> None:
    setup = Setup()
    exchange = setup.begin(CHAT, b'{"model":"m","stream":true}')
    assert exchange.ended(ending, ARRIVED_AT_S + 2) == b""
    (record,) = setup.records
    assert record.proxied is not None
    assert (record.status, record.proxied.error) == outcome
    assert (record.http_status, record.engine, record.ttft_s) == (None, None, None)
    assert (record.e2e_s, record.model) == (2, "m")
    assert record.proxied.first_byte_s is None


def test_a_cut_stream_has_the_status_of_its_ending() -> None:
    played = play("chat.usage", events(recorded("chat.usage"))[:6], ending=Ending.ENGINE_GONE)
    assert (played.record.status, played.view.error) == FAILED[Ending.ENGINE_GONE]
    assert (played.record.ttft_s, played.record.output_tokens) == (2, None)
    assert sum((played.view.gaps or {}).values()) == 4


@pytest.mark.parametrize("name", ["chat.usage", "completions.usage", "responses", "messages"])
def test_a_client_that_leaves_after_the_end_got_the_whole_stream(name: str) -> None:
    played = play(name, ending=Ending.CLIENT_GONE)
    assert (played.record.status, played.view.error) == (Status.OK, None)


@pytest.mark.parametrize("name", ["chat.usage", "completions.usage", "responses", "messages"])
def test_a_stream_without_an_end_failed(name: str) -> None:
    played = play(name, events(recorded(name))[:6])
    assert (played.record.status, played.view.error) == (Status.ERROR, "unfinished")


def test_a_client_that_left_before_the_first_token_got_no_tokens() -> None:
    role_only = events(recorded("chat.usage"))[:1]
    played = play("chat.usage", role_only, ending=Ending.CLIENT_GONE)
    assert (played.record.ttft_s, played.record.output_tokens) == (None, 0)
    setup = Setup()
    setup.begin(CHAT, b'{"stream":true}').ended(Ending.CLIENT_GONE, ARRIVED_AT_S + 9)
    assert setup.records[0].output_tokens == 0


def test_the_tokens_of_an_abandoned_whole_response_are_unknown() -> None:
    setup = Setup()
    setup.begin(CHAT, b'{"stream":false}').ended(Ending.CLIENT_GONE, ARRIVED_AT_S + 9)
    assert setup.records[0].output_tokens is None


def test_continuous_counts_are_known_when_the_client_leaves() -> None:
    sent = events(recorded("chat.continuous"))[:11]
    record = play("chat.continuous", sent, ending=Ending.CLIENT_GONE).record
    assert record.output_tokens == 10
    assert record.tpot_s == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("http_status", "status"),
    [
        *((mistake, Status.INVALID) for mistake in (400, 401, 403, 404, 413, 422, 451)),
        *((failure, Status.ERROR) for failure in (307, 408, 499, 500, 502, 504)),
        (429, Status.THROTTLED),
        (503, Status.THROTTLED),
    ],
)
def test_an_http_error_has_its_status_as_error(http_status: int, status: Status) -> None:
    body = b'{"error":{"message":"about the prompt","type":"BadRequestError","code":400}}'
    setup = Setup()
    played = setup.play(
        CHAT, {"stream": True}, [body], status=http_status, head=JSON_HEAD, ending=Ending.COMPLETE
    )
    assert (played.record.status, played.record.http_status) == (status, http_status)
    assert played.view.error == f"http_{http_status}"
    assert played.record.ttft_s is None
    assert played.client_bytes == body
    assert setup.failures == []


# As vLLM 0.32.0, SGLang, OpenAI and Anthropic write them.
@pytest.mark.parametrize(
    ("name", "event", "http_status"),
    [
        ("chat", b'data: {"error":{"type":"BadRequestError","param":null,"code":400}}', 400),
        ("chat", b'data: {"error":{"type":"InternalServerError","code":500}}', 500),
        ("chat", b'data: {"error":{"type":"InternalServerError","code":"400"}}', 400),
        ("completions", b'data: {"error":{"type":"NotFoundError","code":404}}', 404),
        ("completions", b'data: {"error":{"type":"BadRequestError"}}', 400),
        ("completions", b'data: {"error":{"type":"Too Many Requests","code":429}}', 429),
        ("completions", b'data: {"error":{"type":"ServiceUnavailableError","code":503}}', 503),
        ("completions", b'data: {"error":{"type":"NotImplementedError","code":501}}', 501),
        ("completions", b'data: {"error":{"type":"Gateway Timeout","code":408}}', 408),
        ("chat", b'data: {"error":{"message":"s","code":9}}', 500),
        ("chat", b'data: {"error":{"message":"s","code":true}}', 500),
        ("responses", b'data: {"type":"error","code":"rate_limit_exceeded"}', 429),
        (
            "responses",
            b'data: {"type":"response.failed","response":{"error":{"code":"invalid_prompt"}}}',
            400,
        ),
        ("messages", b'data: {"type":"error","error":{"type":"invalid_request_error"}}', 400),
        ("messages", b'data: {"type":"error","error":{"type":"not_found_error"}}', 404),
        ("messages", b'data: {"type":"error","error":{"type":"rate_limit_error"}}', 429),
        ("messages", b'data: {"type":"error","error":{"type":"overloaded_error"}}', 503),
        ("messages", b'data: {"type":"error","error":{"type":"internal_error"}}', 500),
    ],
)
def test_an_error_in_a_stream_counts_as_the_http_status_that_it_stands_for(
    name: str, event: bytes, http_status: int
) -> None:
    inside, outside = Setup(), Setup()
    played = inside.play(route(name), {"stream": True}, [event + b"\n\n"], ending=Ending.COMPLETE)
    plain = outside.play(route(name), {"stream": True}, [b"{}"], status=http_status, head=JSON_HEAD)
    assert played.record.status is plain.record.status
    assert (played.record.http_status, played.exchange.error_status) == (200, http_status)


@pytest.mark.parametrize(
    ("name", "event", "error"),
    [
        ("chat", b'data: {"error": {"type": "BadRequestError", "code": 400}}', "BadRequestError"),
        ("chat", b'data: {"error":{"message":"my secret prompt"}}', "stream_error"),
        ("chat", b'data: {"error":"my secret prompt"}', "stream_error"),
        ("chat", b'data: {"error":{"type":"my secret prompt"}}', "stream_error"),
        ("chat", b'data: {"error":{"code":"server_error"}}', "server_error"),
        ("completions", b'data: {"error":{"type":"X"}}', "X"),
        ("messages", b'event: error\ndata: {"type":"error","error":{"type":"E.x-1"}}', "E.x-1"),
        ("messages", b'event: error\ndata: {"type":"error"}', "stream_error"),
        (
            "responses",
            b'data: {"type":"error","code":"server_error","message":"s"}',
            "server_error",
        ),
        (
            "responses",
            b'data: {"type":"response.failed","response":{"status":"failed","error":{"code":"c"}}}',
            "c",
        ),
        (
            "responses",
            b'data: {"type":"response.failed","response":{"status":"failed","error":null}}',
            "stream_error",
        ),
    ],
)
def test_an_error_in_a_stream_is_recorded_by_its_code_and_never_its_message(
    name: str, event: bytes, error: str
) -> None:
    sent = [event + b"\n\n"]
    played = Setup().play(route(name), {"stream": True}, sent, ending=Ending.ENGINE_GONE)
    assert played.view.error == error
    assert "secret" not in repr(played.record)


# Whole responses


@pytest.mark.parametrize(
    ("name", "tokens", "reason"),
    [
        ("chat", (8, 0, 24, None), "length"),
        ("chat-reasoning", (8, 0, 40, 0), "length"),
        ("completions", (5, 0, 24, None), "length"),
        ("responses", (8, 0, 24, 0), "length"),
        ("messages", (8, 0, 24, None), "length"),
    ],
)
def test_a_whole_response_has_token_counts_and_no_token_times(
    name: str, tokens: tuple[int, ...], reason: str
) -> None:
    setup, sent = Setup(), recorded_whole(name)
    played = setup.play(
        route(name), {"model": "m"}, [sent[:100], sent[100:]], head=JSON_HEAD, every_s=0.5
    )
    record, view = played.record, played.view
    counts = (record.input_tokens, record.cached_tokens, record.output_tokens)
    assert (*counts, record.reasoning_tokens) == tokens
    assert (record.status, record.finish_reason) == (Status.OK, reason)
    assert (record.ttft_s, record.tpot_s, record.max_gap_s, view.gaps) == (None,) * 4
    assert (record.e2e_s, view.first_byte_s, view.streamed) == (1.5, 0.5, False)
    assert played.client_pieces == (sent[:100], sent[100:], b"")
    assert {view.response_id} == ids_in(sent)
    assert setup.tracing.spans[0].response_models == [MODEL]


@pytest.mark.parametrize("found", [7, "", "x" * 321, "a\nb", None])
def test_an_unusable_id_in_a_response_is_unknown(found: object) -> None:
    body = json.dumps({"id": found, "choices": []}).encode()
    played = Setup().play(CHAT, {"model": "m"}, [body], head=JSON_HEAD)
    assert played.view.response_id is None


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"not json", "answer_unreadable"),
        (b"[]", "answer_unreadable"),
        (b" " * (MAX_BODY_BYTES + 1), "answer_too_large"),
    ],
)
def test_an_unreadable_whole_response_is_relayed_and_counted(body: bytes, reason: str) -> None:
    setup = Setup()
    played = setup.play(CHAT, {}, [body[:9], body[9:]], head=JSON_HEAD)
    assert played.client_bytes == body
    assert (played.record.status, played.record.output_tokens) == (Status.OK, None)
    assert setup.failures == [reason]


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        (["length", "length"], "length"),
        (["stop", "length"], "length,stop"),
        ([None, 7], None),
        (["x" * 65, "a\0b"], "other"),
        (["x" * 40, "y" * 40], None),
    ],
)
def test_different_finish_reasons_of_several_choices_are_joined(
    reasons: list[object], expected: str | None
) -> None:
    response = {"choices": [{"finish_reason": reason} for reason in reasons]}
    played = Setup().play(CHAT, {"n": 2}, [json.dumps(response).encode()], head=JSON_HEAD)
    assert played.record.finish_reason == expected


@pytest.mark.parametrize(
    ("name", "response", "expected"),
    [
        ("messages", {"stop_reason": "end_turn"}, "stop"),
        ("messages", {"stop_reason": "tool_use"}, "tool_calls"),
        ("messages", {"stop_reason": "refusal"}, "refusal"),
        ("responses", {"status": "completed", "output": []}, "stop"),
        ("responses", {"status": "completed", "output": [{"type": "function_call"}]}, "tool_calls"),
        (
            "responses",
            {"status": "incomplete", "incomplete_details": {"reason": "content_filter"}},
            "content_filter",
        ),
    ],
)
def test_finish_reasons_use_the_words_of_chat_completions(
    name: str, response: Any, expected: str
) -> None:
    played = Setup().play(route(name), {}, [json.dumps(response).encode()], head=JSON_HEAD)
    assert played.record.finish_reason == expected


def test_input_tokens_of_messages_include_cache_reads_and_writes() -> None:
    usage = {
        "input_tokens": 5,
        "cache_read_input_tokens": 70,
        "cache_creation_input_tokens": 900,
        "output_tokens": 3,
    }
    response = json.dumps({"usage": usage, "stop_reason": "end_turn"}).encode()
    record = Setup().play(route("messages"), {}, [response], head=JSON_HEAD).record
    assert (record.input_tokens, record.cached_tokens, record.output_tokens) == (975, 70, 3)


@pytest.mark.parametrize("count", [-1, 1.5, True, None, 10**12])
def test_an_invalid_token_count_is_unknown(count: object) -> None:
    response = {"usage": {"prompt_tokens": count, "completion_tokens": 4}}
    record = Setup().play(CHAT, {}, [json.dumps(response).encode()], head=JSON_HEAD).record
    assert (record.input_tokens, record.output_tokens) == (None, 4)


@pytest.mark.parametrize(
    ("name", "head", "response", "reason"),
    [
        ("chat", JSON_HEAD, {"choices": [{"finish_reason": "abort"}]}, "abort"),
        ("chat", JSON_HEAD, {"choices": [{"finish_reason": "error"}]}, "error"),
        (
            "completions",
            JSON_HEAD,
            {"choices": [{"finish_reason": "stop"}, {"finish_reason": "abort"}]},
            "abort",
        ),
        ("responses", JSON_HEAD, {"status": "cancelled"}, "abort"),
        ("chat", STREAM_HEAD, {"choices": [{"delta": {}, "finish_reason": "abort"}]}, "abort"),
        (
            "responses",
            STREAM_HEAD,
            {"type": "response.completed", "response": {"status": "cancelled"}},
            "abort",
        ),
    ],
)
def test_a_request_that_the_engine_gave_up_failed(
    name: str, head: Any, response: Any, reason: str
) -> None:
    text = json.dumps(response).encode()
    sent = [text] if head is JSON_HEAD else [b"data: " + text + b"\n\n", b"data: [DONE]\n\n"]
    played = Setup().play(route(name), {"stream": head is STREAM_HEAD}, sent, head=head)
    assert (played.record.status, played.view.error) == (Status.ERROR, reason)


@pytest.mark.parametrize(
    ("cached", "reasoning", "known", "failures"),
    [
        (8, 4, (8, 4), []),
        (9, 4, (None, 4), ["usage"]),
        (8, 5, (8, None), ["usage"]),
        (9, 5, (None, None), ["usage"]),
    ],
)
def test_a_part_that_is_larger_than_its_whole_is_unknown_and_counted(
    cached: int, reasoning: int, known: tuple[int | None, int | None], failures: list[str]
) -> None:
    usage = {
        "prompt_tokens": 8,
        "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }
    setup = Setup()
    record = setup.play(CHAT, {}, [json.dumps({"usage": usage}).encode()], head=JSON_HEAD).record
    assert (record.cached_tokens, record.reasoning_tokens) == known
    assert (record.input_tokens, record.output_tokens) == (8, 4)
    assert setup.failures == failures


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        ((*STREAM_HEAD, (b"content-encoding", b"gzip")), b"\x1f\x8b\x08\x00"),
        (STREAM_HEAD, b'data: {"choices":[{"delta":"text"}]}\n\n'),
        (STREAM_HEAD, b"data: text\n\n"),
    ],
)
def test_the_tokens_of_a_stream_that_cannot_be_read_are_unknown_when_the_client_leaves(
    head: Any, piece: bytes
) -> None:
    request = {"model": "m", "stream": True}
    played = Setup().play(CHAT, request, [piece], head=head, ending=Ending.CLIENT_GONE)
    assert (played.record.status, played.record.output_tokens) == (Status.CANCELLED, None)


# Bytes and headers


def test_body_sizes_are_those_of_the_client() -> None:
    setup = Setup()
    played = setup.play(CHAT, REQUESTS["chat.plain"], events(recorded("chat.usage")))
    assert played.view.input_bytes == len(json.dumps(REQUESTS["chat.plain"]))
    assert played.view.output_bytes == len(played.client_bytes) < len(recorded("chat.usage"))


def test_an_unbuffered_body_is_counted_and_its_response_is_measured() -> None:
    setup = Setup()
    exchange = setup.begin("/v1/messages", None)
    exchange.sent(1000)
    exchange.sent(24)
    exchange.answered(200, STREAM_HEAD, ARRIVED_AT_S)
    exchange.chunk(recorded("messages"), ARRIVED_AT_S + 1)
    exchange.ended(Ending.COMPLETE, ARRIVED_AT_S + 2)
    (record,) = setup.records
    assert record.proxied is not None
    assert (record.proxied.input_bytes, record.proxied.streamed) == (1024, True)
    assert (record.model, record.output_tokens, record.proxied.choices) == (None, 24, None)
    assert setup.failures == ["body_not_read"]


def test_several_choices_are_recognised_by_their_finish_reasons() -> None:
    setup = Setup()
    exchange = setup.begin(CHAT, None)
    exchange.answered(200, STREAM_HEAD, ARRIVED_AT_S)
    for place, event in enumerate(events(recorded("chat-n2.usage")), 1):
        exchange.chunk(event, ARRIVED_AT_S + place)
    exchange.ended(Ending.COMPLETE, ARRIVED_AT_S + 60)
    (record,) = setup.records
    assert (record.ttft_s, record.tpot_s, record.max_gap_s) == (3, None, None)


def test_an_unreadable_body_is_relayed_unchanged_and_counted() -> None:
    setup = Setup()
    exchange = setup.begin(CHAT, b"not json")
    assert (exchange.body, exchange.model) == (None, None)
    assert setup.failures == ["body_unreadable"]


def test_of_a_compressed_response_only_bytes_are_known() -> None:
    setup = Setup()
    head = (*STREAM_HEAD, (b"content-encoding", b"gzip"))
    played = setup.play(CHAT, {"stream": True}, [b"\x1f\x8b", b"rest"], head=head)
    assert played.client_pieces == (b"\x1f\x8b", b"rest", b"")
    assert (played.record.status, played.record.output_tokens) == (Status.OK, None)
    assert (played.view.first_byte_s, played.view.output_bytes) == (1, 6)
    assert setup.failures == ["compressed_answer"]


def test_compression_is_refused_only_when_usage_was_added() -> None:
    plain = (b"accept-encoding", b"identity")
    assert plain in Setup().begin(CHAT, b'{"stream":true}').headers
    assert plain not in Setup().begin(CHAT, b'{"stream":false}').headers
    assert plain not in Setup().begin("/v1/messages", b'{"stream":true}').headers
    quiet = Setup(MeasuringOptions(count_tokens=False))
    assert plain not in quiet.begin(CHAT, b'{"stream":true}').headers


def test_content_length_is_dropped_only_when_usage_was_added() -> None:
    head = (*STREAM_HEAD, (b"content-length", b"9999"), (b"x-other", b"1"))
    counted = Setup().play(CHAT, {"stream": True}, [], head=head)
    assert list(counted.client_head) == [*STREAM_HEAD, (b"x-other", b"1")]
    assert Setup().play("/v1/messages", {"stream": True}, [], head=head).client_head == head


# Faults of the agent


@pytest.mark.parametrize("count_tokens", [True, False])
def test_a_fault_in_measuring_loses_no_byte(
    count_tokens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = recorded("chat.usage")
    pieces = [sent[at : at + 300] for at in range(0, len(sent), 300)]

    read = JsonReader.__call__

    def broken_at_one_event(reader: JsonReader[Any, Any], text: bytes) -> Any:
        if b"otur" in text:
            raise KeyError("a fault")
        return read(reader, text)

    monkeypatch.setattr(JsonReader, "__call__", broken_at_one_event)
    setup = Setup(MeasuringOptions(count_tokens=count_tokens))
    played = setup.play(CHAT, REQUESTS["chat.plain"], pieces)
    assert played.client_bytes == sent
    assert setup.failures == ["measuring"]
    assert played.record.ttft_s is not None


@pytest.mark.parametrize("count_tokens", [True, False])
def test_a_fault_in_deferred_work_sends_no_byte_twice(
    count_tokens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(reader: JsonReader[Any, Any], text: bytes) -> Any:
        raise KeyError("a fault")

    monkeypatch.setattr(JsonReader, "__call__", broken)
    setup = Setup(MeasuringOptions(count_tokens=count_tokens))
    exchange = setup.begin(CHAT, b'{"stream":true}')
    exchange.answered(200, STREAM_HEAD, ARRIVED_AT_S)
    first, second = b'data: {"choices":[]}\n\n', b'data: {"choices":[{}]}\n\n'
    for _ in range(MAX_DEFERRED_PIECES):
        assert setup.failures == []
        assert exchange.chunk(first, ARRIVED_AT_S + 1) == first
    assert exchange.chunk(second, ARRIVED_AT_S + 2) == second
    assert exchange.ended(Ending.COMPLETE, ARRIVED_AT_S + 3) == b""
    assert setup.failures == ["measuring"]


def test_a_record_that_cannot_be_stored_is_counted() -> None:
    def broken(record: RequestRecord) -> None:
        raise OSError(f"no space left for {record.trace_id}")

    setup = Setup(sink=broken)
    exchange = setup.begin(CHAT, b'{"stream":true}')
    exchange.answered(200, STREAM_HEAD, ARRIVED_AT_S)
    exchange.chunk(b"data: {", ARRIVED_AT_S)
    assert exchange.ended(Ending.ENGINE_GONE, ARRIVED_AT_S + 1) == b"data: {"
    assert setup.failures == ["record"]
