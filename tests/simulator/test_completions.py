"""Bodies of completions."""

import json
from dataclasses import replace
from typing import Any

import pytest

from agent.simulator.batching import EngineRequest, Token
from agent.simulator.completions import (
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    RefusalError,
    TextCompletion,
    TextRequest,
    parsed,
)
from agent.simulator.scenario import Scenario
from tests.simulator.kit import engine_request


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


# Chunks as vLLM 0.32 writes them, with the simulator's text and fingerprint.
_CHAT = '{"id":"i","object":"chat.completion.chunk","created":1,"model":"m","choices":['
_TEXT = '{"id":"i","object":"text_completion","created":1,"model":"m","choices":['
_FINGERPRINT = '"system_fingerprint":"vllm-0.32.0+simulated"'
_CHAT_ROLE = '"index":0,"delta":{"role":"assistant","content":""},"logprobs":null'


def _completion(
    kind: type[Completion], *, usage: bool = False, continuous: bool = False
) -> Completion:
    return kind(
        id="i",
        created=1,
        model="m",
        prompt_tokens=4,
        include_usage=usage,
        continuous_usage=continuous,
    )


def _tokens(request: EngineRequest) -> list[Token]:
    positions = range(1, request.output_tokens + 1)
    return [Token(request=request, position=position, waited_s=0.01) for position in positions]


def _chunks(completion: Completion, request: EngineRequest | None = None) -> list[str]:
    tokens = _tokens(request or engine_request(output_tokens=2, max_tokens=2))
    bodies = (chunk for token in tokens for chunk in completion.chunks(token))
    return [json.dumps(body, separators=(",", ":")) for body in bodies]


def test_a_chat_stream_opens_with_the_role_and_ends_with_the_reason() -> None:
    assert _chunks(_completion(ChatCompletion)) == [
        f'{_CHAT}{{{_CHAT_ROLE},"finish_reason":null}}],'
        '"prompt_token_ids":null,"prompt_text":null}',
        f'{_CHAT}{{"index":0,"delta":{{"content":"This"}},"logprobs":null,'
        '"finish_reason":null,"token_ids":null}]}',
        f'{_CHAT}{{"index":0,"delta":{{"content":" answer"}},"logprobs":null,'
        f'"finish_reason":"length","stop_reason":null,"token_ids":null}}],{_FINGERPRINT}}}',
    ]


def test_each_token_of_a_chat_has_the_logprobs_that_were_asked_for() -> None:
    asked = _chat("hi", logprobs=True, top_logprobs=2)
    completion = replace(_completion(ChatCompletion), alternatives=asked.alternatives())
    _, *tokens = map(json.loads, _chunks(completion))
    for token in tokens:
        (logprobs,) = token["choices"][0]["logprobs"]["content"]
        assert len(logprobs["top_logprobs"]) == 2


def test_usage_is_in_a_separate_chunk_without_choices() -> None:
    usage = '"usage":{"prompt_tokens":4,"total_tokens":6,"completion_tokens":2}'
    for kind, opening in ((ChatCompletion, _CHAT), (TextCompletion, _TEXT)):
        chunks = _chunks(_completion(kind, usage=True))
        assert chunks[-1] == f"{opening}],{usage},{_FINGERPRINT}}}"
        assert not any("usage" in chunk or "fingerprint" in chunk for chunk in chunks[:-1])


def test_continuous_usage_counts_up_with_every_chunk() -> None:
    chat = _chunks(_completion(ChatCompletion, usage=True, continuous=True))
    usages = [json.loads(chunk)["usage"] for chunk in chat]
    assert [usage["completion_tokens"] for usage in usages] == [0, 1, 2, 2]
    assert [usage["total_tokens"] for usage in usages] == [4, 5, 6, 6]
    assert '"completion_tokens":0,"completion_tokens_details":null}' in chat[0]
    text = _chunks(_completion(TextCompletion, usage=True, continuous=True))
    assert '"usage":{"prompt_tokens":4,"total_tokens":5,"completion_tokens":1}}' in text[0]


def test_a_response_without_a_stream_has_the_text_of_all_tokens_and_the_usage() -> None:
    last = _tokens(engine_request(output_tokens=11))[-1]
    text = "This answer is simulated; no model wrote it. This"
    chat = _completion(ChatCompletion).whole(last)
    assert chat["object"] == "chat.completion"
    assert chat["choices"][0]["message"]["content"] == text
    assert chat["choices"][0]["finish_reason"] == "stop"
    completion = _completion(TextCompletion).whole(last)
    assert completion["object"] == "text_completion"
    assert completion["choices"][0]["text"] == text
    for body in (chat, completion):
        counts = ("prompt_tokens", "completion_tokens", "total_tokens")
        assert [body["usage"][name] for name in counts] == [4, 11, 15]


def test_the_engine_s_id_of_a_completion_has_the_number_of_its_prompt() -> None:
    assert _completion(TextCompletion).engine_id == "i-0"
    assert _completion(ChatCompletion).engine_id == "i"
