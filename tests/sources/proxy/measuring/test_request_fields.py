"""Fields of a request body, and the usage options that the proxy adds."""

import base64
import json
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.records.request import ProxyView
from agent.sources.proxy.exchange import Ending, RawHeaders
from agent.sources.proxy.measuring.api_protocols import PROTOCOLS
from agent.sources.proxy.measuring.json_values import json_keys
from agent.sources.proxy.measuring.measured_exchange import MeasuringOptions
from agent.sources.proxy.measuring.request_fields import UNKNOWN, RequestFields, read_request_fields
from tests.sources.proxy.measuring.playing import JSON_HEAD, Played, Setup

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
    fields = read_request_fields(body, PROTOCOLS[CHAT], count_tokens=False, continuous_usage=True)
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


REQUEST_ID = b"x-request-id"
KEY = b"sk-0123456789abcdef"


def played_with(*headers: tuple[bytes, bytes], setup: Setup | None = None) -> Played:
    return (setup or Setup()).play("/v1/completions", {"prompt": "a"}, [], headers=headers)


def tenant(*headers: tuple[bytes, bytes], named: str | None = None) -> str | None:
    return played_with(*headers, setup=Setup(MeasuringOptions(tenant_header=named))).record.tenant


def test_the_tenant_is_a_digest_of_the_key() -> None:
    known = tenant((b"authorization", b"Bearer " + KEY))
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
        ((b"authorization", b"bearer  " + KEY),),
        ((b"x-api-key", KEY),),
        ((b"x-api-key", b" " + KEY + b" "),),
        ((b"authorization", b"Basic dXNlcg=="), (b"x-api-key", KEY)),
    ],
)
def test_one_key_is_one_tenant_in_any_header(headers: RawHeaders) -> None:
    assert tenant(*headers) == tenant((b"authorization", b"Bearer " + KEY))


@pytest.mark.parametrize(
    "headers",
    [
        (),
        ((b"authorization", b"Bearer "),),
        ((b"authorization", b"Basic dXNlcg=="),),
        ((b"x-api-key", b""),),
    ],
)
def test_without_a_key_the_tenant_is_unknown(headers: RawHeaders) -> None:
    assert tenant(*headers) is None


def test_the_tenant_header_wins_over_the_key() -> None:
    headers = ((b"x-team", b" search "), (b"x-api-key", KEY))
    assert tenant(*headers, named="X-Team") == "search"
    assert tenant(*headers) == tenant((b"x-api-key", KEY))


@pytest.mark.parametrize("value", [b"", b"x" * 257, b"a\x00b", b"\xff\xfe"])
def test_an_unusable_tenant_header_falls_back_to_the_key(value: bytes) -> None:
    headers = ((b"x-team", value), (b"x-api-key", KEY))
    assert tenant(*headers, named="x-team") == tenant((b"x-api-key", KEY))


@pytest.mark.parametrize("value", [None, b""])
def test_a_request_without_an_id_gets_its_span_id(value: bytes | None) -> None:
    played = played_with(*(() if value is None else ((REQUEST_ID, value),)))
    assert played.record.request_id == played.record.span_id
    own = (REQUEST_ID, played.record.span_id.encode())
    assert own in played.exchange.headers
    assert played.exchange.added_headers == (own,)


@pytest.mark.parametrize("value", [b"x" * 257, b"a\x07", b"\xff"])
def test_an_unusable_id_passes_unchanged_and_the_client_gets_the_one_of_the_row(
    value: bytes,
) -> None:
    played = played_with((REQUEST_ID, value))
    assert played.record.request_id == played.record.span_id
    # What the exchange does not replace is relayed as the client sent it.
    assert REQUEST_ID not in dict(played.exchange.headers)
    assert played.exchange.added_headers == ((REQUEST_ID, played.record.span_id.encode()),)


@pytest.mark.parametrize("value", ["x" * 256, "größe", "a b"])
def test_an_id_of_up_to_256_bytes_is_that_of_the_row(value: str) -> None:
    played = played_with((REQUEST_ID, value.encode()))
    assert played.record.request_id == value
    assert REQUEST_ID not in dict(played.exchange.headers)
    assert played.exchange.added_headers == ()


def test_a_client_may_get_no_id() -> None:
    setup = Setup(MeasuringOptions(return_request_id=False))
    played = played_with(setup=setup)
    assert played.exchange.added_headers == ()
    assert (REQUEST_ID, played.record.span_id.encode()) in played.exchange.headers


def test_the_engine_gets_the_trace_context_and_the_record_its_ids() -> None:
    setup = Setup()
    played = played_with(setup=setup)
    (span,) = setup.tracing.spans
    assert set(span.headers) <= set(played.exchange.headers)
    assert (played.record.trace_id, played.record.span_id) == (span.trace_id, span.span_id)
    assert span.records == [played.record]


def test_limits_are_read_in_milliseconds_and_recorded_in_seconds() -> None:
    setup = Setup()
    headers = ((b"x-slo-ttft-ms", b"250"), (b"x-slo-tpot-ms", b" 12.5 "))
    view = played_with(*headers, setup=setup).view
    assert (view.ttft_limit_s, view.tpot_limit_s) == (0.25, 0.0125)
    assert setup.failures == []


