"""The time per output token against clients' own code, on streams whose last events come late."""

import json

import pytest

from tests.real_parts.load_generators import Stream, client_tpot_s
from tests.sources.proxy.measuring.playing import Setup, events, play, recorded, route

# vLLM's benchmark reads no messages and counts no tool calls. AIPerf counts the event that repeats
# the whole text of /v1/responses as one with tokens.
STREAMS = {
    "responses": "vllm",
    "responses-reasoning": "vllm",
    **dict.fromkeys(
        ("responses-tools", "messages", "messages-reasoning", "messages-tools"), "aiperf"
    ),
}
# As a pacer does, that delays each event alike: those after the last token end the request later.
EVERY_S = 0.02


def test_the_time_per_token_ends_at_the_last_token_as_that_of_clients() -> None:
    played = {name: play(name, setup=Setup(), every_s=EVERY_S).record for name in STREAMS}
    streams = [
        Stream(
            client=STREAMS[name],
            endpoint=route(name).rpartition("/")[2],
            events=[
                (event.decode(), EVERY_S * number)
                for number, event in enumerate(events(recorded(name)), 1)
            ],
            tokens=record.output_tokens or 0,
        )
        for name, record in played.items()
    ]
    theirs = dict(zip(STREAMS, client_tpot_s(streams), strict=True))
    assert {name: record.tpot_s for name, record in played.items()} == pytest.approx(theirs)


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
