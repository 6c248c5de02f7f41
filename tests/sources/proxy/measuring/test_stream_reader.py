"""Records of streams that a real vLLM sent. Their events arrive one second apart."""

import json
import re
from dataclasses import replace
from itertools import pairwise, product
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.analysis.quantiles import bin_of
from agent.records.request import Status, Vantage
from agent.sources.proxy.measuring.api_protocols import PROTOCOLS
from agent.sources.proxy.measuring.parsed_event import ParsedEvent
from agent.sources.proxy.measuring.stream_reader import (
    MAX_DEFERRED_BYTES,
    MAX_DEFERRED_PIECES,
    MAX_EVENT_BYTES,
    EventSplitter,
    StreamReader,
    UsageStripper,
    data_of,
)
from tests.sources.proxy.measuring.playing import (
    MODEL,
    REQUESTS,
    Played,
    Setup,
    events,
    ids_in,
    play,
    recorded,
)

LINE_ENDS = (b"\n", b"\r\n", b"\r")


def split(*pieces: bytes) -> list[bytes]:
    """The events of these pieces, and the rest if there is one."""
    splitter = EventSplitter()
    found = [event for piece in pieces for event in splitter.split(piece)]
    rest = splitter.take_rest()
    return [*found, rest] if rest else found


@pytest.mark.parametrize("ends", sorted({*product(LINE_ENDS, LINE_ENDS)} - {(b"\r", b"\n")}))
def test_an_empty_line_ends_an_event_with_any_line_end(ends: tuple[bytes, bytes]) -> None:
    sent = b"data: a" + b"".join(ends) + b"data: b" + b"".join(ends)
    found = split(sent)
    assert [data_of(event) for event in found] == [b"a", b"b"]
    assert b"".join(found) == sent


def test_cr_lf_ends_one_line_wherever_it_is_cut() -> None:
    sent = b"data: a\r\ndata: b\r\n\r\ndata: c\r\n\r\n"
    for at in range(len(sent)):
        assert [data_of(event) for event in split(sent[:at], sent[at:])] == [b"a\nb", b"c"]


@given(
    st.lists(st.sampled_from([b"\n", b"\r", b"\r\n", b"data: x", b":", b"\xe2\x80\xa8", b"\x85"])),
    st.lists(st.integers(0, 60), max_size=8),
)
def test_the_events_contain_all_bytes_and_do_not_depend_on_the_cuts(
    parts: list[bytes], cuts: list[int]
) -> None:
    sent = b"".join(parts)
    places = sorted({0, *(min(cut, len(sent)) for cut in cuts), len(sent)})
    pieces = [sent[a:b] for a, b in pairwise(places)]
    events = split(*pieces)
    assert b"".join(events) == sent
    assert events == split(sent)


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\v", "\f", "\x1c"])
def test_no_other_character_ends_a_line(separator: str) -> None:
    data = f'{{"a":"{separator}{separator}"}}'.encode()
    events = split(b"data: " + data + b"\n\n")
    assert [data_of(event) for event in events] == [data]


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"data: a\n\n", b"a"),
        (b"data:a\n\n", b"a"),
        (b"data:  a\n\n", b" a"),
        (b"data: a\ndata: b\n\n", b"a\nb"),
        (b"data: a\ndata\ndata: b\n\n", b"a\nb"),
        (b"event: x\nid: 1\ndata: a\n\n", b"a"),
        (b": keep-alive\n\n", None),
        (b": data: a\n\n", None),
        (b"\n\n", None),
        (b"", None),
        (b"\xef\xbb\xbfdata: a\n\n", b"a"),
        (b"data: a", b"a"),
        (b"data: a\r\n\r\n", b"a"),
        (b"data: a\rdata: b\n\n", b"a\nb"),
    ],
)
def test_the_data_lines_of_an_event_are_joined(event: bytes, data: bytes | None) -> None:
    assert data_of(event) == data


