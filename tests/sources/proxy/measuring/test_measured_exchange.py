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
    Played,
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


def test_only_posts_to_generation_routes_are_measured() -> None:
    wants = Setup().measuring.wants
    assert all(wants("POST", path) for path in (CHAT, "/v1/completions", "/v1/responses"))
    assert wants("POST", "/v1/messages")
    assert not wants("POST", "/v1/messages/count_tokens")
    assert not wants("POST", "/v1/embeddings")
    assert not wants("GET", CHAT)


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
def test_a_stream_is_complete_if_its_end_came_whatever_the_connection_did(name: str) -> None:
    played = play(name, ending=Ending.CLIENT_GONE)
    assert (played.record.status, played.view.error) == (Status.OK, None)
    played = play(name, events(recorded(name))[:6])
    assert (played.record.status, played.view.error) == (Status.ERROR, "unfinished")


@pytest.mark.parametrize(("streamed", "tokens"), [(b"true", 0), (b"false", None)])
def test_a_client_that_left_before_its_stream_got_no_tokens(
    streamed: bytes, tokens: int | None
) -> None:
    setup = Setup()
    setup.begin(CHAT, b'{"stream":%b}' % streamed).ended(Ending.CLIENT_GONE, ARRIVED_AT_S + 9)
    assert setup.records[0].output_tokens == tokens
    role_only = events(recorded("chat.usage"))[:1]
    played = play("chat.usage", role_only, ending=Ending.CLIENT_GONE)
    assert (played.record.ttft_s, played.record.output_tokens) == (None, 0)


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
    played = setup.play(CHAT, {"stream": True}, [body], status=http_status, head=JSON_HEAD)
    assert (played.record.status, played.record.http_status) == (status, http_status)
    assert played.view.error == f"http_{http_status}"
    assert played.record.ttft_s is None
    assert played.client_bytes == body
    assert setup.failures == []


SECRET = "my secret prompt"
INVALID = {"type": "response.failed", "response": {"error": {"code": "invalid_prompt"}}}
UNSAID = {"type": "response.failed", "response": {"status": "failed", "error": None}}


