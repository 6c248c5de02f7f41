"""One exchange from its beginning to its end."""

import json
from typing import Any

import pytest

from agent.records.request import RequestRecord, Status
from agent.sources.proxy.exchange import Ending
from agent.sources.proxy.measuring.json_values import parse_object
from agent.sources.proxy.measuring.request_measuring import MeasuringOptions
from agent.sources.proxy.measuring.response_readers import MAX_BODY_BYTES
from tests.sources.proxy.measuring.playing import (
    ARRIVED_AT,
    ARRIVED_AT_S,
    JSON_HEAD,
    REQUESTS,
    STREAM_HEAD,
    Desk,
    events,
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
every_failure = pytest.mark.parametrize(("ending", "outcome"), FAILED.items())


@pytest.mark.parametrize(
    ("method", "path", "wanted"),
    [
        ("POST", "/v1/chat/completions", True),
        ("POST", "/v1/completions", True),
        ("POST", "/v1/responses", True),
        ("POST", "/v1/messages", True),
        ("GET", "/v1/chat/completions", False),
        ("GET", "/v1/responses/resp_1", False),
        ("POST", "/v1/responses/resp_1/cancel", False),
        ("POST", "/v1/messages/count_tokens", False),
        ("POST", "/v1/embeddings", False),
        ("GET", "/metrics", False),
    ],
)
def test_requests_for_text_are_measured_and_all_others_are_not(
    method: str, path: str, wanted: bool
) -> None:
    assert Desk().measuring.wants(method, path) is wanted


def test_a_record_says_who_asked_what_of_whom_and_when() -> None:
    played = play("chat.usage", headers=((b"x-request-id", b"mine"),))
    record = played.record
    told = (record.agent, record.engine, record.model, record.route, record.request_id)
    assert told == ("agent-0", "chat-0", "tiny-llama", CHAT, "mine")
    assert (record.started_at, record.ended_at) == (ARRIVED_AT, ARRIVED_AT + 28)
    assert record.received_at == record.ended_at
    assert (record.e2e_s, record.http_status) == (28, 200)
    assert played.view.streamed is True
    assert played.exchange.model == "tiny-llama"


# How exchanges end


@every_failure
def test_an_exchange_without_an_answer_ends_as_the_relay_saw(ending: Ending, outcome: Any) -> None:
    desk = Desk()
    exchange = desk.begin(CHAT, b'{"model":"m","stream":true}')
    assert exchange.ended(ending, ARRIVED_AT_S + 2) == b""
    (record,) = desk.records
    assert record.proxied is not None
    assert (record.status, record.proxied.error) == outcome
    assert (record.http_status, record.engine, record.ttft_s) == (None, None, None)
    assert (record.e2e_s, record.model) == (2, "m")
    assert record.proxied.first_byte_s is None


@every_failure
def test_a_stream_cut_short_ends_as_the_relay_saw(ending: Ending, outcome: Any) -> None:
    played = play("chat.usage", events(recorded("chat.usage"))[:6], ending=ending)
    assert (played.record.status, played.view.error) == outcome
    assert (played.record.ttft_s, played.record.output_tokens) == (2, None)
    assert sum((played.view.gaps or {}).values()) == 4


@every_failure
@pytest.mark.parametrize("name", ["chat.usage", "completions.usage", "responses", "messages"])
def test_a_stream_that_had_ended_is_whole_whoever_leaves_then(
    ending: Ending, outcome: Any, name: str
) -> None:
    played = play(name, ending=ending)
    assert (played.record.status, played.view.error) == (Status.OK, None)


@pytest.mark.parametrize("name", ["chat.usage", "completions.usage", "responses", "messages"])
def test_a_stream_that_just_stops_has_failed(name: str) -> None:
    played = play(name, events(recorded(name))[:6])
    assert (played.record.status, played.view.error) == (Status.ERROR, "unfinished")


def test_a_client_that_left_before_the_first_token_got_none() -> None:
    role_only = events(recorded("chat.usage"))[:1]
    played = play("chat.usage", role_only, ending=Ending.CLIENT_GONE)
    assert (played.record.ttft_s, played.record.output_tokens) == (None, 0)
    desk = Desk()
    desk.begin(CHAT, b'{"stream":true}').ended(Ending.CLIENT_GONE, ARRIVED_AT_S + 9)
    assert desk.records[0].output_tokens == 0


def test_what_a_client_that_left_a_whole_answer_would_have_got_is_unknown() -> None:
    desk = Desk()
    desk.begin(CHAT, b'{"stream":false}').ended(Ending.CLIENT_GONE, ARRIVED_AT_S + 9)
    assert desk.records[0].output_tokens is None


def test_tokens_counted_on_the_way_are_known_when_the_client_leaves() -> None:
    sent = events(recorded("chat.continuous"))[:11]
    record = play("chat.continuous", sent, ending=Ending.CLIENT_GONE).record
    assert record.output_tokens == 10
    assert record.tpot_s == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("http_status", "status"),
    [
        (400, Status.ERROR),
        (404, Status.ERROR),
        (500, Status.ERROR),
        (307, Status.ERROR),
        (429, Status.THROTTLED),
        (503, Status.THROTTLED),
    ],
)
def test_a_refusal_is_told_by_its_number(http_status: int, status: Status) -> None:
    body = b'{"error":{"message":"about the prompt","type":"BadRequestError","code":400}}'
    desk = Desk()
    played = desk.play(
        CHAT, {"stream": True}, [body], status=http_status, head=JSON_HEAD, ending=Ending.COMPLETE
    )
    assert (played.record.status, played.record.http_status) == (status, http_status)
    assert played.view.error == f"http_{http_status}"
    assert played.record.ttft_s is None
    assert played.client_bytes == body
    assert desk.failures == []


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
@pytest.mark.parametrize("ending", [Ending.COMPLETE, Ending.CLIENT_GONE, Ending.ENGINE_GONE])
def test_an_error_inside_a_stream_is_told_by_its_word_never_by_its_text(
    name: str, event: bytes, error: str, ending: Ending
) -> None:
    played = Desk().play(route(name), {"stream": True}, [event + b"\n\n"], ending=ending)
    assert (played.record.status, played.view.error) == (Status.ERROR, error)
    assert "secret" not in repr(played.record)


