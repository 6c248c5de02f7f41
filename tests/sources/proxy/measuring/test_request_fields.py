"""Fields of a request body, and the usage options that the proxy adds."""

import base64
import json
import re
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.records.request import ProxyView
from agent.sources.proxy.measuring.api_protocols import PROTOCOLS
from agent.sources.proxy.measuring.json_values import json_keys
from agent.sources.proxy.measuring.measured_exchange import MeasuringOptions
from agent.sources.proxy.measuring.request_fields import UNKNOWN, RequestFields, read_request_fields
from tests.sources.proxy.measuring.playing import JSON_HEAD, Played, Setup

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ONE = {"include_usage": True}
BOTH = {"include_usage": True, "continuous_usage_stats": True}


def fields_of(body: bytes, route: str = CHAT, *, continuous_usage: bool = False) -> RequestFields:
    return read_request_fields(
        body, PROTOCOLS[route], count_tokens=True, continuous_usage=continuous_usage
    )


# <what the client sent|what the engine gets instead>
@pytest.mark.parametrize(
    "edit",
    [
        '{<|"stream_options":{"include_usage":true},>"stream":true}',
        ' \n{<|"stream_options":{"include_usage":true},> "stream" : true , "x":1.50}\t',
        '{"stream":true,"stream_options":{<|"include_usage":true>}}',
        '{"stream":true,"stream_options": <null|{"include_usage":true}> }',
        '{"stream_options":{<|"include_usage":true,> "a":"\\u00e9" },"stream":true}',
        '{"stream_options":{"include_usage" : <false|true>},"stream":true}',
        '{"stream_options":{"include_usage":<null|true>,"b":2},"stream":true}',
    ],
)
def test_include_usage_is_added_with_the_smallest_edit_of_the_text(edit: str) -> None:
    body, sent = (re.sub(r"<(.*)\|(.*)>", kept, edit).encode() for kept in (r"\1", r"\2"))
    fields = fields_of(body)
    assert fields.body == sent
    assert (fields.final_usage_added, fields.chunk_usage_added) == (True, False)


@pytest.mark.parametrize(
    ("options", "final", "each"),
    [
        ({}, True, True),
        (ONE, False, True),
        ({"continuous_usage_stats": True}, True, True),
        ({"continuous_usage_stats": False, "include_usage": False}, True, True),
        (BOTH, False, False),
    ],
)
def test_continuous_usage_is_added_to_the_clients_options(
    options: Any, final: bool, each: bool
) -> None:
    body = {"stream": True, "stream_options": options}
    fields = fields_of(json.dumps(body).encode(), continuous_usage=True)
    assert (fields.final_usage_added, fields.chunk_usage_added) == (final, each)
    if final or each:
        assert json.loads(fields.body or b"") == {"stream": True, "stream_options": BOTH}
    else:
        assert fields == RequestFields(streamed=True, choices=1)


@pytest.mark.parametrize(
    "body",
    [
        b'{"stream":false}',
        b"{}",
        b'{"stream":1}',
        b'{"stream":"true"}',
        b'{"stream":true,"stream_options":[]}',
        b'{"stream":true,"stream_options":"x"}',
        b'{"stream":true,"stream_options":{"include_usage":"yes"}}',
        b'{"stream":true,"stream_options":{"a":1,"a":2}}',
    ],
)
def test_a_body_that_is_no_stream_or_that_an_engine_may_reject_is_unchanged(body: bytes) -> None:
    fields = fields_of(body)
    assert fields is not UNKNOWN
    added = (fields.body, fields.final_usage_added, fields.chunk_usage_added)
    assert added == (None, False, False)


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


@pytest.mark.parametrize(
    ("route", "count_tokens"), [(RESPONSES, True), (MESSAGES, True), (CHAT, False)]
)
def test_no_option_is_added_where_tokens_are_counted_anyway_or_not_at_all(
    route: str, count_tokens: bool
) -> None:
    body = b'{"model":"m","stream":true}'
    fields = read_request_fields(
        body, PROTOCOLS[route], count_tokens=count_tokens, continuous_usage=True
    )
    assert fields == RequestFields(model="m", streamed=True, choices=1)