# As vLLM 0.32.0, SGLang, OpenAI and Anthropic write them.
@pytest.mark.parametrize(
    ("name", "event", "http_status", "error"),
    [
        *(
            ("chat", {"error": sent}, http_status, error)
            for sent, http_status, error in (
                ({"type": "BadRequestError", "param": None, "code": 400}, 400, "BadRequestError"),
                ({"type": "InternalServerError", "code": 500}, 500, "InternalServerError"),
                ({"type": "InternalServerError", "code": "400"}, 400, "InternalServerError"),
                ({"type": "NotFoundError", "code": 404}, 404, "NotFoundError"),
                ({"type": "BadRequestError"}, 400, "BadRequestError"),
                ({"type": "Too Many Requests", "code": 429}, 429, "stream_error"),
                ({"type": "ServiceUnavailable", "code": 503}, 503, "ServiceUnavailable"),
                ({"type": "NotImplementedError", "code": 501}, 501, "NotImplementedError"),
                ({"type": "Gateway Timeout", "code": 408}, 408, "stream_error"),
                ({"message": SECRET, "code": 9}, 500, "stream_error"),
                ({"message": SECRET, "code": True}, 500, "stream_error"),
                (SECRET, 500, "stream_error"),
                ({"type": SECRET}, 500, "stream_error"),
                ({"code": "server_error"}, 500, "server_error"),
            )
        ),
        ("completions", {"error": {"type": "X"}}, 500, "X"),
        ("responses", {"type": "error", "code": "rate_limit_exceeded"}, 429, "rate_limit_exceeded"),
        ("responses", INVALID, 400, "invalid_prompt"),
        ("responses", UNSAID, 500, "stream_error"),
        *(
            ("messages", {"type": "error", "error": {"type": error}}, http_status, error)
            for http_status, error in (
                (400, "invalid_request_error"),
                (404, "not_found_error"),
                (429, "rate_limit_error"),
                (503, "overloaded_error"),
                (500, "E.x-1"),
            )
        ),
        ("messages", {"type": "error"}, 500, "stream_error"),
    ],
)
def test_an_error_in_a_stream_counts_as_its_http_status_and_never_shows_its_message(
    name: str, event: Any, http_status: int, error: str
) -> None:
    plain = Setup().play(route(name), {"stream": True}, [b"{}"], status=http_status, head=JSON_HEAD)
    for separators in ((",", ":"), (", ", ": ")):
        sent = f"data: {json.dumps(event, separators=separators)}\n\n".encode()
        played = Setup().play(route(name), {"stream": True}, [sent])
        assert played.record.status is plain.record.status
        assert (played.record.http_status, played.exchange.error_status) == (200, http_status)
        assert played.view.error == error
        assert "secret" not in repr(played.record)


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("chat", (8, 0, 24, None)),
        ("chat-reasoning", (8, 0, 40, 0)),
        ("completions", (5, 0, 24, None)),
        ("responses", (8, 0, 24, 0)),
        ("messages", (8, 0, 24, None)),
    ],
)
def test_a_whole_response_has_token_counts_and_no_token_times(
    name: str, tokens: tuple[int, ...]
) -> None:
    setup, sent = Setup(), recorded_whole(name)
    played = setup.play(
        route(name), {"model": "m"}, [sent[:100], sent[100:]], head=JSON_HEAD, every_s=0.5
    )
    record, view = played.record, played.view
    counts = (record.input_tokens, record.cached_tokens, record.output_tokens)
    assert (*counts, record.reasoning_tokens) == tokens
    assert (record.status, record.finish_reason) == (Status.OK, "length")
    assert (record.ttft_s, record.tpot_s, record.max_gap_s, view.gaps) == (None,) * 4
    assert (record.e2e_s, view.first_byte_s, view.streamed) == (1.5, 0.5, False)
    assert played.client_pieces == (sent[:100], sent[100:], b"")
    assert {view.response_id} == ids_in(sent)
    assert setup.tracing.spans[0].response_models == [MODEL]


def whole(name: str, response: Any, setup: Setup | None = None) -> Played:
    sent = [json.dumps(response).encode()]
    return (setup or Setup()).play(route(name), {}, sent, head=JSON_HEAD)


@pytest.mark.parametrize("found", [7, "", "x" * 321, "a\nb", None])
def test_an_unusable_id_in_a_response_is_unknown(found: object) -> None:
    assert whole("chat", {"id": found, "choices": []}).view.response_id is None


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


def choices(*reasons: object) -> dict[str, Any]:
    return {"choices": [{"finish_reason": reason} for reason in reasons]}


CALL = [{"type": "function_call"}]
FILTERED = {"status": "incomplete", "incomplete_details": {"reason": "content_filter"}}


@pytest.mark.parametrize(
    ("name", "response", "reason"),
    [
        ("chat", choices("length", "length"), "length"),
        ("chat", choices("stop", "length"), "length,stop"),
        ("chat", choices(None, 7), None),
        ("chat", choices("x" * 65, "a\0b"), "other"),
        ("chat", choices("x" * 40, "y" * 40), None),
        ("messages", {"stop_reason": "end_turn"}, "stop"),
        ("messages", {"stop_reason": "tool_use"}, "tool_calls"),
        ("messages", {"stop_reason": "refusal"}, "refusal"),
        ("responses", {"status": "completed", "output": []}, "stop"),
        ("responses", {"status": "completed", "output": CALL}, "tool_calls"),
        ("responses", FILTERED, "content_filter"),
    ],
)
def test_finish_reasons_of_all_choices_use_the_words_of_chat_completions(
    name: str, response: Any, reason: str | None
) -> None:
    assert whole(name, response).record.finish_reason == reason


