"""The media in the messages of a request."""

import base64
import json
from typing import Any

import pytest

from agent.records.request import ProxyView
from agent.sources.proxy.exchange import Ending
from tests.sources.proxy.measuring.playing import JSON_HEAD, Setup

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
