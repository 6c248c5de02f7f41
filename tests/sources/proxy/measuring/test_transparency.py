"""The client gets the same bytes as without the agent, wherever they are cut."""

import json
import re
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.sources.proxy.exchange import Ending
from agent.sources.proxy.measuring.measured_exchange import MeasuringOptions
from tests.sources.proxy.measuring.playing import (
    PAIRS,
    REQUESTS,
    STREAM_HEAD,
    Played,
    Setup,
    events,
    play,
    recorded,
    route,
)

FINAL = MeasuringOptions()
EACH = MeasuringOptions(continuous_usage=True)

# What differs between two runs of one request.
VARYING = re.compile(rb'"created":\d+|chatcmpl-tool-[0-9a-f]+')

# Streams of several choices, to which no usage is added.
SEVERAL = [pair for pair in PAIRS if pair.endswith("-n2")]

# The recorded response that an engine sends, by the options of measuring.
RESPONSES = [
    *[(pair, "usage", FINAL) for pair in PAIRS if pair not in SEVERAL],
    # vLLM cut this text into other events than without usage.
    *[
        (pair, "continuous", EACH)
        for pair in PAIRS
        if f"{pair}.continuous" in REQUESTS and pair not in ("completions", *SEVERAL)
    ],
]
every_response = pytest.mark.parametrize(("pair", "kind", "options"), RESPONSES)
HEADERS = ((b"x-request-id", b"same"),)


def played_with_usage(
    pair: str, kind: str, pieces: Sequence[bytes], setup: Setup, ending: Ending = Ending.COMPLETE
) -> Played:
    """Play the response with usage to a client that asked for none."""
    request = REQUESTS[f"{pair}.plain"]
    return setup.play(route(pair), request, pieces, headers=HEADERS, every_s=0.0, ending=ending)


