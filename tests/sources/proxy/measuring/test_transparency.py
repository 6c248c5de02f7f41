"""The client gets what it would get without the agent, however the bytes arrive."""

import re
from collections.abc import Sequence
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.sources.proxy.exchange import Ending
from agent.sources.proxy.measuring.request_measuring import MeasuringOptions
from tests.sources.proxy.measuring.playing import (
    PAIRS,
    REQUESTS,
    STREAM_HEAD,
    Desk,
    Played,
    events,
    play,
    recorded,
    route,
)

FINAL = MeasuringOptions()
EACH = MeasuringOptions(continuous_usage=True)

# What differs between two runs of one request.
MOMENT = re.compile(rb'"created":\d+|chatcmpl-tool-[0-9a-f]+')

# Streams of several choices, which are not asked to count.
SEVERAL = [pair for pair in PAIRS if pair.endswith("-n2")]

# Which recorded answer an engine gives to the request that it gets, by what is asked for.
ANSWERS = [
    *[(pair, "usage", FINAL) for pair in PAIRS if pair not in SEVERAL],
    # vLLM cut this text into other events than without the counts.
    *[
        (pair, "continuous", EACH)
        for pair in PAIRS
        if f"{pair}.continuous" in REQUESTS and pair not in ("completions", *SEVERAL)
    ],
]
every_answer = pytest.mark.parametrize(("pair", "kind", "options"), ANSWERS)
HEADERS = ((b"x-request-id", b"same"),)


def answered(
    pair: str, kind: str, pieces: Sequence[bytes], desk: Desk, ending: Ending = Ending.COMPLETE
) -> Played:
    """The client asks for no counts, and gets the answer with counts through the agent."""
    asked = REQUESTS[f"{pair}.plain"]
    return desk.play(route(pair), asked, pieces, headers=HEADERS, every_s=0.0, ending=ending)