@pytest.mark.parametrize(
    ("name", "usage", "tokens"),
    [
        (
            "messages",
            {
                "input_tokens": 5,
                "cache_read_input_tokens": 70,
                "cache_creation_input_tokens": 900,
                "output_tokens": 3,
            },
            (975, 70, 3),
        ),
        *(
            ("chat", {"prompt_tokens": invalid, "completion_tokens": 4}, (None, None, 4))
            for invalid in (-1, 1.5, True, None, 10**12)
        ),
    ],
)
def test_input_tokens_include_cache_reads_and_writes_and_invalid_counts_are_unknown(
    name: str, usage: Any, tokens: tuple[int | None, ...]
) -> None:
    record = whole(name, {"usage": usage}).record
    assert (record.input_tokens, record.cached_tokens, record.output_tokens) == tokens


@pytest.mark.parametrize(
    ("name", "response", "reason"),
    [
        ("chat", choices("abort"), "abort"),
        ("chat", choices("error"), "error"),
        ("completions", choices("stop", "abort"), "abort"),
        ("responses", {"status": "cancelled"}, "abort"),
    ],
)
def test_a_request_that_the_engine_gave_up_failed(name: str, response: Any, reason: str) -> None:
    played = whole(name, response)
    assert (played.record.status, played.view.error) == (Status.ERROR, reason)
    last = {"type": "response.completed", "response": response, **response}
    event = f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n".encode()
    played = Setup().play(route(name), {"stream": True}, [event])
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
    record = whole("chat", {"usage": usage}, setup).record
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


def test_body_sizes_are_those_of_the_client() -> None:
    played = Setup().play(CHAT, REQUESTS["chat.plain"], events(recorded("chat.usage")))
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
    # The response has the model, too.
    assert (record.model, record.output_tokens, record.proxied.choices) == ("tiny-llama", 24, None)
    assert setup.failures == ["body_not_read"]


def test_several_choices_are_recognised_by_their_finish_reasons() -> None:
    record = Setup().play(CHAT, None, events(recorded("chat-n2.usage"))).record
    assert (record.ttft_s, record.tpot_s, record.max_gap_s) == (3, None, None)


def test_an_unreadable_body_is_relayed_unchanged_and_counted() -> None:
    setup = Setup()
    exchange = setup.begin(CHAT, b"not json")
    assert (exchange.body, exchange.model, setup.failures) == (None, None, ["body_unreadable"])


def test_of_a_compressed_response_only_bytes_are_known() -> None:
    setup = Setup()
    head = (*STREAM_HEAD, (b"content-encoding", b"gzip"))
    played = setup.play(CHAT, {"stream": True}, [b"\x1f\x8b", b"rest"], head=head)
    assert played.client_pieces == (b"\x1f\x8b", b"rest", b"")
    assert (played.record.status, played.record.output_tokens) == (Status.OK, None)
    assert (played.view.first_byte_s, played.view.output_bytes) == (1, 6)
    assert setup.failures == ["compressed_answer"]


def test_headers_change_only_when_usage_was_added() -> None:
    plain = (b"accept-encoding", b"identity")
    head = (*STREAM_HEAD, (b"content-length", b"9999"), (b"x-other", b"1"))
    counted, quiet = Setup(), Setup(MeasuringOptions(count_tokens=False))
    assert plain in counted.begin(CHAT, b'{"stream":true}').headers
    assert plain not in counted.begin(CHAT, b'{"stream":false}').headers
    played = counted.play(CHAT, {"stream": True}, [], head=head)
    assert list(played.client_head) == [*STREAM_HEAD, (b"x-other", b"1")]
    for setup, path in ((quiet, CHAT), (counted, "/v1/messages")):
        assert plain not in setup.begin(path, b'{"stream":true}').headers
        assert setup.play(path, {"stream": True}, [], head=head).client_head == head


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