def pieces_of(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    places = sorted({0, *(cut % (len(data) + 1) for cut in cuts), len(data)})
    return [data[begin:end] for begin, end in pairwise(places)]


@pytest.mark.parametrize("pair", SEVERAL)
@pytest.mark.parametrize("options", [FINAL, EACH])
def test_streams_of_several_choices_get_no_usage_and_pass_unchanged(
    pair: str, options: MeasuringOptions
) -> None:
    setup = Setup(options)
    played = played_with_usage(pair, "plain", events(recorded(f"{pair}.plain")), setup)
    assert played.exchange.body is None
    assert played.client_bytes == recorded(f"{pair}.plain")
    assert played.record.output_tokens is None


@every_response
@settings(max_examples=8)
@given(st.data())
def test_added_usage_is_stripped_byte_for_byte_wherever_the_response_is_cut(
    pair: str, kind: str, options: MeasuringOptions, data: st.DataObject
) -> None:
    sent, setup = recorded(f"{pair}.{kind}"), Setup(options)
    whole = played_with_usage(pair, kind, events(sent), setup)
    assert VARYING.sub(b"", whole.client_bytes) == VARYING.sub(b"", recorded(f"{pair}.plain"))
    assert whole.record.output_tokens == play(f"{pair}.{kind}").record.output_tokens
    # All events come at once, in less time than the engine says that it took.
    assert setup.failures == (["engine_times"] if "metrics" in pair else [])
    ends = list(accumulate(map(len, events(sent))))
    cuts = data.draw(st.lists(st.sampled_from(ends) | st.integers(0, len(sent)), max_size=40))
    cut = played_with_usage(pair, kind, pieces_of(sent, cuts), Setup(options))
    assert (cut.record, cut.client_bytes) == (whole.record, whole.client_bytes)


@pytest.mark.parametrize("ends", [b"\n", b"\r\n", b"\r"], ids=["LF", "CR LF", "CR"])
def test_any_line_ends_and_cuts_give_the_same_record(ends: bytes) -> None:
    for name in REQUESTS:
        whole = play(name, every_s=0.0, headers=HEADERS)
        sent = recorded(name).replace(b"\n", ends)
        # A byte at a time, or several at once.
        size = 1 if ends == b"\r\n" else 7
        pieces = [sent[at : at + size] for at in range(0, len(sent), size)]
        played = play(name, pieces, every_s=0.0, headers=HEADERS)
        assert played.record._replace(proxied=None) == whole.record._replace(proxied=None), name
        assert played.view._replace(output_bytes=0) == whole.view._replace(output_bytes=0), name
        assert played.client_bytes == whole.client_bytes.replace(b"\n", ends), name


def backwards(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: backwards(inner) for key, inner in reversed(value.items())}
    return [backwards(inner) for inner in value] if isinstance(value, list) else value


SPELLINGS: dict[str, Callable[[Any], str]] = {
    "spaced": json.dumps,
    "indented": lambda value: json.dumps(value, separators=("\t,  ", " :\t"), ensure_ascii=False),
    "other order": lambda value: json.dumps(backwards(value), separators=(",", ":")),
}
every_spelling = pytest.mark.parametrize("spelling", SPELLINGS)


def respelled(stream: bytes, spelling: str) -> list[bytes]:
    """The events of a stream as another writer of JSON spells them."""

    def line(found: re.Match[bytes]) -> bytes:
        return b"data: " + SPELLINGS[spelling](json.loads(found[1])).encode()

    return [re.sub(rb"data: (\{.*\})", line, event) for event in events(stream)]


def contents(stream: bytes) -> list[Any]:
    """What the events of a stream say, without what differs between two runs."""
    found = re.findall(rb"data: (\{.*\})", re.sub(rb"chatcmpl-tool-[0-9a-f]+", b"", stream))
    return [{**json.loads(event), "created": None} for event in found]


@every_spelling
def test_the_record_does_not_depend_on_the_spelling(spelling: str) -> None:
    for name in REQUESTS:
        compact = play(name, headers=HEADERS)
        other = play(name, respelled(recorded(name), spelling), headers=HEADERS)
        assert other.record._replace(proxied=None) == compact.record._replace(proxied=None), name
        assert other.view._replace(output_bytes=0) == compact.view._replace(output_bytes=0), name


@every_spelling
@every_response
def test_added_usage_is_stripped_in_any_spelling(
    pair: str, kind: str, options: MeasuringOptions, spelling: str
) -> None:
    sent = respelled(recorded(f"{pair}.{kind}"), spelling)
    played = played_with_usage(pair, kind, sent, Setup(options))
    alone = b"".join(respelled(recorded(f"{pair}.plain"), spelling))
    assert contents(played.client_bytes) == contents(alone)


def test_usage_is_stripped_from_a_stream_with_cr_lf() -> None:
    sent = recorded("chat.continuous").replace(b"\n", b"\r\n")
    alone = recorded("chat.plain").replace(b"\n", b"\r\n")
    for pieces in ([sent], [sent[at : at + 11] for at in range(0, len(sent), 11)]):
        played = played_with_usage("chat", "continuous", pieces, Setup(EACH))
        assert VARYING.sub(b"", played.client_bytes) == VARYING.sub(b"", alone)


@pytest.mark.parametrize("options", [FINAL, EACH])
def test_a_token_is_sent_with_the_piece_that_completes_its_event(options: MeasuringOptions) -> None:
    kind = "continuous" if options is EACH else "usage"
    sent = events(recorded(f"chat.{kind}"))
    played = played_with_usage("chat", kind, sent, Setup(options))
    # All but the event with the finish reason, which waits for the fingerprint.
    for piece in played.client_pieces[: len(sent) - 3]:
        assert piece.startswith(b"data: {")
        assert piece.endswith(b"}\n\n")
    assert played.client_pieces[len(sent) - 3] == b""
    assert b"system_fingerprint" in played.client_pieces[len(sent) - 2]


@pytest.mark.parametrize("ending", Ending)
def test_no_byte_is_held_back_when_a_stream_stops(ending: Ending) -> None:
    sent = recorded("chat.usage")
    end = sent.index(b'"choices":[]')
    # The last lengths end around the event with the finish reason.
    for length in (*range(0, end, 97), *range(sent.rindex(b"}", 0, end) - 2, end)):
        played = played_with_usage("chat", "usage", [sent[:length]], Setup(), ending)
        assert played.client_bytes == sent[:length]


PLAIN = events(recorded("chat.plain"))


@pytest.mark.parametrize(
    ("pieces", "tokens"),
    [
        (PLAIN, None),
        (events(recorded("chat.continuous")), 24),
        # An event after the finish reason keeps its place.
        ([*PLAIN[:5], PLAIN[-2], PLAIN[5], PLAIN[-1]], None),
    ],
)
def test_a_stream_without_the_usage_that_was_added_is_unchanged(
    pieces: list[bytes], tokens: int | None
) -> None:
    played = played_with_usage("chat", "plain", pieces, Setup(FINAL))
    assert (played.client_bytes, played.record.output_tokens) == (b"".join(pieces), tokens)


def test_a_repeated_count_is_stripped() -> None:
    sent = events(recorded("chat.continuous"))
    again = [*sent[:2], sent[1], sent[1], *sent[2:]]
    played = played_with_usage("chat", "continuous", again, Setup(EACH))
    assert b"usage" not in played.client_bytes
    assert sum((played.view.gaps or {}).values()) == 25


def test_a_null_usage_is_kept() -> None:
    sent = recorded("chat.usage").replace(b',"token_ids":null}]}', b'}],"usage":null}')
    played = played_with_usage("chat", "usage", events(sent), Setup(FINAL))
    assert played.client_bytes.count(b'"usage":null') == sent.count(b'"usage":null') > 0


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
@given(before=garbage, between=garbage, options=st.sampled_from([FINAL, EACH]))
def test_garbage_passes_unchanged_and_never_raises(
    name: str, before: list[bytes], between: list[bytes], options: MeasuringOptions
) -> None:
    sent = [*before, *events(recorded(name))[:6], *between, *events(recorded(name))[6:9]]
    plain, added = Setup(), Setup(options)
    assert play(name, sent, setup=plain).client_bytes == b"".join(sent)
    if name == "chat.usage":
        sent = [*before, *events(recorded("chat.continuous"))[:6], *between]
        played_with_usage("chat", "continuous", sent, added)
    assert {"measuring", "record"}.isdisjoint([*plain.failures, *added.failures])


def test_json_inside_generated_text_is_not_read_as_usage() -> None:
    spoken = (
        rb"say \"usage\":{\"completion_tokens\":9} or \"finish_reason\":\"stop\" or \n\ndata: x"
    )
    text = b'"content":"' + spoken + b'"'
    sent = re.sub(rb'"content":"[a-z]+"', lambda _: text, recorded("chat.usage"))
    setup = Setup()
    played = play("chat.usage", events(sent), setup=setup, head=STREAM_HEAD)
    assert played.record.output_tokens == 24
    assert played.record.finish_reason == "length"
    assert sum((played.view.gaps or {}).values()) == 23
    assert setup.failures == []


@pytest.mark.parametrize("token", [b"usage", b"finish_reason", b"error", b"text"])
def test_a_token_named_like_a_key_in_logprobs_is_ignored(token: bytes) -> None:
    sent = recorded("completions-logprobs.usage")
    named = re.sub(rb'"top_logprobs":\[\{"[^"]+"', b'"top_logprobs":[{"' + token + b'"', sent)
    assert named.count(b'"' + token + b'":-') == 6
    played = play("completions-logprobs.usage", events(named))
    assert played.record == play("completions-logprobs.usage").record._replace(
        request_id=played.record.request_id, proxied=played.view
    )
    assert played.view.error is None