def test_a_long_event_is_joined_from_many_pieces() -> None:
    sent = b"data: " + b"x" * (1 << 20) + b"\n\n"
    pieces = [sent[at : at + 1460] for at in range(0, len(sent), 1460)]
    assert split(*pieces) == [sent]


def test_an_event_above_the_limit_is_not_buffered() -> None:
    splitter = EventSplitter()
    piece = b"x" * (MAX_EVENT_BYTES + 1)
    assert splitter.split(piece) == [piece]
    assert not splitter.waiting
    assert splitter.split(b"\n\ndata: a\n\n")[-1] == b"data: a\n\n"


class Times(NamedTuple):
    """Seconds after arrival, which are the positions of events, and the number of gaps."""

    first: float
    visible: float | None
    gaps: int
    longest: float | None


class Tokens(NamedTuple):
    """Token counts; `chunk` is the largest of an event after the first one."""

    read: int | None = None
    cached: int | None = None
    written: int | None = None
    reasoning: int | None = None
    chunk: int | None = None


UNKNOWN = Tokens()
CHAT = Times(2, 2, 23, 1)
SHORT_CHAT = Times(2, 2, 5, 1)
TOOLS = Times(2, 2, 21, 1)
REASONING = Times(2, 5, 34, 2)
TEXT = Times(1, 1, 23, 1)
SHORT_TEXT = Times(1, 1, 5, 1)

# A stream without usage has the times of the one with usage.
STREAMS: dict[str, tuple[Times, Tokens]] = {
    "chat.usage": (CHAT, Tokens(8, 0, 24)),
    "chat.continuous": (CHAT, Tokens(8, 0, 24, chunk=1)),
    "chat-metrics.usage": (CHAT, Tokens(8, 0, 24)),
    "chat-logprobs.usage": (SHORT_CHAT, Tokens(8, 0, 6)),
    "chat-logprobs.continuous": (SHORT_CHAT, Tokens(8, 0, 6, chunk=1)),
    "chat-token-ids.usage": (SHORT_CHAT, Tokens(8, 0, 6)),
    "chat-token-ids.continuous": (SHORT_CHAT, Tokens(8, 0, 6, chunk=1)),
    "chat-eos.usage": (Times(2, 2, 1, 1), Tokens(8, 0, 3)),
    "chat-eos.continuous": (Times(2, 2, 1, 1), Tokens(8, 0, 3, chunk=1)),
    "chat-one-token.usage": (Times(2, 2, 0, None), Tokens(8, 0, 1)),
    "chat-tools.usage": (TOOLS, Tokens(8, 0, 200)),
    "chat-tools.continuous": (TOOLS, Tokens(8, 0, 200, chunk=40)),
    "chat-reasoning.usage": (REASONING, Tokens(8, 0, 40, 0)),
    "chat-reasoning.continuous": (REASONING, Tokens(8, 0, 40, 0, chunk=2)),
    "chat-n2.usage": (Times(3, 3, 0, None), Tokens(8, 0, 48)),
    "chat-n2.continuous": (Times(3, 3, 0, None), Tokens(8, 0, 48)),
    "chat-died": (Times(2, 2, 9, 1), UNKNOWN),
    "completions.usage": (TEXT, Tokens(5, 0, 24)),
    "completions.continuous": (Times(1, 1, 14, 1), Tokens(5, 0, 24, chunk=10)),
    "completions-metrics.usage": (TEXT, Tokens(5, 0, 24)),
    "completions-logprobs.usage": (SHORT_TEXT, Tokens(5, 0, 6)),
    "completions-logprobs.continuous": (SHORT_TEXT, Tokens(5, 0, 6, chunk=1)),
    "completions-n2.usage": (Times(1, 1, 0, None), Tokens(5, 0, 48)),
    "completions-died": (Times(1, 1, 10, 1), UNKNOWN),
    "responses": (Times(5, 5, 15, 1), Tokens(8, 0, 24, 0)),
    "responses-metrics": (Times(5, 5, 15, 1), Tokens(8, 0, 24, 0)),
    # Events that end one call and begin the next are between the calls.
    "responses-tools": (Times(4, 4, 108, 4), Tokens(8, 0, 200, 0)),
    "responses-reasoning": (Times(5, 12, 27, 6), Tokens(8, 0, 40, 0)),
    "messages": (Times(3, 3, 21, 1), Tokens(8, 0, 24)),
    # The first token is the name of the tool.
    "messages-tools": (Times(2, 2, 4, 1), Tokens(8, 0, 57)),
    # Reasoning to the token limit; the signature of reasoning is no token.
    "messages-reasoning": (Times(3, None, 36, 1), Tokens(8, 0, 40)),
    "messages-died": (Times(3, 3, 8, 1), Tokens(8)),
}

