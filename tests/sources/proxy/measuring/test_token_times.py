"""The time per output token against clients' own code, on streams whose last events come late."""

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


@pytest.mark.parametrize("name", ["chat.usage", "completions.usage"])
def test_one_event_with_all_tokens_and_the_finish_reason_has_no_time_per_token(name: str) -> None:
    *_, with_last_text, usage, done = events(recorded(name))
    record = play(name, [with_last_text, usage, done]).record
    assert (record.ttft_s, record.output_tokens) == (1, 24)
    assert (record.tpot_s, record.max_gap_s) == (None, None)
