"""What is told of streams that the real vLLM sent. Their events arrive one second apart."""

import json
from typing import NamedTuple

import pytest

from agent.analysis.quantiles import bin_of
from agent.records.request import Status, Vantage
from tests.sources.proxy.measuring.playing import REQUESTS, Desk, events, play, recorded


class Times(NamedTuple):
    """Seconds after arrival, that is, the places of events; and how many gaps there were."""

    first: float
    visible: float | None
    gaps: int
    longest: float | None


class Tokens(NamedTuple):
    """Token counts; `chunk` is the most that an event after the first one held."""

    read: int | None = None
    cached: int | None = None
    written: int | None = None
    reasoning: int | None = None
    chunk: int | None = None


UNTOLD = Tokens()
CHAT = Times(2, 2, 23, 1)
SHORT_CHAT = Times(2, 2, 5, 1)
TOOLS = Times(2, 2, 21, 1)
REASONING = Times(2, 5, 34, 2)
TEXT = Times(1, 1, 23, 1)
SHORT_TEXT = Times(1, 1, 5, 1)

STREAMS: dict[str, tuple[Times, Tokens]] = {
    "chat.plain": (CHAT, UNTOLD),
    "chat.usage": (CHAT, Tokens(8, 0, 24)),
    "chat.continuous": (CHAT, Tokens(8, 0, 24, chunk=1)),
    "chat-logprobs.plain": (SHORT_CHAT, UNTOLD),
    "chat-logprobs.usage": (SHORT_CHAT, Tokens(8, 0, 6)),
    "chat-logprobs.continuous": (SHORT_CHAT, Tokens(8, 0, 6, chunk=1)),
    "chat-token-ids.plain": (SHORT_CHAT, UNTOLD),
    "chat-token-ids.usage": (SHORT_CHAT, Tokens(8, 0, 6)),
    "chat-token-ids.continuous": (SHORT_CHAT, Tokens(8, 0, 6, chunk=1)),
    "chat-eos.plain": (Times(2, 2, 1, 1), UNTOLD),
    "chat-eos.usage": (Times(2, 2, 1, 1), Tokens(8, 0, 3)),
    "chat-eos.continuous": (Times(2, 2, 1, 1), Tokens(8, 0, 3, chunk=1)),
    "chat-one-token.usage": (Times(2, 2, 0, None), Tokens(8, 0, 1)),
    "chat-tools.plain": (TOOLS, UNTOLD),
    "chat-tools.usage": (TOOLS, Tokens(8, 0, 200)),
    "chat-tools.continuous": (TOOLS, Tokens(8, 0, 200, chunk=40)),
    "chat-reasoning.plain": (REASONING, UNTOLD),
    "chat-reasoning.usage": (REASONING, Tokens(8, 0, 40, 0)),
    "chat-reasoning.continuous": (REASONING, Tokens(8, 0, 40, 0, chunk=2)),
    "chat-n2.plain": (Times(3, 3, 0, None), UNTOLD),
    "chat-n2.usage": (Times(3, 3, 0, None), Tokens(8, 0, 48)),
    "chat-n2.continuous": (Times(3, 3, 0, None), Tokens(8, 0, 48)),
    "chat-died": (Times(2, 2, 9, 1), UNTOLD),
    "completions.plain": (TEXT, UNTOLD),
    "completions.usage": (TEXT, Tokens(5, 0, 24)),
    "completions.continuous": (Times(1, 1, 14, 1), Tokens(5, 0, 24, chunk=10)),
    "completions-logprobs.plain": (SHORT_TEXT, UNTOLD),
    "completions-logprobs.usage": (SHORT_TEXT, Tokens(5, 0, 6)),
    "completions-logprobs.continuous": (SHORT_TEXT, Tokens(5, 0, 6, chunk=1)),
    "completions-n2.plain": (Times(1, 1, 0, None), UNTOLD),
    "completions-n2.usage": (Times(1, 1, 0, None), Tokens(5, 0, 48)),
    "completions-died": (Times(1, 1, 10, 1), UNTOLD),
    "responses": (Times(5, 5, 15, 1), Tokens(8, 0, 24, 0)),
    # Between two calls stand the events that end the one and begin the other.
    "responses-tools": (Times(4, 4, 108, 4), Tokens(8, 0, 200, 0)),
    "responses-reasoning": (Times(5, 12, 27, 6), Tokens(8, 0, 40, 0)),
    "messages": (Times(3, 3, 21, 1), Tokens(8, 0, 24)),
    "messages-tools": (Times(3, 3, 3, 1), Tokens(8, 0, 57)),
    # It thought until it had no tokens left; the signature of a thought is none.
    "messages-reasoning": (Times(3, None, 36, 1), Tokens(8, 0, 40)),
    "messages-died": (Times(3, 3, 8, 1), Tokens(8)),
}