@pytest.mark.parametrize("value", [b"", b"0", b"nan", b"inf", b"fast", b"\xff"])
def test_a_limit_that_is_not_a_positive_number_is_ignored_and_counted(value: bytes) -> None:
    setup = Setup()
    headers = ((b"x-slo-ttft-ms", value), (b"x-slo-tpot-ms", b"30"))
    view = played_with(*headers, setup=setup).view
    assert (view.ttft_limit_s, view.tpot_limit_s) == (None, 0.03)
    assert setup.failures == ["slo_header"]


# Names of users, workloads and sessions


def test_trusted_headers_name_the_user_the_workload_and_the_session() -> None:
    names = MeasuringOptions(
        user_header="X-User", workload_header="X-Job", session_header="X-Session-ID"
    )
    sent = ((b"x-user", b"ann"), (b"x-job", "größe".encode()), (b"x-session-id", b"s" * 257))
    view = Setup(names).play("/v1/chat/completions", {"model": "m"}, [], headers=sent).view
    # A name that is too long for its column is unknown.
    assert (view.end_user, view.workload, view.session) == ("ann", "größe", None)
    view = Setup().play("/v1/chat/completions", {"model": "m"}, [], headers=sent).view
    assert (view.end_user, view.workload, view.session) == (None, None, None)


CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


def view_of(body: Any, path: str = CHAT, headers: Any = ()) -> ProxyView:
    """The proxy's view of a request with this body."""
    setup = Setup()
    played = setup.play(path, body, [b"{}"], head=JSON_HEAD, headers=headers)
    assert setup.failures == []
    return played.view


def data_url(size: int, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{encoded(size)}"


def encoded(size: int) -> str:
    # Of these bytes, base64 makes slashes.
    return base64.b64encode(b"\xff" * size).decode()


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


SEVERAL: list[dict[str, Any]] = [
    {"type": "text", "text": "data:image/png;base64,AAAA"},
    image(data_url(1000)),
    image(data_url(1001)),
    image("https://example.org/a.png"),
    {"type": "input_audio", "input_audio": {"data": encoded(2000), "format": "wav"}},
    {"type": "video_url", "video_url": {"url": data_url(4002, "video/mp4")}},
]


def test_parts_and_their_bytes_are_counted_over_all_messages() -> None:
    messages = [
        {"role": "system", "content": 'no part: {"type": "image_url"}'},
        {"role": "user", "content": SEVERAL},
        {"role": "assistant", "content": None},
        {"role": "user", "content": [image(data_url(7))]},
    ]
    view = view_of({"model": "m", "messages": messages})
    assert (view.media_parts, view.media_bytes) == (6, 1000 + 1001 + 2000 + 4002 + 7)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (RESPONSES, {"input": [{"content": [{"type": "input_image", "image_url": data_url(9)}]}]}),
        (
            MESSAGES,
            {
                "messages": [
                    {
                        "content": [
                            {"type": "image", "source": {"type": "base64", "data": encoded(9)}}
                        ]
                    }
                ]
            },
        ),
    ],
)
def test_the_parts_of_other_protocols_are_counted(path: str, body: Any) -> None:
    view = view_of(body, path)
    assert (view.media_parts, view.media_bytes) == (1, 9)


def test_slashes_that_are_escaped_are_no_bytes() -> None:
    body = json.dumps({"messages": [{"content": [image(data_url(1000))]}]}).replace("/", "\\/")
    setup = Setup()
    setup.begin(CHAT, body.encode()).ended(Ending.COMPLETE, 501.0)
    (record,) = setup.records
    assert record.proxied is not None
    assert (record.proxied.media_parts, record.proxied.media_bytes) == (1, 1000)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x"},
        {"messages": [{"role": "user", "content": "hello"}]},
        {"input": "hello"},
        {"messages": []},
        {"messages": [{"content": [{"type": "text", "text": "x"}]}]},
    ],
)
def test_a_request_without_media_has_none(body: Any) -> None:
    view = view_of(body)
    assert (view.media_parts, view.media_bytes) == (0, 0)


@pytest.mark.parametrize(
    "messages",
    [
        [1, {"type": 2}],
        [{"content": [1], "type": 2}],
        [{"content": [{"type": "image_url", "image_url": {"url": 7}}, 3]}],
        [{"type": 1}] + [{}] * 50_001,
    ],
)
def test_media_of_messages_that_cannot_be_read_are_unknown(messages: Any) -> None:
    view = view_of({"model": "m", "messages": messages})
    assert (view.media_parts, view.media_bytes) == (None, None)


def test_media_of_a_body_that_was_not_read_are_unknown() -> None:
    setup = Setup()
    setup.begin(CHAT, None).ended(Ending.COMPLETE, 501.0)
    (record,) = setup.records
    assert record.proxied is not None
    assert (record.proxied.media_parts, record.proxied.media_bytes) == (None, None)


def test_media_larger_than_what_is_built_of_a_body_are_counted() -> None:
    view = view_of({"messages": [{"content": [image(data_url(3_000_000))] * 2}]})
    assert (view.media_parts, view.media_bytes) == (2, 6_000_000)


@pytest.mark.parametrize(
    ("header", "body", "priority"),
    [
        (None, {"priority": 3}, 3),
        (None, {"priority": -3}, -3),
        (None, {}, None),
        (None, {"priority": True}, None),
        (None, {"priority": "3"}, None),
        (None, {"priority": 2**40}, None),
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
