"""Fields of a request body, and the usage options that the proxy adds."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.sources.proxy.measuring.api_protocols import PROTOCOLS
from agent.sources.proxy.measuring.json_keys import json_keys
from agent.sources.proxy.measuring.request_fields import UNKNOWN, RequestFields, read_request_fields

CHAT = PROTOCOLS["/v1/chat/completions"]
ONE = {"include_usage": True}
BOTH = {"include_usage": True, "continuous_usage_stats": True}


def fields_of(
    body: bytes, route: str = "/v1/chat/completions", *, continuous_usage: bool = False
) -> RequestFields:
    return read_request_fields(
        body, PROTOCOLS[route], count_tokens=True, continuous_usage=continuous_usage
    )


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
def test_include_usage_is_added_with_the_smallest_edit_of_the_text(body: str, sent: str) -> None:
    fields = fields_of(body.encode())
    assert fields.body == sent.encode()
    assert (fields.final_usage_added, fields.chunk_usage_added) == (True, False)


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
def test_continuous_usage_is_added_to_the_clients_options(
    options: Any, wanted: Any, final: bool, each: bool
) -> None:
    body = {"stream": True} if options is None else {"stream": True, "stream_options": options}
    fields = fields_of(json.dumps(body).encode(), continuous_usage=True)
    assert fields.body is not None
    assert json.loads(fields.body) == {"stream": True, "stream_options": wanted}
    assert (fields.final_usage_added, fields.chunk_usage_added) == (final, each)


def test_a_body_that_has_all_options_is_unchanged() -> None:
    body = json.dumps({"stream": True, "stream_options": BOTH}).encode()
    assert fields_of(body, continuous_usage=True) == RequestFields(streamed=True, choices=1)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"stream":false}', "no stream"),
        (b"{}", "no stream"),
        (b'{"stream":1}', "stream is not true"),
        (b'{"stream":"true"}', "stream is not true"),
        (b'{"stream":true,"stream_options":[]}', "not an object"),
        (b'{"stream":true,"stream_options":"x"}', "not an object"),
        (b'{"stream":true,"stream_options":{"include_usage":"yes"}}', "not a boolean"),
        (b'{"stream":true,"stream_options":{"a":1,"a":2}}', "a repeated key"),
    ],
)
def test_a_body_that_an_engine_may_reject_is_unchanged(body: bytes, why: str) -> None:
    fields = fields_of(body)
    assert fields is not UNKNOWN
    assert (fields.body, fields.final_usage_added, fields.chunk_usage_added) == (
        None,
        False,
        False,
    ), why


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[1]",
        b'{"stream":true',
        b'{"stream":true}{"stream":true}',
        b'{"model":"\xff","stream":true}',
        b'\xef\xbb\xbf{"stream":true}',
        '{"stream":true}'.encode("utf-16"),
        b'{"stream":true,"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"stream":true,"n":' + b"9" * 5000 + b"}",
    ],
)
def test_a_body_that_is_not_one_json_object_is_unknown(body: bytes) -> None:
    assert fields_of(body) is UNKNOWN


def test_of_a_repeated_key_the_last_value_counts_as_for_the_engines() -> None:
    body = b'{"model":"a","n":2,"stream":false,"model":"b","n":1,"stream":true}'
    fields = fields_of(body)
    assert fields.body is not None
    engines = json.loads(fields.body)
    assert (fields.model, fields.streamed, fields.choices) == ("b", True, 1)
    assert (engines["model"], engines["stream"], engines["n"]) == ("b", True, 1)


@pytest.mark.parametrize("route", ["/v1/responses", "/v1/messages"])
def test_protocols_that_always_count_get_no_options(route: str) -> None:
    fields = fields_of(b'{"model":"m","stream":true}', route, continuous_usage=True)
    assert fields == RequestFields(model="m", streamed=True, choices=1)


def test_no_option_is_added_when_count_tokens_is_off() -> None:
    body = b'{"model":"m","stream":true}'
    fields = read_request_fields(body, CHAT, count_tokens=False, continuous_usage=True)
    assert fields == RequestFields(model="m", streamed=True, choices=1)


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
def test_a_model_is_unknown_unless_its_name_is_a_short_printable_text(
    body: Any, model: str | None
) -> None:
    assert fields_of(json.dumps(body).encode()).model == model


@pytest.mark.parametrize(
    ("body", "choices"),
    [
        ({}, 1),
        ({"n": 3}, 3),
        ({"n": None}, 1),
        ({"n": True}, 1),
        ({"n": 2.0}, 2),
        ({"n": 2.5}, 1),
        ({"n": float("inf")}, 1),
        ({"n": "2"}, 2),
        ({"n": "two"}, 1),
        ({"n": "9" * 5000}, 1),
        ({"n": -2}, 1),
        ({"prompt": "a"}, 1),
        ({"prompt": ["a", "b"]}, 2),
        ({"prompt": ["a", "b"], "n": 2}, 4),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [[1, 2], [3]]}, 2),
        ({"prompt": []}, 1),
        ({"n": 2**63 - 1}, None),
        ({"n": 2**30, "prompt": ["a", "b"]}, None),
    ],
)
def test_choices_are_counted_over_all_prompts(body: Any, choices: int | None) -> None:
    assert fields_of(json.dumps(body).encode(), "/v1/completions").choices == choices


# Values whose text could be mistaken for a part of the object around them.
INNER: list[Any] = [{"n": {"stream": "}"}}, {"include_usage": [False]}, [1, {"a": [None]}], [], {}]
JSON = st.sampled_from([None, True, -7, 1.5e300, "", "\u00e9\u2028", '"}],:\\', *INNER])


@given(
    rest=st.dictionaries(
        st.text(max_size=6).filter(lambda name: name not in ("prompt", "n")), JSON
    ),
    options=st.none() | st.dictionaries(st.text(max_size=6), JSON, max_size=3),
    spaces=st.sampled_from([None, 1, "\t"]),
    ascii_only=st.booleans(),
)
def test_the_engine_gets_the_same_object_plus_the_usage_options(
    rest: dict[str, Any], options: Any, spaces: Any, ascii_only: bool
) -> None:
    body = {**rest, "stream": True, "stream_options": options}
    text = json.dumps(body, indent=spaces, ensure_ascii=ascii_only)
    fields = fields_of(text.encode(), continuous_usage=True)
    assert fields.body is not None
    assert json.loads(fields.body) == {**body, "stream_options": {**(options or {}), **BOTH}}


@given(st.dictionaries(st.text(max_size=6), JSON), st.sampled_from([None, 2]))
def test_json_keys_have_the_offsets_of_their_texts(
    body: dict[str, Any], spaces: int | None
) -> None:
    text = json.dumps(body, indent=spaces)
    keys = json_keys(text)
    assert {name: key.value for name, key in keys.items()} == body
    for key in keys.values():
        assert json.loads(text[key.begin : key.end]) == key.value
        assert text[key.name] == '"'


@given(st.text(max_size=40) | st.binary(max_size=40).map(lambda raw: raw.decode("latin-1")))
def test_text_that_json_rejects_is_rejected(text: str) -> None:
    try:
        expected = json.loads(text)
    except ValueError:
        expected = None
    if isinstance(expected, dict):
        assert {name: key.value for name, key in json_keys(text).items()} == expected
    else:
        with pytest.raises(ValueError):  # noqa: PT011  # json's own errors are among them
            json_keys(text)