# All other streams stopped at their token limit.
REASONS = {"chat-eos.": "stop", "messages-tools": "tool_calls"}


def outcome(name: str) -> tuple[Status, str | None, str | None]:
    if name.endswith("-died"):
        code = "internal_error" if name.startswith("messages") else "InternalServerError"
        return Status.ERROR, None, code
    reason = next((reason for part, reason in REASONS.items() if name.startswith(part)), "length")
    return Status.OK, reason, None


@pytest.mark.parametrize("name", REQUESTS)
def test_the_record_of_every_recorded_stream(name: str) -> None:
    times, tokens = STREAMS[name.replace(".plain", ".usage")]
    tokens = UNKNOWN if name.endswith(".plain") else tokens
    setup, sent = Setup(), recorded(name)
    played = play(name, setup=setup)
    record, view = played.record, played.view
    gaps = sum((view.gaps or {}).values())
    assert Times(record.ttft_s, view.first_visible_s, gaps, record.max_gap_s) == times  # type: ignore[arg-type]
    counts = (record.input_tokens, record.cached_tokens, record.output_tokens)
    assert Tokens(*counts, record.reasoning_tokens, view.gap_tokens) == tokens
    thought = "reasoning" in name and times.visible is not None
    assert view.reasoning_s == ((times.visible or 0) - times.first if thought else None)
    assert (view.first_byte_s, record.e2e_s) == (1, len(events(sent)) + 1)
    assert (record.status, record.finish_reason, view.error) == outcome(name)
    assert {view.response_id} == ids_in(sent)
    assert (record.vantage, setup.tracing.spans[0].response_models) == (Vantage.PROXY, [MODEL])
    if "-n2" in name:
        assert (record.tpot_s, view.gaps, view.choices) == (None, None, 2)
    # Streams to which the proxy added no usage pass event by event.
    if "stream_options" in REQUESTS[name] or not name.startswith(("chat", "completions")):
        assert played.exchange.body is None
        assert played.client_pieces == (*events(sent), b"")
    assert (setup.failures, view.output_bytes) == ([], len(played.client_bytes))


@pytest.mark.parametrize(
    ("name", "tpot_s"),
    [
        ("chat.usage", 1.0),
        ("chat.continuous", 1.0),
        ("completions.usage", 1.0),
        # 24 events, the first with 25 tokens if they are counted, the last at second 24.
        ("chat-tools.continuous", 22 / (200 - 25)),
        ("chat-tools.usage", 22 / (200 - 1)),
        # An end-of-sequence token counts, and makes no gap.
        ("chat-eos.usage", (4 - 2) / (3 - 1)),
        ("chat-one-token.usage", None),
        ("chat.plain", None),
    ],
)
def test_the_time_per_token_leaves_out_the_tokens_of_the_first_event(
    name: str, tpot_s: float | None
) -> None:
    assert play(name).record.tpot_s == (tpot_s and pytest.approx(tpot_s))


def gap_count(played: Played) -> int:
    return sum((played.view.gaps or {}).values())