# All of these stopped at their limit but the ones named here.
REASONS = {"chat-eos.": "stop", "messages-tools": "tool_calls"}
SEVERAL = ("chat-n2", "completions-n2")

every_stream = pytest.mark.parametrize("name", REQUESTS)


def test_every_recorded_stream_is_in_the_table() -> None:
    assert STREAMS.keys() == REQUESTS.keys()


@every_stream
def test_the_times_of_a_stream_are_those_of_its_events_with_text(name: str) -> None:
    times, _ = STREAMS[name]
    played = play(name)
    record, view = played.record, played.view
    assert (record.ttft_s, view.first_visible_s) == (times.first, times.visible)
    assert sum((view.gaps or {}).values()) == times.gaps
    assert record.max_gap_s == times.longest
    assert view.first_byte_s == 1
    assert record.e2e_s == len(events(recorded(name))) + 1


@every_stream
def test_the_tokens_of_a_stream_are_those_that_the_engine_counted(name: str) -> None:
    _, tokens = STREAMS[name]
    played = play(name)
    record, view = played.record, played.view
    assert (record.input_tokens, record.cached_tokens) == (tokens.read, tokens.cached)
    assert (record.output_tokens, record.reasoning_tokens) == (tokens.written, tokens.reasoning)
    assert view.gap_tokens == tokens.chunk


@every_stream
def test_a_stream_ends_as_its_engine_said(name: str) -> None:
    played = play(name)
    record = played.record
    assert record.vantage is Vantage.PROXY
    if name.endswith("-died"):
        word = "internal_error" if name.startswith("messages") else "InternalServerError"
        assert (record.status, record.finish_reason) == (Status.ERROR, None)
        assert played.view.error == word
        return
    reason = next((told for part, told in REASONS.items() if name.startswith(part)), "length")
    assert (record.status, record.finish_reason) == (Status.OK, reason)
    assert played.view.error is None


@every_stream
def test_reading_a_stream_misses_nothing_and_changes_nothing(name: str) -> None:
    desk = Desk()
    played = play(name, desk=desk)
    sent = recorded(name)
    if "stream_options" in REQUESTS[name] or not name.startswith(("chat", "completions")):
        assert played.exchange.body is None
        assert played.client_pieces == (*events(sent), b"")
    assert desk.failures == []
    assert played.view.output_bytes == len(played.client_bytes)


@pytest.mark.parametrize("name", [name for name in REQUESTS if name.startswith(SEVERAL)])
def test_the_time_per_token_of_several_choices_cannot_be_told(name: str) -> None:
    played = play(name)
    record, view = played.record, played.view
    assert (record.tpot_s, record.max_gap_s, view.gaps, view.gap_tokens) == (None,) * 4
    assert view.choices == 2
    assert record.ttft_s is not None


# Time per output token


def test_one_token_per_event_makes_the_gap_the_time_per_token() -> None:
    for name in ("chat.usage", "chat.continuous", "completions.usage", "messages"):
        assert play(name).record.tpot_s == pytest.approx(1.0)


def test_tokens_of_the_first_event_are_left_out_where_they_were_counted() -> None:
    # 24 events, the first of 25 tokens as the counted stream tells, the last at second 24.
    counted, uncounted = play("chat-tools.continuous"), play("chat-tools.usage")
    assert counted.record.tpot_s == pytest.approx(22 / (200 - 25))
    assert uncounted.record.tpot_s == pytest.approx(22 / (200 - 1))


def test_the_token_that_means_the_end_counts_as_the_last_one_but_makes_no_gap() -> None:
    played = play("chat-eos.usage")
    assert played.record.output_tokens == 3
    assert played.record.tpot_s == pytest.approx((4 - 2) / (3 - 1))
    assert played.view.gaps == {bin_of(1.0): 1}


def test_one_token_has_no_time_per_token() -> None:
    assert play("chat-one-token.usage").record.tpot_s is None


def test_without_counts_the_time_per_token_is_unknown() -> None:
    assert play("chat.plain").record.tpot_s is None


def test_events_that_arrive_together_are_no_time_apart() -> None:
    played = play("chat.usage", [recorded("chat.usage")])
    assert played.view.gaps == {bin_of(0.0): 23}
    assert played.record.max_gap_s == 0