# Whole answers


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
def test_a_whole_answer_tells_its_tokens_but_not_when_they_came(
    name: str, tokens: tuple[int, ...], reason: str
) -> None:
    sent = recorded_whole(name)
    played = Desk().play(
        route(name), {"model": "m"}, [sent[:100], sent[100:]], head=JSON_HEAD, every_s=0.5
    )
    record, view = played.record, played.view
    counts = (record.input_tokens, record.cached_tokens, record.output_tokens)
    assert (*counts, record.reasoning_tokens) == tokens
    assert (record.status, record.finish_reason) == (Status.OK, reason)
    assert (record.ttft_s, record.tpot_s, record.max_gap_s, view.gaps) == (None,) * 4
    assert (record.e2e_s, view.first_byte_s, view.streamed) == (1.5, 0.5, False)
    assert played.client_pieces == (sent[:100], sent[100:], b"")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"not json", "answer_unreadable"),
        (b"[]", "answer_unreadable"),
        (b" " * (MAX_BODY_BYTES + 1), "answer_too_large"),
    ],
)
def test_a_whole_answer_that_cannot_be_read_is_passed_on_and_counted(
    body: bytes, reason: str
) -> None:
    desk = Desk()
    played = desk.play(CHAT, {}, [body[:9], body[9:]], head=JSON_HEAD)
    assert played.client_bytes == body
    assert (played.record.status, played.record.output_tokens) == (Status.OK, None)
    assert desk.failures == [reason]


@pytest.mark.parametrize(
    ("reasons", "told"),
    [(["length", "length"], "length"), (["stop", "length"], "length,stop"), ([None, 7], None)],
)
def test_different_reasons_of_several_choices_are_all_told(
    reasons: list[object], told: str | None
) -> None:
    answer = {"choices": [{"finish_reason": reason} for reason in reasons]}
    played = Desk().play(CHAT, {"n": 2}, [json.dumps(answer).encode()], head=JSON_HEAD)
    assert played.record.finish_reason == told