@pytest.mark.parametrize(
    ("body", "model"),
    [
        ({"model": "org/llama:7b"}, "org/llama:7b"),
        ({}, None),
        *(({"model": unusable}, None) for unusable in ("", 7, None, "x" * 257, "a\nb", "\ud800")),
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
        *(({"n": n}, 2) for n in (2.0, "2")),
        *(({"n": n}, 1) for n in (None, True, 2.5, float("inf"), "two", "9" * 5000, -2)),
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


REQUEST_ID = b"x-request-id"
KEY = b"sk-0123456789abcdef"
BEARER = (b"authorization", b"Bearer " + KEY)
X_API_KEY = (b"x-api-key", KEY)
NO_KEY = (b"authorization", b"Basic dXNlcg==")


def played_with(*headers: tuple[bytes, bytes], setup: Setup | None = None) -> Played:
    return (setup or Setup()).play("/v1/completions", {"prompt": "a"}, [], headers=headers)


def tenant(*headers: tuple[bytes, bytes]) -> str | None:
    options = MeasuringOptions(tenant_header="X-Team")
    return played_with(*headers, setup=Setup(options)).record.tenant


def test_the_tenant_is_a_digest_of_the_key() -> None:
    known = played_with(BEARER).record.tenant
    assert known is not None
    assert known.startswith("key-")
    assert len(known) == len("key-") + 12
    assert KEY.decode() not in known
    assert known != tenant((b"x-api-key", b"another"))
    # A plain digest of the key may be known elsewhere.
    assert known != "key-" + sha256(KEY).hexdigest()[:12]


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"bearer  " + KEY)],
        [X_API_KEY],
        [(b"x-api-key", b" " + KEY + b" ")],
        [NO_KEY, X_API_KEY],
        *(
            [(b"x-team", unusable), X_API_KEY]
            for unusable in (b"", b"x" * 257, b"a\0b", b"\xff\xfe")
        ),
    ],
)
def test_one_key_is_one_tenant_in_any_header(headers: list[tuple[bytes, bytes]]) -> None:
    assert tenant(*headers) == tenant(BEARER)


@pytest.mark.parametrize(
    "headers", [[], [(b"authorization", b"Bearer ")], [NO_KEY], [(b"x-api-key", b"")]]
)
def test_without_a_key_the_tenant_is_unknown(headers: list[tuple[bytes, bytes]]) -> None:
    assert tenant(*headers) is None


def test_the_tenant_header_wins_over_the_key() -> None:
    assert tenant((b"x-team", b" search "), X_API_KEY) == "search"
    assert played_with((b"x-team", b"search"), X_API_KEY).record.tenant == tenant(X_API_KEY)


@pytest.mark.parametrize("value", [None, b"", b"x" * 257, b"a\x07", b"\xff"])
def test_without_a_usable_id_a_client_gets_the_span_id_of_the_row(value: bytes | None) -> None:
    played = played_with(*([] if value is None else [(REQUEST_ID, value)]))
    assert played.record.request_id == played.record.span_id
    own = (REQUEST_ID, played.record.span_id.encode())
    assert played.exchange.added_headers == (own,)
    # What the exchange does not replace is relayed as the client sent it.
    assert dict(played.exchange.headers).get(REQUEST_ID) == (None if value else own[1])


@pytest.mark.parametrize("value", ["x" * 256, "größe", "a b"])
def test_an_id_of_up_to_256_bytes_is_that_of_the_row(value: str) -> None:
    played = played_with((REQUEST_ID, value.encode()))
    assert played.record.request_id == value
    assert REQUEST_ID not in dict(played.exchange.headers)
    assert played.exchange.added_headers == ()


def test_a_client_may_get_no_id() -> None:
    played = played_with(setup=Setup(MeasuringOptions(return_request_id=False)))
    assert played.exchange.added_headers == ()
    assert (REQUEST_ID, played.record.span_id.encode()) in played.exchange.headers


def test_the_engine_gets_the_trace_context_and_the_record_its_ids() -> None:
    setup = Setup()
    played = played_with(setup=setup)
    (span,) = setup.tracing.spans
    assert set(span.headers) <= set(played.exchange.headers)
    assert (played.record.trace_id, played.record.span_id) == (span.trace_id, span.span_id)
    assert span.records == [played.record]


@pytest.mark.parametrize(
    ("value", "limit_s"),
    [(b"250", 0.25), *((bad, None) for bad in (b"", b"0", b"nan", b"inf", b"fast", b"\xff"))],
)
def test_a_limit_is_a_positive_number_of_milliseconds_or_ignored_and_counted(
    value: bytes, limit_s: float | None
) -> None:
    setup = Setup()
    headers = ((b"x-slo-ttft-ms", value), (b"x-slo-tpot-ms", b" 12.5 "))
    view = played_with(*headers, setup=setup).view
    assert (view.ttft_limit_s, view.tpot_limit_s) == (limit_s, 0.0125)
    assert setup.failures == ([] if limit_s else ["slo_header"])


@pytest.mark.parametrize(
    ("body", "session"),
    [
        ({"prompt_cache_key": "s-1"}, "s-1"),
        ({"prompt_cache_key": "s-1", "cache_salt": "secret"}, "s-1"),
        # printf 'goodput-agent session of cache salt\0secret' | sha256sum
        ({"cache_salt": "secret"}, "salt-56d3c4ed8d61"),
        ({"prompt_cache_key": 7, "cache_salt": ["a"]}, None),
        ({"prompt_cache_key": "s" * 257, "cache_salt": ""}, None),
        ({"cache_salt": None}, None),
    ],
)
def test_without_a_header_the_key_of_the_cache_names_the_session(
    body: dict[str, object], session: str | None
) -> None:
    assert fields_of(json.dumps(body).encode()).session == session