# Streams that differ from the recorded ones


def test_several_events_in_one_piece_are_each_counted() -> None:
    sent = events(recorded("chat.usage"))
    played = play("chat.usage", [*sent[:4], b"".join(sent[4:6]), b"".join(sent[6:9]), *sent[9:]])
    assert sum((played.view.gaps or {}).values()) == 23
    assert played.view.gaps == {bin_of(1.0): 20, bin_of(0.0): 3}


def test_an_event_of_several_choices_is_not_taken_for_a_token_of_one() -> None:
    sent = events(recorded("chat.plain"))
    other = b'a"},"finish_reason":"stop"},{"index":1,"delta":{"content":"b"'
    mixed = sent[8].replace(b'"delta":{"content":"', b'"delta":{"content":"' + other[:-1], 1)
    assert json.loads(mixed[6:])["choices"][0]["finish_reason"] == "stop"
    played = play("chat.plain", [*sent[:8], mixed, *sent[9:]])
    assert played.record.finish_reason == "length,stop"


def test_an_event_that_begins_in_an_earlier_piece_is_not_taken_for_one_of_its_own() -> None:
    sent = events(recorded("chat.plain"))
    glued = play("chat.plain", [*sent[:5], b": no end of line ", *sent[5:]])
    # The event that follows is part of the comment.
    assert sum((glued.view.gaps or {}).values()) == 22


def test_counts_beside_a_token_are_read_where_no_event_had_them_before() -> None:
    sent = events(recorded("chat.plain"))
    counts = b'}],"usage":{"prompt_tokens":8,"completion_tokens":9}}'
    counted = [*sent[:9], sent[9].replace(b"}]}", counts), *sent[10:]]
    record = play("chat.plain", counted).record
    assert (record.input_tokens, record.output_tokens) == (8, 9)


def test_a_stream_written_with_spaces_is_read_the_same() -> None:
    told = [json.loads(event[6:]) for event in events(recorded("chat.usage"))[:-1]]
    spaced = [b"data: " + json.dumps(payload).encode() + b"\n\n" for payload in told]
    played, compact = play("chat.usage", [*spaced, b"data: [DONE]\n\n"]), play("chat.usage")
    assert played.view.gaps == compact.view.gaps
    for fact in ("ttft_s", "tpot_s", "output_tokens", "finish_reason", "status"):
        assert getattr(played.record, fact) == getattr(compact.record, fact)


def test_what_follows_a_thought_in_the_same_event_is_seen_then() -> None:
    sent = events(recorded("chat-reasoning.plain"))
    call = b',"tool_calls":[{"index":0,"function":{"name":"f"}}]}'
    assert b'"reasoning":"' in sent[2]
    sent[2] = sent[2].replace(b"}", call, 1)
    assert play("chat-reasoning.plain", sent).view.first_visible_s == 3


def test_older_engines_call_a_thought_reasoning_content() -> None:
    sent = recorded("chat-reasoning.plain").replace(b'"reasoning":', b'"reasoning_content":')
    played = play("chat-reasoning.plain", events(sent))
    assert (played.record.ttft_s, played.view.first_visible_s) == (2, 5)


def test_empty_text_is_a_token_of_a_completion_and_none_of_a_chat() -> None:
    texts = events(recorded("completions.plain"))
    for place in (0, 4):
        value = json.loads(texts[place][6:])["choices"][0]["text"].encode()
        texts[place] = texts[place].replace(b'"text":"' + value + b'"', b'"text":""')
    played = play("completions.plain", texts)
    assert (played.record.ttft_s, sum((played.view.gaps or {}).values())) == (1, 23)
    chat = events(recorded("chat.plain"))
    for place in (1, 4):
        value = json.loads(chat[place][6:])["choices"][0]["delta"]["content"].encode()
        chat[place] = chat[place].replace(b'"content":"' + value + b'"', b'"content":""')
    played = play("chat.plain", chat)
    assert (played.record.ttft_s, sum((played.view.gaps or {}).values())) == (3, 21)
    assert played.record.max_gap_s == 2


def test_comments_and_pings_before_the_first_token_are_no_tokens() -> None:
    keep_alive = [b": keep-alive\n\n"] * 3
    chat = play("chat.plain", [*keep_alive, *events(recorded("chat.plain"))])
    assert (chat.view.first_byte_s, chat.record.ttft_s) == (1, 5)
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'
    messages = play("messages", [ping, *events(recorded("messages"))])
    assert messages.record.ttft_s == 4
