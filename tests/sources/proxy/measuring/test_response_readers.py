"""The token times that the readers of responses find."""

import json
from dataclasses import replace

import pytest

from agent.analysis.quantiles import bin_of
from agent.catalog.reasons import ProxyFailure
from agent.sources.proxy.measuring.api_protocols import PROTOCOLS, ApiProtocol
from agent.sources.proxy.measuring.parsed_event import VISIBLE_TOKEN
from agent.sources.proxy.measuring.response_readers import ResponseFindings
from agent.sources.proxy.measuring.stream_reader import MAX_DEFERRED_PIECES, StreamReader
from tests.sources.proxy.measuring.playing import (
    STREAMS,
    VERSION,
    events,
    play,
    recorded,
    route,
)


def test_one_event_with_all_tokens_has_no_time_per_token() -> None:
    sent = events(recorded("responses"))
    deltas = [event for event in sent if b"output_text.delta" in event]
    record = play("responses", [event for event in sent if event not in deltas[1:]]).record
    assert record.output_tokens == 24
    assert (record.tpot_s, record.max_gap_s) == (None, None)


def chat_with_reasoning(deltas: list[dict[str, str]], tokens: int, reasoning: int) -> list[bytes]:
    """A stream of an event for each delta, whose engine counts so many tokens of reasoning."""
    usage = {
        "prompt_tokens": 8,
        "completion_tokens": tokens,
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }
    sent = [
        *({"choices": [{"delta": delta}]} for delta in deltas),
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": usage},
    ]
    return [b"data: " + json.dumps(event).encode() + b"\n\n" for event in sent]


@pytest.mark.parametrize(
    ("deltas", "tokens"),
    [
        # Hidden, as by `include_reasoning: false` of vLLM: the last 4 of 104 tokens were seen.
        ([{"content": "a"}] * 3, 4),
        # Streamed as reasoning, or as text: 104 tokens were seen.
        ([{"reasoning": "a"}, {"content": "a"}, {"content": "a"}], 104),
        ([{"content": "a"}, {"reasoning": "a"}, {"content": "a"}], 104),
        ([{"content": "a"}] * 103, 104),
    ],
)
def test_reasoning_that_is_not_streamed_is_in_no_time_per_token(
    deltas: list[dict[str, str]], tokens: int
) -> None:
    sent = chat_with_reasoning(deltas, 104, 100)
    record = play("chat.usage", [*sent, b"data: [DONE]\n\n"]).record
    assert (record.output_tokens, record.reasoning_tokens) == (104, 100)
    assert record.tpot_s == pytest.approx(len(deltas) / (tokens - 1))


@pytest.mark.parametrize("name", ["chat.usage", "completions.usage"])
def test_one_event_with_all_tokens_and_the_finish_reason_has_no_time_per_token(name: str) -> None:
    *_, with_last_text, usage, done = events(recorded(name))
    record = play(name, [with_last_text, usage, done]).record
    assert (record.ttft_s, record.output_tokens) == (1, 24)
    assert (record.tpot_s, record.max_gap_s) == (None, None)


NAMES = sorted(path.stem.removeprefix(VERSION) for path in STREAMS.glob("*.sse"))
CHAT = PROTOCOLS["/v1/chat/completions"]
# It can read no event by itself.
ONLY_RUNS = replace(CHAT, read_event=lambda _: None)
TOKEN = events(recorded("chat.plain"))[2]
LAST = b"data: [DONE]\n\n"


def read(pieces: list[bytes], protocol: ApiProtocol = CHAT) -> ResponseFindings:
    """What is found in pieces that arrive a second apart."""
    reader = StreamReader(protocol, None, choices=1)
    for second, piece in enumerate(pieces):
        reader.take(piece, float(second))
    reader.catch_up()
    return reader.findings


@pytest.mark.parametrize("name", NAMES)
def test_each_event_of_a_run_is_a_visible_token_by_itself(name: str) -> None:
    protocol = PROTOCOLS[route(name)]
    data = [event[len(b"data: ") : -2] for event in events(recorded(name))]
    count = protocol.count_tokens or (lambda _: 0)
    tokens = [line for line in data if count(line)]
    assert all(protocol.read_event(line) is VISIBLE_TOKEN for line in tokens)
    assert count(b"\n".join(tokens)) == len(tokens)
    others = [line for line in data if line not in tokens]
    assert not any(count(b"\n".join([*tokens, line])) for line in others)


def test_the_tokens_of_a_run_have_the_times_of_their_pieces() -> None:
    found = read([TOKEN, TOKEN * 3, TOKEN + LAST], ONLY_RUNS)
    assert found.missed is None
    assert found.done
    assert found.response_id
    assert (found.timing.first_s, found.timing.visible_s) == (0.0, 0.0)
    assert found.timing.gaps == {bin_of(0.0): 2, bin_of(1.0): 2}
    assert found.timing.max_gap_s == 1.0


def test_the_end_of_a_stream_is_no_token() -> None:
    found = read([TOKEN * 2, TOKEN, LAST], ONLY_RUNS)
    assert found.done
    assert found.timing.gaps == {bin_of(0.0): 1, bin_of(1.0): 1}


def test_reasoning_before_a_token_is_read_at_once() -> None:
    thought = TOKEN.replace(b'"content":', b'"reasoning":')
    found = read([thought, thought * 2 + TOKEN, TOKEN + LAST], ONLY_RUNS)
    assert (found.missed, found.done) == (None, True)
    assert (found.timing.first_s, found.timing.visible_s) == (0.0, 1.0)
    assert found.timing.gaps == {bin_of(0.0): 2, bin_of(1.0): 2}


def test_a_run_in_one_piece_has_a_longest_gap_of_zero() -> None:
    assert read([TOKEN * 3], ONLY_RUNS).timing.max_gap_s == 0.0


@pytest.mark.parametrize(
    ("piece", "tokens"),
    [
        (TOKEN[:-2] + TOKEN[len(b"data: ") :] + TOKEN, 1),
        (TOKEN.replace(b'"choices":', b'\n\ndata: "choices":') + TOKEN, 1),
        (TOKEN[:-2] + b"\ndata: \n\n" + TOKEN, 2),
        (b"event: chunk\n" + TOKEN + TOKEN, 2),
        (TOKEN + b": ping\n\n" + TOKEN, 2),
    ],
    ids=["two in an event", "one in two events", "of two lines", "named", "after a comment"],
)
def test_other_events_are_read_one_by_one(piece: bytes, tokens: int) -> None:
    found = read([TOKEN, piece])
    assert sum(found.timing.gaps.values()) == tokens
    unreadable = tokens == 1
    assert found.missed is (ProxyFailure.EVENT_UNREADABLE if unreadable else None)


def test_a_token_that_comes_in_two_pieces_has_the_time_of_the_second() -> None:
    found = read([TOKEN, TOKEN + TOKEN[:20], TOKEN[20:], TOKEN])
    assert found.timing.gaps == {bin_of(1.0): 3}


def test_a_response_without_an_id_is_read() -> None:
    unnamed = TOKEN.replace(b'"id":"', b'"no_id":"')
    found = read([unnamed * 3])
    assert found.response_id is None
    assert found.timing.gaps == {bin_of(0.0): 2}


def test_after_a_token_without_a_count_the_tokens_of_an_event_are_unknown() -> None:
    one, three = (
        TOKEN.replace(b"}]}", b'}],"usage":{"completion_tokens":%d}}' % number) for number in (1, 3)
    )
    assert read([one, three]).timing.chunk_tokens == 2
    assert read([one, three, *[TOKEN] * MAX_DEFERRED_PIECES]).timing.chunk_tokens is None