def pieces_of(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    places = sorted({0, *(cut % (len(data) + 1) for cut in cuts), len(data)})
    return [data[begin:end] for begin, end in pairwise(places)]


@every_answer
def test_a_client_that_asked_for_no_counts_gets_the_same_bytes_as_from_an_engine_that_counts_none(
    pair: str, kind: str, options: MeasuringOptions
) -> None:
    desk = Desk(options)
    played = answered(pair, kind, events(recorded(f"{pair}.{kind}")), desk)
    alone = recorded(f"{pair}.plain")
    assert MOMENT.sub(b"", played.client_bytes) == MOMENT.sub(b"", alone)
    assert played.record.output_tokens == play(f"{pair}.{kind}").record.output_tokens
    assert desk.failures == []


@pytest.mark.parametrize("pair", SEVERAL)
@pytest.mark.parametrize("options", [FINAL, EACH])
def test_several_choices_pass_as_they_are_and_nothing_more_is_asked_for_them(
    pair: str, options: MeasuringOptions
) -> None:
    desk = Desk(options)
    played = answered(pair, "plain", events(recorded(f"{pair}.plain")), desk)
    assert played.exchange.body is None
    assert played.client_bytes == recorded(f"{pair}.plain")
    assert played.record.output_tokens is None


@every_answer
@settings(max_examples=25)
@given(st.data())
def test_any_cut_of_the_bytes_gives_the_same_record_and_the_same_bytes(
    pair: str, kind: str, options: MeasuringOptions, data: st.DataObject
) -> None:
    sent = recorded(f"{pair}.{kind}")
    ends = list(accumulate(map(len, events(sent))))
    cuts = data.draw(st.lists(st.sampled_from(ends) | st.integers(0, len(sent)), max_size=40))
    whole = answered(pair, kind, events(sent), Desk(options))
    cut = answered(pair, kind, pieces_of(sent, cuts), Desk(options))
    assert cut.record == whole.record
    assert cut.client_bytes == whole.client_bytes


@pytest.mark.parametrize("name", REQUESTS)
def test_a_stream_that_comes_byte_by_byte_is_read_the_same(name: str) -> None:
    sent = recorded(name)
    whole = play(name, every_s=0.0, headers=HEADERS)
    single = play(name, [bytes([byte]) for byte in sent], every_s=0.0, headers=HEADERS)
    assert single.record == whole.record
    assert single.client_bytes == whole.client_bytes


@pytest.mark.parametrize("ends", [b"\r\n", b"\r"], ids=["CR LF", "CR"])
@pytest.mark.parametrize("name", ["chat.usage", "responses", "messages", "completions.usage"])
def test_other_ends_of_lines_change_nothing_in_the_record(name: str, ends: bytes) -> None:
    sent = recorded(name).replace(b"\n", ends)
    whole = play(name, every_s=0.0, headers=HEADERS)
    for pieces in ([sent], [sent[at : at + 7] for at in range(0, len(sent), 7)]):
        played = play(name, pieces, every_s=0.0, headers=HEADERS)
        assert played.client_bytes == sent
        assert played.record._replace(proxied=None) == whole.record._replace(proxied=None)


def test_a_stream_of_lines_that_end_in_cr_lf_is_given_back_as_it_is_without_the_counts() -> None:
    sent = recorded("chat.continuous").replace(b"\n", b"\r\n")
    alone = recorded("chat.plain").replace(b"\n", b"\r\n")
    for pieces in ([sent], [sent[at : at + 11] for at in range(0, len(sent), 11)]):
        played = answered("chat", "continuous", pieces, Desk(EACH))
        assert MOMENT.sub(b"", played.client_bytes) == MOMENT.sub(b"", alone)


@pytest.mark.parametrize("options", [FINAL, EACH])
def test_a_token_is_passed_on_with_the_piece_that_completes_its_event(
    options: MeasuringOptions,
) -> None:
    kind = "continuous" if options is EACH else "usage"
    sent = events(recorded(f"chat.{kind}"))
    played = answered("chat", kind, sent, Desk(options))
    # All but the one in which the choice finishes, which waits for the fingerprint.
    for piece in played.client_pieces[: len(sent) - 3]:
        assert piece.startswith(b"data: {")
        assert piece.endswith(b"}\n\n")
    assert played.client_pieces[len(sent) - 3] == b""
    assert b"system_fingerprint" in played.client_pieces[len(sent) - 2]


@pytest.mark.parametrize("ending", Ending)
def test_a_stream_that_stops_anywhere_before_its_counts_leaves_nothing_back(
    ending: Ending,
) -> None:
    sent = recorded("chat.usage")
    end = sent.index(b'"choices":[]')
    # The last lengths end around the event in which the choice finishes.
    for length in (*range(0, end, 97), *range(sent.rindex(b"}", 0, end) - 2, end)):
        played = answered("chat", "usage", [sent[:length]], Desk(), ending)
        assert played.client_bytes == sent[:length]


def test_an_engine_that_counts_for_every_client_is_left_to_do_so() -> None:
    sent = recorded("chat.continuous")
    played = answered("chat", "continuous", events(sent), Desk(FINAL))
    assert played.client_bytes == sent
    assert played.record.output_tokens == 24


def test_an_engine_that_counts_nothing_is_passed_on_whole() -> None:
    sent = recorded("chat.plain")
    played = answered("chat", "plain", events(sent), Desk(FINAL))
    assert played.client_bytes == sent
    assert played.record.output_tokens is None


def test_events_keep_their_order_when_one_comes_after_the_end_of_its_choice() -> None:
    sent = events(recorded("chat.plain"))
    late = [*sent[:5], sent[-2], sent[5], sent[-1]]
    played = answered("chat", "plain", late, Desk(FINAL))
    assert played.client_bytes == b"".join(late)


def test_counts_that_stay_the_same_are_taken_out_too() -> None:
    sent = events(recorded("chat.continuous"))
    again = [*sent[:2], sent[1], sent[1], *sent[2:]]
    played = answered("chat", "continuous", again, Desk(EACH))
    assert b"usage" not in played.client_bytes
    assert sum((played.view.gaps or {}).values()) == 25


def test_an_event_without_counts_keeps_its_empty_member() -> None:
    sent = recorded("chat.usage").replace(b',"token_ids":null}]}', b'}],"usage":null}')
    played = answered("chat", "usage", events(sent), Desk(FINAL))
    assert played.client_bytes.count(b'"usage":null') == sent.count(b'"usage":null') > 0


# Garbage

FRAGMENTS = (
    b"data: ",
    b"data:[DONE]\n\n",
    b"\n\n",
    b"\r",
    b"\n",
    b": keep-alive\n\n",
    b'{"choices":[{"index":0,"delta":{"content":"',
    b'"},"finish_reason":null}]}',
    b'"usage":{"completion_tokens":',
    b'"finish_reason":"',
    b'"error":{',
    b"\xef\xbb\xbf",
    "\u2028\u2029\x85".encode(),
    b'{"type":"response.completed","response":7}',
    b'{"type":"message_delta","usage":[],"delta":1}',
    b'{"choices":[],"usage":{"prompt_tokens":-1,"completion_tokens":1e999}}',
    b'{"choices":{"0":1},"usage":{}}',
    b'{"error":"a text"}',
    b"event: error\n",
    b"[" * 2000,
    b"\x00\xff\xfe",
)
garbage = st.lists(st.sampled_from(FRAGMENTS) | st.binary(max_size=20), max_size=30)


@pytest.mark.parametrize("name", ["chat.usage", "completions.usage", "responses", "messages"])
@given(before=garbage, between=garbage)
def test_garbage_never_raises_and_passes_unchanged(
    name: str, before: list[bytes], between: list[bytes]
) -> None:
    sent = [*before, *events(recorded(name))[:6], *between, *events(recorded(name))[6:9]]
    desk = Desk()
    played = play(name, sent, desk=desk)
    assert played.client_bytes == b"".join(sent)
    assert "measuring" not in desk.failures
    assert "record" not in desk.failures


@given(before=garbage, between=garbage, options=st.sampled_from([FINAL, EACH]))
def test_garbage_in_a_stream_that_is_asked_for_counts_never_raises(
    before: list[bytes], between: list[bytes], options: MeasuringOptions
) -> None:
    sent = [*before, *events(recorded("chat.continuous"))[:6], *between]
    desk = Desk(options)
    answered("chat", "continuous", sent, desk)
    assert "measuring" not in desk.failures
    assert "record" not in desk.failures


def test_what_stands_in_generated_text_is_not_taken_for_counts() -> None:
    spoken = (
        rb"say \"usage\":{\"completion_tokens\":9} or \"finish_reason\":\"stop\" or \n\ndata: x"
    )
    text = b'"content":"' + spoken + b'"'
    sent = re.sub(rb'"content":"[a-z]+"', lambda _: text, recorded("chat.usage"))
    desk = Desk()
    played = play("chat.usage", events(sent), desk=desk, head=STREAM_HEAD)
    assert played.record.output_tokens == 24
    assert played.record.finish_reason == "length"
    assert sum((played.view.gaps or {}).values()) == 23
    assert desk.failures == []


@pytest.mark.parametrize("token", [b"usage", b"finish_reason", b"error", b"text"])
def test_a_token_named_like_a_member_in_the_log_probabilities_tells_nothing(token: bytes) -> None:
    sent = recorded("completions-logprobs.usage")
    named = re.sub(rb'"top_logprobs":\[\{"[^"]+"', b'"top_logprobs":[{"' + token + b'"', sent)
    assert named.count(b'"' + token + b'":-') == 6
    played = play("completions-logprobs.usage", events(named))
    assert played.record == play("completions-logprobs.usage").record._replace(
        request_id=played.record.request_id, proxied=played.view
    )
    assert played.view.error is None
