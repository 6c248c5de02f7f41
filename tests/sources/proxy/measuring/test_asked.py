"""What a body asks for, and the counts that are asked for in addition."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.sources.proxy.measuring.asked import UNKNOWN, Asked, read_asked
from agent.sources.proxy.measuring.members import members
from agent.sources.proxy.measuring.protocols import PROTOCOLS

CHAT = PROTOCOLS["/v1/chat/completions"]
ONE = {"include_usage": True}
BOTH = {"include_usage": True, "continuous_usage_stats": True}


def asked_of(
    body: bytes, route: str = "/v1/chat/completions", *, continuous: bool = False
) -> Asked:
    return read_asked(body, PROTOCOLS[route], counted=True, continuous=continuous)


@pytest.mark.parametrize(
    ("body", "sent"),
    [
        ('{"stream":true}', '{"stream_options":{"include_usage":true},"stream":true}'),
        (
            ' \n{ "stream" : true , "x":1.50}\t',
            ' \n{"stream_options":{"include_usage":true}, "stream" : true , "x":1.50}\t',
        ),
        (
            '{"stream":true,"stream_options":{}}',
            '{"stream":true,"stream_options":{"include_usage":true}}',
        ),
        (
            '{"stream":true,"stream_options": null }',
            '{"stream":true,"stream_options": {"include_usage":true} }',
        ),
        (
            '{"stream_options":{ "a":"\\u00e9" },"stream":true}',
            '{"stream_options":{"include_usage":true, "a":"\\u00e9" },"stream":true}',
        ),
        (
            '{"stream_options":{"include_usage" : false},"stream":true}',
            '{"stream_options":{"include_usage" : true},"stream":true}',
        ),
        (
            '{"stream_options":{"include_usage":null,"b":2},"stream":true}',
            '{"stream_options":{"include_usage":true,"b":2},"stream":true}',
        ),
    ],
)
def test_counts_are_asked_for_with_the_smallest_change_of_the_text(body: str, sent: str) -> None:
    asked = asked_of(body.encode())
    assert asked.body == sent.encode()
    assert (asked.final, asked.each) == (True, False)


@pytest.mark.parametrize(
    ("options", "wanted", "final", "each"),
    [
        (None, BOTH, True, True),
        ({}, BOTH, True, True),
        (ONE, BOTH, False, True),
        ({"continuous_usage_stats": True}, BOTH, True, True),
        ({"continuous_usage_stats": False, "include_usage": False}, BOTH, True, True),
    ],
)
def test_counts_in_each_event_are_asked_for_beside_what_the_client_asks(
    options: Any, wanted: Any, final: bool, each: bool
) -> None:
    body = {"stream": True} if options is None else {"stream": True, "stream_options": options}
    asked = asked_of(json.dumps(body).encode(), continuous=True)
    assert asked.body is not None
    assert json.loads(asked.body) == {"stream": True, "stream_options": wanted}
    assert (asked.final, asked.each) == (final, each)


def test_a_client_that_asks_for_all_counts_itself_is_left_alone() -> None:
    body = json.dumps({"stream": True, "stream_options": BOTH}).encode()
    assert asked_of(body, continuous=True) == Asked(streamed=True, choices=1)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"stream":false}', "no stream"),
        (b"{}", "no stream"),
        (b'{"stream":1}', "no stream that is plainly one"),
        (b'{"stream":"true"}', "no stream that is plainly one"),
        (b'{"stream":true,"stream_options":[]}', "no object"),
        (b'{"stream":true,"stream_options":"x"}', "no object"),
        (b'{"stream":true,"stream_options":{"include_usage":"yes"}}', "no truth value"),
        (b'{"stream":true,"stream_options":{"a":1,"a":2}}', "a name twice"),
    ],
)
def test_what_an_engine_may_refuse_it_gets_unchanged(body: bytes, why: str) -> None:
    asked = asked_of(body)
    assert asked is not UNKNOWN
    assert (asked.body, asked.final, asked.each) == (None, False, False), why


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[1]",
        b'"text"',
        b"not json",
        b'{"stream":true',
        b'{"stream":true}}',
        b'{"stream":true}{"stream":true}',
        b'{"stream":true,}',
        b'{"stream" true}',
        b"{stream:true}",
        b'{"model":"a","model":"b","stream":true}',
        b'{"model":"\xff","stream":true}',
        b'\xef\xbb\xbf{"stream":true}',
        '{"stream":true}'.encode("utf-16"),
        b'{"stream":true,"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"stream":true,"a":' + b"9" * 5000 + b"}",
        b'{"a":"\n","stream":true}',
    ],
)
def test_a_body_that_is_not_plainly_one_object_is_not_read(body: bytes) -> None:
    assert asked_of(body) is UNKNOWN


@pytest.mark.parametrize("route", ["/v1/responses", "/v1/messages"])
def test_protocols_that_always_count_are_asked_nothing(route: str) -> None:
    asked = asked_of(b'{"model":"m","stream":true}', route, continuous=True)
    assert asked == Asked(model="m", streamed=True, choices=1)


def test_an_agent_that_is_to_ask_nothing_asks_nothing() -> None:
    body = b'{"model":"m","stream":true}'
    asked = read_asked(body, CHAT, counted=False, continuous=True)
    assert asked == Asked(model="m", streamed=True, choices=1)


@pytest.mark.parametrize(
    ("body", "model"),
    [
        ({"model": "org/llama:7b"}, "org/llama:7b"),
        ({"model": ""}, None),
        ({"model": 7}, None),
        ({"model": None}, None),
        ({}, None),
        ({"model": "x" * 257}, None),
        ({"model": "a\nb"}, None),
        ({"model": "\ud800"}, None),
    ],
)
def test_a_model_is_known_where_its_name_can_be_shown(body: Any, model: str | None) -> None:
    assert asked_of(json.dumps(body).encode()).model == model


@pytest.mark.parametrize(
    ("body", "choices"),
    [
        ({}, 1),
        ({"n": 3}, 3),
        ({"n": None}, 1),
        ({"n": True}, 1),
        ({"n": -2}, 1),
        ({"prompt": "a"}, 1),
        ({"prompt": ["a", "b"]}, 2),
        ({"prompt": ["a", "b"], "n": 2}, 4),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [[1, 2], [3]]}, 2),
        ({"prompt": []}, 1),
    ],
)
def test_choices_are_those_of_all_prompts(body: Any, choices: int) -> None:
    assert asked_of(json.dumps(body).encode(), "/v1/completions").choices == choices


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(
    rest=st.dictionaries(st.text(max_size=6).filter(lambda name: name != "prompt"), JSON),
    options=st.none() | st.dictionaries(st.text(max_size=6), JSON, max_size=3),
    spaces=st.sampled_from([None, 1, "\t"]),
    ascii_only=st.booleans(),
)
def test_an_engine_gets_the_same_object_with_the_counts_asked_for_and_nothing_else(
    rest: dict[str, Any], options: Any, spaces: Any, ascii_only: bool
) -> None:
    body = {**rest, "stream": True, "stream_options": options}
    text = json.dumps(body, indent=spaces, ensure_ascii=ascii_only)
    asked = asked_of(text.encode(), continuous=True)
    assert asked.body is not None
    assert json.loads(asked.body) == {**body, "stream_options": {**(options or {}), **BOTH}}


@given(st.dictionaries(st.text(max_size=6), JSON), st.sampled_from([None, 2]))
def test_members_are_found_where_their_texts_are(body: dict[str, Any], spaces: int | None) -> None:
    text = json.dumps(body, indent=spaces)
    found = members(text)
    assert {name: member.value for name, member in found.items()} == body
    for member in found.values():
        assert json.loads(text[member.begin : member.end]) == member.value
        assert text[member.name] == '"'


@given(st.text(max_size=40) | st.binary(max_size=40).map(lambda raw: raw.decode("latin-1")))
def test_any_other_text_is_refused_as_json_refuses_it(text: str) -> None:
    try:
        expected = json.loads(text)
    except ValueError:
        expected = None
    if isinstance(expected, dict):
        assert {name: member.value for name, member in members(text).items()} == expected
    else:
        with pytest.raises(ValueError):  # noqa: PT011  # json's own errors are among them
            members(text)
