"""The protocols of the measured routes: how to read their events and response bodies.

As vLLM 0.32 implements them (`vllm/entrypoints/{openai,anthropic}`), and as OpenAI and Anthropic
document them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from agent.sources.proxy.measuring.json_values import Json, JsonReader, as_object, short_text
from agent.sources.proxy.measuring.token_usage import (
    TokenUsage,
    completions_usage,
    messages_usage,
    responses_usage,
)

# Finish reasons of other protocols, in the words of chat completions.
_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "completed": "stop",
    "max_tokens": "length",
    "max_output_tokens": "length",
    "tool_use": "tool_calls",
}
# Of a finish reason that is no short word.
OTHER_REASON = "other"
MAX_REASON_LENGTH = 64
_MAX_ERROR_LENGTH = 64
_MAX_ID_LENGTH = 320


class ParsedEvent(NamedTuple):
    """The content of one stream event, or of one whole response body.

    `token`: it has generated text of any channel. `visible`: some of the text is not reasoning.
    `finish_reasons`: why choices ended. `usage_only`: it is there for the token counts alone.
    `done`: nothing follows.
    """

    token: bool = False
    visible: bool = False
    usage: TokenUsage | None = None
    finish_reasons: tuple[str, ...] = ()
    error: str | None = None
    usage_only: bool = False
    done: bool = False


NOTHING = ParsedEvent()
# Most events are one of these; whoever reads them may compare by identity.
VISIBLE_TOKEN = ParsedEvent(token=True, visible=True)
HIDDEN_TOKEN = ParsedEvent(token=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiProtocol:
    """How to read one route.

    `operation` is its name in the GenAI conventions. `usage_on_request`: a stream counts tokens
    only if the request asks for it. `finish_is_token`: the finish reason comes with the last token;
    elsewhere it comes later. Both readers return None for a text that they cannot read.
    """

    operation: str
    usage_on_request: bool
    read_event: Callable[[bytes], ParsedEvent | None]
    read_body: Callable[[bytes], ParsedEvent | None]
    finish_is_token: bool = False


class _Named(msgspec.Struct, gc=False):
    id: Any = None
    model: Any = None


class _First(_Named, gc=False):
    """A body or a first event; `/v1/responses` and `/v1/messages` put names one level deeper."""

    response: _Named | None = None
    message: _Named | None = None


def _identity(payload: _First) -> tuple[str | None, str | None]:
    found = payload.response or payload.message or payload
    return short_text(found.id, _MAX_ID_LENGTH), short_text(found.model)


# The id and the model of a response, from its body or from an event that has them.
read_identity = JsonReader(_First, _identity)


def _reason(value: object) -> str | None:
    """Return why a choice ended; it ended also where the word is none."""
    if not isinstance(value, str) or not value:
        return None
    reason = short_text(value, MAX_REASON_LENGTH) or OTHER_REASON
    return _REASONS.get(reason, reason)


def _error(error: object) -> str | None:
    """Return a short code for an engine's error; never its message, which may quote a prompt."""
    if not error:
        return None
    for name in ("type", "code"):
        code = as_object(error).get(name)
        if isinstance(code, str) and len(code) <= _MAX_ERROR_LENGTH and _is_identifier(code):
            return code
    return "stream_error"


def _is_identifier(text: str) -> bool:
    return text.isascii() and text.replace(".", "_").replace("-", "_").isidentifier()


def _usage(usage: object, read: Callable[[Json], TokenUsage]) -> TokenUsage | None:
    return read(usage) if isinstance(usage, dict) else None


# Chat completions and completions. Bodies have no `delta`, and events no `message`.


class _Delta(msgspec.Struct, gc=False):
    content: Any = None
    tool_calls: Any = None
    reasoning: Any = None
    reasoning_content: Any = None


class _Choice(msgspec.Struct, gc=False):
    delta: _Delta | None = None
    finish_reason: Any = None

    def only_text(self) -> bool:
        """Whether it has text that is not reasoning, and goes on: nearly every event."""
        return self.finish_reason is None and self.delta is not None and bool(self.delta.content)