@pytest.mark.parametrize(
    ("name", "answer", "told"),
    [
        ("messages", {"stop_reason": "end_turn"}, "stop"),
        ("messages", {"stop_reason": "tool_use"}, "tool_calls"),
        ("messages", {"stop_reason": "refusal"}, "refusal"),
        ("responses", {"status": "completed", "output": []}, "stop"),
        (
            "responses",
            {"status": "completed", "output": [{"type": "function_call"}]},
            "tool_calls",
        ),
        (
            "responses",
            {"status": "incomplete", "incomplete_details": {"reason": "content_filter"}},
            "content_filter",
        ),
    ],
)
def test_reasons_are_told_in_the_words_of_chat(name: str, answer: Any, told: str) -> None:
    played = Desk().play(route(name), {}, [json.dumps(answer).encode()], head=JSON_HEAD)
    assert played.record.finish_reason == told


def test_input_read_from_and_put_into_the_cache_is_input_of_a_message() -> None:
    usage = {
        "input_tokens": 5,
        "cache_read_input_tokens": 70,
        "cache_creation_input_tokens": 900,
        "output_tokens": 3,
    }
    answer = json.dumps({"usage": usage, "stop_reason": "end_turn"}).encode()
    record = Desk().play(route("messages"), {}, [answer], head=JSON_HEAD).record
    assert (record.input_tokens, record.cached_tokens, record.output_tokens) == (975, 70, 3)


@pytest.mark.parametrize("count", [-1, 1.5, "7", True, None, 10**12, [1]])
def test_a_count_that_cannot_be_one_is_unknown(count: object) -> None:
    answer = {"usage": {"prompt_tokens": count, "completion_tokens": 4}}
    record = Desk().play(CHAT, {}, [json.dumps(answer).encode()], head=JSON_HEAD).record
    assert (record.input_tokens, record.output_tokens) == (None, 4)


# Bytes and heads


def test_bytes_are_those_that_the_client_sent_and_got() -> None:
    desk = Desk()
    played = desk.play(CHAT, REQUESTS["chat.plain"], events(recorded("chat.usage")))
    assert played.view.input_bytes == len(json.dumps(REQUESTS["chat.plain"]))
    assert played.view.output_bytes == len(played.client_bytes) < len(recorded("chat.usage"))


def test_a_body_that_is_relayed_as_it_comes_is_counted_and_its_answer_is_read() -> None:
    desk = Desk()
    exchange = desk.begin("/v1/messages", None)
    exchange.sent(1000)
    exchange.sent(24)
    exchange.answered(200, STREAM_HEAD, ARRIVED_AT_S)
    exchange.chunk(recorded("messages"), ARRIVED_AT_S + 1)
    exchange.ended(Ending.COMPLETE, ARRIVED_AT_S + 2)
    (record,) = desk.records
    assert record.proxied is not None
    assert (record.proxied.input_bytes, record.proxied.streamed) == (1024, True)
    assert (record.model, record.output_tokens, record.proxied.choices) == (None, 24, None)
    assert desk.failures == []


def test_several_choices_that_nobody_announced_are_known_by_their_ends() -> None:
    desk = Desk()
    exchange = desk.begin(CHAT, None)
    exchange.answered(200, STREAM_HEAD, ARRIVED_AT_S)
    for place, event in enumerate(events(recorded("chat-n2.usage")), 1):
        exchange.chunk(event, ARRIVED_AT_S + place)
    exchange.ended(Ending.COMPLETE, ARRIVED_AT_S + 60)
    (record,) = desk.records
    assert (record.ttft_s, record.tpot_s, record.max_gap_s) == (3, None, None)


def test_a_body_that_cannot_be_read_goes_to_the_engine_as_it_is_and_is_counted() -> None:
    desk = Desk()
    exchange = desk.begin(CHAT, b"not json")
    assert (exchange.body, exchange.model) == (None, None)
    assert desk.failures == ["body_unreadable"]