def test_events_that_arrive_together_have_gaps_of_zero() -> None:
    sent = events(recorded("chat.usage"))
    played = play("chat.usage", [b"".join(sent)])
    assert played.view.gaps == {bin_of(0.0): 23}
    assert played.record.max_gap_s == 0
    played = play("chat.usage", [*sent[:4], b"".join(sent[4:6]), b"".join(sent[6:9]), *sent[9:]])
    assert played.view.gaps == {bin_of(1.0): 20, bin_of(0.0): 3}


def test_an_event_of_several_choices_does_not_match_the_template() -> None:
    sent = events(recorded("chat.plain"))
    other = b'a"},"finish_reason":"stop"},{"index":1,"delta":{"content":"b"'
    mixed = sent[8].replace(b'"delta":{"content":"', b'"delta":{"content":"' + other[:-1], 1)
    assert json.loads(mixed[6:])["choices"][0]["finish_reason"] == "stop"
    played = play("chat.plain", [*sent[:8], mixed, *sent[9:]])
    assert played.record.finish_reason == "length,stop"


def test_the_rest_of_an_event_does_not_match_the_template() -> None:
    sent = events(recorded("chat.plain"))
    glued = play("chat.plain", [*sent[:5], b": no end of line ", *sent[5:]])
    # The event that follows is part of the comment.
    assert gap_count(glued) == 22


def test_usage_in_a_later_event_with_text_is_read() -> None:
    sent = events(recorded("chat.plain"))
    counts = b'}],"usage":{"prompt_tokens":8,"completion_tokens":9}}'
    counted = [*sent[:9], sent[9].replace(b"}]}", counts), *sent[10:]]
    record = play("chat.plain", counted).record
    assert (record.input_tokens, record.output_tokens) == (8, 9)


def test_a_tool_call_ends_reasoning_of_either_name() -> None:
    sent = events(recorded("chat-reasoning.plain"))
    other = [event.replace(b'"reasoning":', b'"reasoning_content":') for event in sent]
    played = play("chat-reasoning.plain", other)
    assert (played.record.ttft_s, played.view.first_visible_s) == (2, 5)
    call = b',"tool_calls":[{"index":0,"function":{"name":"f"}}]}'
    sent[2] = sent[2].replace(b"}", call, 1)
    assert play("chat-reasoning.plain", sent).view.first_visible_s == 3


@pytest.mark.parametrize(
    ("name", "key", "places", "times"),
    [
        ("completions.plain", b'"text":', (0, 4), (1, 23, 1)),
        ("chat.plain", b'"content":', (1, 4), (3, 21, 2)),
    ],
)
def test_empty_text_is_a_token_of_a_completion_and_none_of_a_chat(
    name: str, key: bytes, places: tuple[int, int], times: tuple[int, int, int]
) -> None:
    sent = events(recorded(name))
    for place in places:
        sent[place] = re.sub(key + rb'"[^"]+"', key + b'""', sent[place])
    played = play(name, sent)
    assert (played.record.ttft_s, gap_count(played), played.record.max_gap_s) == times


def test_comments_and_pings_before_the_first_token_are_no_tokens() -> None:
    keep_alive = [b": keep-alive\n\n"] * 3
    chat = play("chat.plain", [*keep_alive, *events(recorded("chat.plain"))])
    assert (chat.view.first_byte_s, chat.record.ttft_s) == (1, 5)
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'
    messages = play("messages", [ping, *events(recorded("messages"))])
    assert messages.record.ttft_s == 4


def test_reading_lags_behind_relaying_by_few_pieces_and_few_bytes() -> None:
    event = events(recorded("chat.plain"))[2]
    for pieces in ([event] * MAX_DEFERRED_PIECES, [b": " + b" " * MAX_DEFERRED_BYTES + b"\n\n"]):
        reader = StreamReader(PROTOCOLS["/v1/chat/completions"], None, choices=1)
        assert reader.take(event, 1.0) == event
        assert reader.findings.timing.first_s is None
        assert [reader.take(piece, 2.0) for piece in pieces] == pieces
        assert reader.findings.timing.first_s == 1.0


