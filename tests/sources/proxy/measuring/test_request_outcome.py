"""Outcomes that only the words in a response show."""

import json
from typing import Any

import pytest

from agent.records.request import Status
from tests.sources.proxy.measuring.playing import JSON_HEAD, STREAM_HEAD, Setup, route

_STREAMED, _WHOLE = STREAM_HEAD, JSON_HEAD


@pytest.mark.parametrize(
    ("name", "head", "response", "reason"),
    [
        ("chat", _WHOLE, {"choices": [{"finish_reason": "abort"}]}, "abort"),
        ("chat", _WHOLE, {"choices": [{"finish_reason": "error"}]}, "error"),
        (
            "completions",
            _WHOLE,
            {"choices": [{"finish_reason": "stop"}, {"finish_reason": "abort"}]},
            "abort",
        ),
        ("responses", _WHOLE, {"status": "cancelled"}, "abort"),
        ("chat", _STREAMED, {"choices": [{"delta": {}, "finish_reason": "abort"}]}, "abort"),
        (
            "responses",
            _STREAMED,
            {"type": "response.completed", "response": {"status": "cancelled"}},
            "abort",
        ),
    ],
)
def test_a_request_that_the_engine_gave_up_failed(
    name: str, head: Any, response: Any, reason: str
) -> None:
    text = json.dumps(response).encode()
    sent = [text] if head is _WHOLE else [b"data: " + text + b"\n\n", b"data: [DONE]\n\n"]
    played = Setup().play(route(name), {"stream": head is _STREAMED}, sent, head=head)
    assert (played.record.status, played.view.error) == (Status.ERROR, reason)