def test_a_trusted_header_wins_over_the_key_of_the_cache() -> None:
    setup = Setup(MeasuringOptions(session_header="X-Session-ID"))
    body = {"prompt": "a", "prompt_cache_key": "of-body"}
    for sent, session in (((), "of-body"), (((b"x-session-id", b"of-header"),), "of-header")):
        played = setup.play("/v1/completions", body, [], headers=sent)
        assert played.view.session == session


def test_trusted_headers_name_the_user_the_workload_and_the_session() -> None:
    names = MeasuringOptions(
        user_header="X-User", workload_header="X-Job", session_header="X-Session-ID"
    )
    sent = ((b"x-user", b"ann"), (b"x-job", "größe".encode()), (b"x-session-id", b"s" * 257))
    view = played_with(*sent, setup=Setup(names)).view
    # A name that is too long for its column is unknown.
    assert (view.end_user, view.workload, view.session) == ("ann", "größe", None)
    view = played_with(*sent).view
    assert (view.end_user, view.workload, view.session) == (None, None, None)


def view_of(body: Any, path: str = CHAT, headers: Any = ()) -> ProxyView:
    setup = Setup()
    played = setup.play(path, body, [b"{}"], head=JSON_HEAD, headers=headers)
    assert setup.failures == []
    return played.view


def encoded(size: int) -> str:
    # Of these bytes, base64 makes slashes.
    return base64.b64encode(b"\xff" * size).decode()


def data_url(size: int, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{encoded(size)}"


def image(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def messages(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


SEVERAL: list[dict[str, Any]] = [
    {"type": "text", "text": "data:image/png;base64,AAAA"},
    image(data_url(1000)),
    image(data_url(1001)),
    image("https://example.org/a.png"),
    {"type": "input_audio", "input_audio": {"data": encoded(2000), "format": "wav"}},
    {"type": "video_url", "video_url": {"url": data_url(4002, "video/mp4")}},
]
OVER_MESSAGES = [
    {"role": "system", "content": 'no part: {"type": "image_url"}'},
    *messages(*SEVERAL)["messages"],
    {"role": "assistant", "content": None},
    *messages(image(data_url(7)))["messages"],
]
OF_RESPONSES = {"input": [{"content": [{"type": "input_image", "image_url": data_url(9)}]}]}
OF_MESSAGES = messages({"type": "image", "source": {"type": "base64", "data": encoded(9)}})
UNREADABLE = [
    [1, {"type": 2}],
    [{"content": [1], "type": 2}],
    messages(image(7), 3)["messages"],
    [{"type": 1}] + [{}] * 50_001,
]


@pytest.mark.parametrize(
    ("path", "body", "parts", "size_bytes"),
    [
        (CHAT, {"messages": OVER_MESSAGES}, 6, 1000 + 1001 + 2000 + 4002 + 7),
        (RESPONSES, OF_RESPONSES, 1, 9),
        (MESSAGES, OF_MESSAGES, 1, 9),
        # Larger than what is built of a body.
        (CHAT, messages(*[image(data_url(3_000_000))] * 2), 2, 6_000_000),
        # Slashes that are escaped are no bytes.
        (CHAT, json.dumps(messages(image(data_url(1000)))).replace("/", "\\/").encode(), 1, 1000),
        (CHAT, {"prompt": "x"}, 0, 0),
        (CHAT, {"messages": [{"role": "user", "content": "hello"}]}, 0, 0),
        (RESPONSES, {"input": "hello"}, 0, 0),
        (CHAT, {"messages": []}, 0, 0),
        (CHAT, messages({"type": "text", "text": "x"}), 0, 0),
        *((CHAT, {"messages": unreadable}, None, None) for unreadable in UNREADABLE),
    ],
)
def test_parts_of_media_and_their_bytes_are_counted(
    path: str, body: Any, parts: int | None, size_bytes: int | None
) -> None:
    view = view_of(body, path)
    assert (view.media_parts, view.media_bytes) == (parts, size_bytes)


def test_media_of_a_body_that_was_not_read_are_unknown() -> None:
    view = Setup().play(CHAT, None, []).view
    assert (view.media_parts, view.media_bytes) == (None, None)


@pytest.mark.parametrize(
    ("header", "body", "priority"),
    [
        (None, {"priority": 3}, 3),
        (None, {"priority": -3}, -3),
        (None, {}, None),
        *((None, {"priority": unusable}, None) for unusable in (True, "3", 2**40)),
        # vLLM takes its header first, where that is a number.
        (b"5", {"priority": 3}, 5),
        (b"high", {"priority": 3}, 3),
        (b"5", {}, 5),
    ],
)
def test_the_priority_is_the_one_that_vllm_takes(
    header: bytes | None, body: Any, priority: int | None
) -> None:
    headers = () if header is None else ((b"x-vllm-priority", header),)
    assert view_of({"model": "m", **body}, headers=headers).priority == priority