@pytest.mark.parametrize("null", [b":null", b": null"])
def test_text_passes_before_it_is_read_also_where_usage_is_stripped(null: bytes) -> None:
    stripper = UsageStripper(final=True, each=False)
    reader = StreamReader(PROTOCOLS["/v1/chat/completions"], stripper, choices=1)
    event = events(recorded("chat.plain"))[2].replace(
        b'"finish_reason":null', b'"finish_reason"' + null
    )
    assert reader.take(event, 1.0) == event
    assert reader.findings.timing.first_s is None
    reader.catch_up()
    assert reader.findings.timing.first_s == 1.0


def _chat_event(delta: dict[str, object], rest: dict[str, object]) -> bytes:
    """An event as vLLM spells it."""
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    return b"data: %b\n\n" % json.dumps(
        {"id": "chatcmpl-1", "created": 1, "model": "m", "choices": [choice], **rest},
        separators=(",", ":"),
        ensure_ascii=False,
    ).encode("utf-8", "surrogatepass")


_TEXTS = st.sampled_from(["", " the", " then", "\n", '"', "\\", 'a"b', "null", "日本"]) | st.text(
    max_size=3
)
_CHAT_EVENTS = st.builds(
    _chat_event,
    st.builds(lambda text: {"content": text}, _TEXTS)
    | st.builds(lambda text: {"reasoning_content": text}, _TEXTS)
    | st.just({"role": "assistant", "content": ""}),
    st.just({})
    | st.just({"usage": None})
    | st.just({"created": 2})
    | st.builds(lambda tokens: {"usage": {"completion_tokens": tokens}}, st.integers(0, 99)),
)


def _read(
    pieces: list[tuple[bytes, float]], together: int = 1, route: str = "/v1/chat/completions"
) -> tuple[object, ...]:
    """What is found in these pieces, of which so many are read at a time."""
    reader = StreamReader(PROTOCOLS[route], None, choices=1)
    for at in range(0, len(pieces), together):
        if together > 1:
            reader.take_all(*zip(*pieces[at : at + together], strict=True))
        else:
            reader.take(*pieces[at])
    reader.finish(1000.0)
    found = reader.findings
    timing = found.timing
    return (
        timing.first_s, timing.visible_s, timing.gaps, timing.max_gap_s, timing.chunk_tokens,
        timing.reasoning_s, timing.tpot_s(50), found.usage, found.response_id, found.missed,
    )  # fmt: skip


@given(st.lists(_CHAT_EVENTS, min_size=1, max_size=60))
def test_tokens_that_are_recognised_by_their_bytes_count_as_those_that_are_parsed(
    sent: list[bytes],
) -> None:
    whole = [(event, at * 0.25) for at, event in enumerate(sent)]
    # No event in two pieces is recognised.
    cut = [piece for data, at_s in whole for piece in ((data[:9], at_s), (data[9:], at_s))]
    assert _read(whole) == _read(cut)


_LEARNED = [_chat_event({"content": f" w{number}"}, {}) for number in range(MAX_DEFERRED_PIECES)]
_TOKENS = st.builds(lambda text: _chat_event({"content": text}, {}), _TEXTS)
_NO_TOKENS = st.sampled_from(
    [
        b": ping\n\n",
        b"data: [DONE]\n\n",
        _LEARNED[0] + _LEARNED[1],
        _chat_event({"content": "", "reasoning_content": "b"}, {}),
    ]
)


@given(
    st.lists(_TOKENS | _NO_TOKENS, min_size=1, max_size=30) | st.lists(_CHAT_EVENTS, min_size=1),
    st.integers(2, 16),
)
def test_pieces_that_are_read_together_count_as_those_that_are_read_one_by_one(
    sent: list[bytes], together: int
) -> None:
    pieces = [(piece, at * 0.25) for at, piece in enumerate([*_LEARNED, *sent])]
    assert _read(pieces, together) == _read(pieces)