def test_a_compressed_answer_is_passed_on_and_only_its_bytes_are_known() -> None:
    desk = Desk()
    head = (*STREAM_HEAD, (b"content-encoding", b"gzip"))
    played = desk.play(CHAT, {"stream": True}, [b"\x1f\x8b", b"rest"], head=head)
    assert played.client_pieces == (b"\x1f\x8b", b"rest", b"")
    assert (played.record.status, played.record.output_tokens) == (Status.OK, None)
    assert (played.view.first_byte_s, played.view.output_bytes) == (1, 6)
    assert desk.failures == ["compressed_answer"]


def test_an_engine_that_is_asked_for_counts_is_asked_not_to_compress_and_no_other() -> None:
    plain = (b"accept-encoding", b"identity")
    assert plain in Desk().begin(CHAT, b'{"stream":true}').headers
    assert plain not in Desk().begin(CHAT, b'{"stream":false}').headers
    assert plain not in Desk().begin("/v1/messages", b'{"stream":true}').headers
    quiet = Desk(MeasuringOptions(count_tokens=False))
    assert plain not in quiet.begin(CHAT, b'{"stream":true}').headers


def test_the_length_of_an_answer_is_not_promised_where_it_may_get_shorter() -> None:
    head = (*STREAM_HEAD, (b"content-length", b"9999"), (b"x-other", b"1"))
    counted = Desk().play(CHAT, {"stream": True}, [], head=head)
    assert list(counted.client_head) == [*STREAM_HEAD, (b"x-other", b"1")]
    assert Desk().play("/v1/messages", {"stream": True}, [], head=head).client_head == head


# When the agent itself is at fault


@pytest.mark.parametrize("count_tokens", [True, False])
def test_a_fault_of_the_agent_costs_the_client_nothing(
    count_tokens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = recorded("chat.usage")
    pieces = [sent[at : at + 300] for at in range(0, len(sent), 300)]

    def broken_on_the_way(text: bytes) -> Any:
        if b"otur" in text:
            raise KeyError("a fault")
        return parse_object(text)

    monkeypatch.setattr(
        "agent.sources.proxy.measuring.stream_reader.parse_object", broken_on_the_way
    )
    desk = Desk(MeasuringOptions(count_tokens=count_tokens))
    played = desk.play(CHAT, REQUESTS["chat.plain"], pieces)
    assert played.client_bytes == sent
    assert desk.failures == ["measuring"]
    assert played.record.ttft_s is not None


@pytest.mark.parametrize("count_tokens", [True, False])
def test_a_fault_in_what_the_client_has_already_sends_nothing_twice(
    count_tokens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(text: bytes) -> Any:
        raise KeyError("a fault")

    monkeypatch.setattr("agent.sources.proxy.measuring.stream_reader.parse_object", broken)
    desk = Desk(MeasuringOptions(count_tokens=count_tokens))
    exchange = desk.begin(CHAT, b'{"stream":true}')
    exchange.answered(200, STREAM_HEAD, ARRIVED_AT_S)
    first, second = b'data: {"choices":[]}\n\n', b'data: {"choices":[{}]}\n\n'
    assert exchange.chunk(first, ARRIVED_AT_S + 1) == first
    assert desk.failures == []
    exchange.catch_up()
    assert desk.failures == ["measuring"]
    assert exchange.chunk(second, ARRIVED_AT_S + 2) == second
    assert exchange.ended(Ending.COMPLETE, ARRIVED_AT_S + 3) == b""
    assert desk.failures == ["measuring"]


def test_a_record_that_cannot_be_kept_is_counted_and_the_client_is_served() -> None:
    def broken(record: RequestRecord) -> None:
        raise OSError(f"no space left for {record.trace_id}")

    desk = Desk(sink=broken)
    exchange = desk.begin(CHAT, b'{"stream":true}')
    exchange.answered(200, STREAM_HEAD, ARRIVED_AT_S)
    exchange.chunk(b"data: {", ARRIVED_AT_S)
    assert exchange.ended(Ending.ENGINE_GONE, ARRIVED_AT_S + 1) == b"data: {"
    assert desk.failures == ["record"]