class _Choices(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: Any = None
    error: Any = None


def _chat_event(payload: _Choices) -> ParsedEvent:
    choices = payload.choices or ()
    if len(choices) == 1 and choices[0].only_text() and payload.usage is payload.error is None:
        return VISIBLE_TOKEN
    visible = hidden = False
    for choice in choices:
        if (delta := choice.delta) is None:
            continue
        if delta.content or delta.tool_calls:
            visible = True
        elif delta.reasoning or delta.reasoning_content:
            hidden = True
    return _choices_event(payload, token=visible or hidden, visible=visible)


def _completions_event(payload: _Choices) -> ParsedEvent:
    # One event per token; its text is empty while the bytes of a character are incomplete.
    token = bool(payload.choices)
    return _choices_event(payload, token=token, visible=token)


def _choices_body(payload: _Choices) -> ParsedEvent:
    return _choices_event(payload, token=False, visible=False)


def _choices_event(payload: _Choices, *, token: bool, visible: bool) -> ParsedEvent:
    reasons = [_reason(choice.finish_reason) for choice in payload.choices or ()]
    finish_reasons = tuple([reason for reason in reasons if reason])
    if payload.usage is None and payload.error is None and not finish_reasons:
        return _text_only(token=token, visible=visible)
    usage = _usage(payload.usage, completions_usage)
    usage_only = usage is not None and payload.choices == []
    error = _error(payload.error)
    return ParsedEvent(token, visible, usage, finish_reasons, error, usage_only)


def _text_only(*, token: bool, visible: bool) -> ParsedEvent:
    if visible:
        return VISIBLE_TOKEN
    return HIDDEN_TOKEN if token else NOTHING


# Responses


class _Response(msgspec.Struct, gc=False):
    status: Any = None
    usage: Any = None
    error: Any = None
    output: Any = None
    incomplete_details: Any = None


class _ResponsesEvent(msgspec.Struct, gc=False):
    type: Any = None
    delta: Any = None
    response: _Response | None = None
    error: Any = None
    code: Any = None


def _responses_event(payload: _ResponsesEvent) -> ParsedEvent:
    kind = payload.type
    if not isinstance(kind, str):
        return NOTHING
    if kind.endswith(".delta"):
        token = bool(payload.delta)
        return _text_only(token=token, visible=token and "reasoning" not in kind)
    if kind == "error":
        return ParsedEvent(error=_error(payload.error or {"code": payload.code}), done=True)
    if kind in ("response.completed", "response.incomplete", "response.failed"):
        return _responses_body(payload.response or _Response())._replace(done=True)
    return NOTHING


def _responses_body(payload: _Response) -> ParsedEvent:
    failed = payload.status == "failed"
    return ParsedEvent(
        usage=_usage(payload.usage, responses_usage),
        finish_reasons=() if failed else _responses_reasons(payload),
        error=_error(payload.error or failed),
    )


def _responses_reasons(payload: _Response) -> tuple[str, ...]:
    output = payload.output if isinstance(payload.output, list) else []
    called = any(as_object(item).get("type") == "function_call" for item in output)
    reason = (
        _reason(as_object(payload.incomplete_details).get("reason"))
        or ("tool_calls" if called else None)
        or _reason(payload.status)
    )
    return (reason,) if reason else ()


# Messages


class _BlockDelta(msgspec.Struct, gc=False):
    text: Any = None
    partial_json: Any = None
    thinking: Any = None
    stop_reason: Any = None


class _Message(msgspec.Struct, gc=False):
    usage: Any = None
    stop_reason: Any = None
    error: Any = None


class _MessagesEvent(msgspec.Struct, gc=False):
    type: Any = None
    delta: _BlockDelta | None = None
    message: _Message | None = None
    usage: Any = None
    error: Any = None


def _messages_event(payload: _MessagesEvent) -> ParsedEvent:
    read = _MESSAGES_EVENTS.get(payload.type) if isinstance(payload.type, str) else None
    return read(payload) if read else NOTHING


def _message_start(payload: _MessagesEvent) -> ParsedEvent:
    usage = None if payload.message is None else _usage(payload.message.usage, messages_usage)
    # Its output count is not the final one.
    return ParsedEvent(usage=usage and usage._replace(output_tokens=None))


def _content_block_delta(payload: _MessagesEvent) -> ParsedEvent:
    delta = payload.delta or _BlockDelta()
    visible = bool(delta.text or delta.partial_json)
    return _text_only(token=visible or bool(delta.thinking), visible=visible)


def _message_delta(payload: _MessagesEvent) -> ParsedEvent:
    reason = None if payload.delta is None else _reason(payload.delta.stop_reason)
    return ParsedEvent(
        usage=_usage(payload.usage, messages_usage), finish_reasons=(reason,) if reason else ()
    )


_MESSAGES_EVENTS: Mapping[str, Callable[[_MessagesEvent], ParsedEvent]] = {
    "message_start": _message_start,
    "content_block_delta": _content_block_delta,
    "message_delta": _message_delta,
    "message_stop": lambda _: ParsedEvent(done=True),
    "error": lambda payload: ParsedEvent(error=_error(payload.error or True), done=True),
}


def _messages_body(payload: _Message) -> ParsedEvent:
    reason = _reason(payload.stop_reason)
    return ParsedEvent(
        usage=_usage(payload.usage, messages_usage),
        finish_reasons=(reason,) if reason else (),
        error=_error(payload.error),
    )


PROTOCOLS: Mapping[str, ApiProtocol] = {
    "/v1/chat/completions": ApiProtocol(
        operation="chat",
        usage_on_request=True,
        read_event=JsonReader(_Choices, _chat_event),
        read_body=JsonReader(_Choices, _choices_body),
        finish_is_token=True,
    ),
    "/v1/completions": ApiProtocol(
        operation="text_completion",
        usage_on_request=True,
        read_event=JsonReader(_Choices, _completions_event),
        read_body=JsonReader(_Choices, _choices_body),
        finish_is_token=True,
    ),
    "/v1/responses": ApiProtocol(
        operation="chat",
        usage_on_request=False,
        read_event=JsonReader(_ResponsesEvent, _responses_event),
        read_body=JsonReader(_Response, _responses_body),
    ),
    "/v1/messages": ApiProtocol(
        operation="chat",
        usage_on_request=False,
        read_event=JsonReader(_MessagesEvent, _messages_event),
        read_body=JsonReader(_Message, _messages_body),
    ),
}