def _message_event(text: str) -> bytes:
    """An event of a message as vLLM spells it."""
    delta = {"type": "text_delta", "text": text}
    data = {"type": "content_block_delta", "delta": delta, "index": 0}
    return b"event: content_block_delta\ndata: %b\n\n" % json.dumps(
        data, separators=(",", ":"), ensure_ascii=False
    ).encode("utf-8", "surrogatepass")


@given(st.lists(st.builds(_message_event, _TEXTS), min_size=1, max_size=60), st.integers(1, 16))
def test_tokens_of_a_message_count_as_those_that_are_parsed(
    sent: list[bytes], together: int
) -> None:
    whole = [(event, at * 0.25) for at, event in enumerate(sent)]
    cut = [piece for data, at_s in whole for piece in ((data[:9], at_s), (data[9:], at_s))]
    route = "/v1/messages"
    assert _read(whole, together, route=route) == _read(cut, route=route)


def test_most_tokens_of_a_message_are_not_parsed() -> None:
    parsed: list[bytes] = []
    protocol = PROTOCOLS["/v1/messages"]

    def read(data: bytes) -> ParsedEvent | None:
        parsed.append(data)
        return protocol.read_event(data)

    reader = StreamReader(replace(protocol, read_event=read), None, choices=1)
    for number in range(100):
        reader.take(_message_event(f" w{number}"), number * 1.0)
    reader.finish(100.0)
    assert len(parsed) == MAX_DEFERRED_PIECES
    assert sum(reader.findings.timing.gaps.values()) == 99


def test_tokens_without_a_quote_are_recognised_after_many_with_one() -> None:
    parsed: list[bytes] = []
    protocol = PROTOCOLS["/v1/chat/completions"]

    def read(data: bytes) -> ParsedEvent | None:
        parsed.append(data)
        return protocol.read_event(data)

    reading = replace(protocol, count_tokens=None, read_event=read)
    reader = StreamReader(reading, None, choices=1)
    for number in range(100):
        text = f'{number}"{chr(97 + number % 7)}' if number < 40 else f" w{number}"
        reader.take(_chat_event({"content": text}, {}), number * 1.0)
    reader.finish(100.0)
    assert len(parsed) == 40


def _responses_event(text: str, number: object, **rest: object) -> bytes:
    """An event of a response as vLLM spells it."""
    kind = "response.output_text.delta"
    data = {"delta": text, "item_id": "msg_1", "output_index": 0, "sequence_number": number}
    return b"event: %b\ndata: %b\n\n" % (
        kind.encode(),
        json.dumps(
            {**data, **rest, "type": kind}, separators=(",", ":"), ensure_ascii=False
        ).encode("utf-8", "surrogatepass"),
    )


_NUMBERS = st.integers(-1, 1200) | st.sampled_from(["4", None, [1, 2], {"delta": ""}])
_MORE = st.sampled_from([{}, {"delta": ""}, {"delta": 5}, {"output_index": 1}])
# Of a repeated key the last value counts.
_REPEATED = st.sampled_from([b"", b"", b'"delta":"",'])
_RESPONSES_EVENTS = st.builds(
    lambda text, number, more, repeated: _responses_event(text, number, **more).replace(
        b'"type"', repeated + b'"type"'
    ),
    *(_TEXTS, _NUMBERS, _MORE, _REPEATED),
)


@given(
    st.lists(_RESPONSES_EVENTS, max_size=9),
    st.lists(_RESPONSES_EVENTS, min_size=1, max_size=60),
    st.integers(1, 16),
)
def test_tokens_of_a_response_count_as_those_that_are_parsed(
    first: list[bytes], sent: list[bytes], together: int
) -> None:
    learned = [_responses_event(f" w{number}", number) for number in range(8, 12)]
    whole = [(event, at * 0.25) for at, event in enumerate([*first, *learned, *sent])]
    cut = [piece for data, at_s in whole for piece in ((data[:9], at_s), (data[9:], at_s))]
    route = "/v1/responses"
    assert _read(whole, together, route=route) == _read(cut, route=route)


