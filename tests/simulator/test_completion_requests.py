"""Parsing of completion requests."""

import json
from typing import Any

import pytest

from agent.simulator.completion_requests import (
    ChatRequest,
    CompletionRequest,
    RefusalError,
    TextRequest,
    parsed,
)
from agent.simulator.scenario import Scenario


def _text(**fields: Any) -> TextRequest:
    return parsed(TextRequest, json.dumps({"prompt": "x", **fields}).encode(), Scenario())


def _chat(*contents: Any, **fields: Any) -> ChatRequest:
    messages = [{"role": "user", "content": content} for content in contents]
    return parsed(ChatRequest, json.dumps({"messages": messages, **fields}).encode(), Scenario())


@pytest.mark.parametrize(
    ("prompt", "tokens"), [("12345678", 2), ("123456789", 3), ("", 1), ([5, 6, 7], 3), ([], 1)]
)
def test_token_ids_are_counted_and_text_is_four_characters_a_token(
    prompt: object, tokens: int
) -> None:
    assert _text(prompt=prompt).prompt_tokens() == tokens


def test_all_text_of_a_conversation_counts() -> None:
    parts = [{"type": "text", "text": "12345678"}, {"type": "image_url", "image_url": {}}]
    assert _chat("1234", parts, None).prompt_tokens() == 1 + 2 + 1


def test_a_completion_is_16_tokens_by_default_and_a_chat_has_no_limit() -> None:
    assert _text().token_limit() == 16
    assert _text(max_tokens=None).token_limit() is None
    assert _chat("hi").token_limit() is None
    assert _chat("hi", max_tokens=9).token_limit() == 9
    assert _chat("hi", max_tokens=9, max_completion_tokens=4).token_limit() == 4


def test_fields_that_change_no_length_are_ignored() -> None:
    assert _chat("hi", tools=[{"anything": 1}], seed=4).n == 1


@pytest.mark.parametrize(
    ("kind", "body", "status", "error"),
    [
        (TextRequest, '{"prompt": "x", "model": "gpt"}', 404, ("NotFoundError", "model", "`gpt`")),
        (TextRequest, '{"prompt": "x", "n": 2}', 501, ("NotImplementedError", "n", "n=2")),
        (TextRequest, '{"prompt": "x", "max_tokens": 0}', 400, ("Bad Request", "max_tokens", "1")),
        (TextRequest, "{}", 400, ("Bad Request", "prompt", "required")),
        (ChatRequest, '{"messages": []}', 400, ("Bad Request", "messages", "at least 1")),
        (ChatRequest, "nonsense", 400, ("Bad Request", None, "JSON")),
        (
            TextRequest,
            json.dumps({"prompt": [1] * 8192}),
            400,
            ("BadRequestError", "input_tokens", "8192"),
        ),
    ],
)
def test_an_unsupported_request_is_refused_in_the_shape_of_vllm(
    kind: type[CompletionRequest], body: str, status: int, error: tuple[str, str | None, str]
) -> None:
    with pytest.raises(RefusalError) as raised:
        parsed(kind, body.encode(), Scenario())
    refusal: dict[str, Any] = raised.value.body["error"]
    assert raised.value.status == refusal["code"] == status
    assert (refusal["type"], refusal["param"]) == error[:2]
    assert error[2] in refusal["message"]