def test_most_tokens_of_a_response_are_not_parsed_though_each_has_a_number() -> None:
    parsed: list[bytes] = []
    protocol = PROTOCOLS["/v1/responses"]

    def read(data: bytes) -> ParsedEvent | None:
        parsed.append(data)
        return protocol.read_event(data)

    reader = StreamReader(replace(protocol, read_event=read), None, choices=1)
    for number in range(100):
        reader.take(_responses_event(f" w{number}", number), number * 1.0)
    reader.finish(100.0)
    assert len(parsed) == MAX_DEFERRED_PIECES
    assert sum(reader.findings.timing.gaps.values()) == 99


@pytest.mark.parametrize("together", [1, 16])
def test_most_tokens_of_a_stream_are_not_parsed(together: int) -> None:
    parsed: list[bytes] = []
    protocol = PROTOCOLS["/v1/chat/completions"]
    count = protocol.count_tokens
    assert count is not None

    def counted(lines: bytes) -> int:
        parsed.extend(lines.splitlines())
        return count(lines)

    def read(data: bytes) -> ParsedEvent | None:
        parsed.append(data)
        return protocol.read_event(data)

    reading = replace(protocol, count_tokens=counted, read_event=read)
    reader = StreamReader(reading, None, choices=1)
    pieces = [_chat_event({"content": f" w{number}"}, {}) for number in range(100)]
    for at in range(0, len(pieces), together):
        times_s = [float(number) for number in range(at, min(at + together, len(pieces)))]
        reader.take_all(pieces[at : at + together], times_s)
    reader.finish(100.0)
    # Two events with other texts show what is alike.
    assert len(parsed) == 2
    assert sum(reader.findings.timing.gaps.values()) == 99


def test_streams_whose_tokens_are_alike_are_parsed_until_two_differ() -> None:
    parsed: list[bytes] = []
    protocol = PROTOCOLS["/v1/chat/completions"]

    def read(data: bytes) -> ParsedEvent | None:
        parsed.append(data)
        return protocol.read_event(data)

    reader = StreamReader(replace(protocol, read_event=read), None, choices=1)
    texts = ["a", "a", "a", *(f" w{number}" for number in range(20))]
    pieces = [_chat_event({"content": text}, {}) for text in texts]
    reader.take_all(pieces, [float(number) for number in range(len(pieces))])
    reader.finish(100.0)
    assert len(parsed) == 4
    assert sum(reader.findings.timing.gaps.values()) == len(pieces) - 1


def test_the_first_token_of_a_tool_call_is_the_tools_name() -> None:
    reader = StreamReader(PROTOCOLS["/v1/messages"], None, choices=1)
    events = [
        {"type": "message_start", "message": {"id": "msg_1", "usage": {"input_tokens": 9}}},
        {"type": "content_block_start", "content_block": {"type": "tool_use", "name": "weather"}},
        {"type": "content_block_delta", "delta": {"partial_json": '{"city":'}},
        {"type": "message_delta", "usage": {"output_tokens": 12, "thinking_tokens": 4}},
    ]
    for event, at_s in zip(events, (0.1, 0.2, 0.5, 0.6), strict=True):
        reader.take(b"data: %b\n\n" % json.dumps(event).encode(), at_s)
    reader.finish(0.7)
    timing = reader.findings.timing
    assert (timing.first_s, timing.visible_s) == (0.2, 0.2)
    assert reader.findings.usage.reasoning_tokens == 4


def test_reasoning_details_are_reasoning() -> None:
    reader = StreamReader(PROTOCOLS["/v1/chat/completions"], None, choices=1)
    reader.take(_chat_event({"reasoning_details": [{"text": "hm"}]}, {}), 0.2)
    reader.take(_chat_event({"content": "yes"}, {}), 0.5)
    reader.finish(0.6)
    timing = reader.findings.timing
    assert (timing.first_s, timing.visible_s, timing.reasoning_s) == (0.2, 0.5, 0.3)
