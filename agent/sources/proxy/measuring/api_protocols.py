"""The protocols of the measured routes: how to read their events and response bodies.

As vLLM 0.32 implements them (`vllm/entrypoints/{openai,anthropic}`), and as OpenAI and Anthropic
document them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from agent.sources.proxy.measuring.json_values import JsonCounter, JsonReader, as_object
from agent.sources.proxy.measuring.parsed_event import (
    NOTHING,
    VISIBLE_TOKEN,
    ParsedEvent,
    completions_usage,
    engine_times,
    finish_reason,
    messages_usage,
    response_error,
    responses_usage,
    text_only,
    usage_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiProtocol:
    """How to read one route.

    `usage_on_request`: a stream counts tokens only if the request asks for it. `finish_is_token`:
    the finish reason comes with the last token; elsewhere it comes later. Both readers return None
    for a text that they cannot read.
    `read_events` reads lines of data, each of one event; it returns None if it cannot read one.
    `count_tokens` returns how many events are in such lines, if each is a `VISIBLE_TOKEN`; else 0.
    Without both, events are read one by one.
    """

    usage_on_request: bool
    read_event: Callable[[bytes], ParsedEvent | None]
    read_body: Callable[[bytes], ParsedEvent | None]
    finish_is_token: bool = False
    read_events: Callable[[bytes], Sequence[ParsedEvent] | None] | None = None
    count_tokens: Callable[[bytes], int] | None = None


# Chat completions and completions. Bodies have no `delta`, and events no `message`.


class _Delta(msgspec.Struct, gc=False):
    content: Any = None
    tool_calls: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    # OpenRouter's, beside or in place of the text.
    reasoning_details: Any = None


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
    metrics: Any = None


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
        elif delta.reasoning or delta.reasoning_content or delta.reasoning_details:
            hidden = True
    return _choices_event(payload, token=visible or hidden, visible=visible)


def _completions_event(payload: _Choices) -> ParsedEvent:
    # One event per token; its text is empty while the bytes of a character are incomplete.
    token = bool(payload.choices)
    return _choices_event(payload, token=token, visible=token)


class _TextDelta(msgspec.Struct, gc=False):
    content: Annotated[str, msgspec.Meta(min_length=1)]


class _UnfinishedChoice(msgspec.Struct, gc=False):
    finish_reason: None = None


class _TextChoice(_UnfinishedChoice, gc=False, kw_only=True):
    delta: _TextDelta


class _OnlyTokens(msgspec.Struct, gc=False):
    usage: None = None
    error: None = None


class _ChatToken(_OnlyTokens, gc=False, kw_only=True):
    """A chat event that `_chat_event` makes a `VISIBLE_TOKEN`, as nearly all are."""

    choices: Annotated[list[_TextChoice], msgspec.Meta(min_length=1, max_length=1)]


class _CompletionsToken(_OnlyTokens, gc=False, kw_only=True):
    choices: Annotated[list[_UnfinishedChoice], msgspec.Meta(min_length=1)]


def _choices_body(payload: _Choices) -> ParsedEvent:
    return _choices_event(payload, token=False, visible=False)


def _choices_event(payload: _Choices, *, token: bool, visible: bool) -> ParsedEvent:
    reasons = [finish_reason(choice.finish_reason) for choice in payload.choices or ()]
    finish_reasons = tuple([reason for reason in reasons if reason])
    if payload.usage is None and payload.error is None and not finish_reasons:
        return text_only(token=token, visible=visible)
    usage = usage_of(payload.usage, completions_usage)
    usage_only = usage is not None and payload.choices == []
    error = response_error(payload.error)
    # vLLM sends its metrics with the last usage alone.
    times = None if usage is None else engine_times(payload.metrics)
    return ParsedEvent(token, visible, usage, finish_reasons, error, usage_only, engine_times=times)


# Responses


class _Response(msgspec.Struct, gc=False):
    status: Any = None
    usage: Any = None
    error: Any = None
    output: Any = None
    incomplete_details: Any = None
    metrics: Any = None


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
        return text_only(token=token, visible=token and "reasoning" not in kind)
    if kind == "error":
        return ParsedEvent(error=response_error(payload.error or {"code": payload.code}), done=True)
    if kind in ("response.completed", "response.incomplete", "response.failed"):
        return _responses_body(payload.response or _Response())._replace(done=True)
    return NOTHING


def _responses_body(payload: _Response) -> ParsedEvent:
    failed = payload.status == "failed"
    return ParsedEvent(
        usage=usage_of(payload.usage, responses_usage),
        finish_reasons=() if failed else _responses_reasons(payload),
        error=response_error(payload.error or failed),
        engine_times=engine_times(payload.metrics),
    )


def _responses_reasons(payload: _Response) -> tuple[str, ...]:
    output = payload.output if isinstance(payload.output, list) else []
    called = any(as_object(item).get("type") == "function_call" for item in output)
    reason = (
        finish_reason(as_object(payload.incomplete_details).get("reason"))
        or ("tool_calls" if called else None)
        or finish_reason(payload.status)
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


class _Block(msgspec.Struct, gc=False):
    name: Any = None


class _MessagesEvent(msgspec.Struct, gc=False):
    type: Any = None
    content_block: _Block | None = None
    delta: _BlockDelta | None = None
    message: _Message | None = None
    usage: Any = None
    error: Any = None


def _messages_event(payload: _MessagesEvent) -> ParsedEvent:
    read = _MESSAGES_EVENTS.get(payload.type) if isinstance(payload.type, str) else None
    return read(payload) if read else NOTHING


def _message_start(payload: _MessagesEvent) -> ParsedEvent:
    usage = None if payload.message is None else usage_of(payload.message.usage, messages_usage)
    # Its output count is not the final one.
    return ParsedEvent(usage=usage and usage._replace(output_tokens=None))


def _content_block_start(payload: _MessagesEvent) -> ParsedEvent:
    # The name of a tool is generated, too, and comes before the JSON of its input.
    named = payload.content_block is not None and bool(payload.content_block.name)
    return text_only(token=named, visible=named)


def _content_block_delta(payload: _MessagesEvent) -> ParsedEvent:
    delta = payload.delta or _BlockDelta()
    visible = bool(delta.text or delta.partial_json)
    return text_only(token=visible or bool(delta.thinking), visible=visible)


def _message_delta(payload: _MessagesEvent) -> ParsedEvent:
    reason = None if payload.delta is None else finish_reason(payload.delta.stop_reason)
    return ParsedEvent(
        usage=usage_of(payload.usage, messages_usage), finish_reasons=(reason,) if reason else ()
    )


_MESSAGES_EVENTS: Mapping[str, Callable[[_MessagesEvent], ParsedEvent]] = {
    "message_start": _message_start,
    "content_block_start": _content_block_start,
    "content_block_delta": _content_block_delta,
    "message_delta": _message_delta,
    "message_stop": lambda _: ParsedEvent(done=True),
    "error": lambda payload: ParsedEvent(error=response_error(payload.error or True), done=True),
}


def _messages_body(payload: _Message) -> ParsedEvent:
    reason = finish_reason(payload.stop_reason)
    return ParsedEvent(
        usage=usage_of(payload.usage, messages_usage),
        finish_reasons=(reason,) if reason else (),
        error=response_error(payload.error),
    )


_CHAT_EVENTS = JsonReader(_Choices, _chat_event)
_COMPLETIONS_EVENTS = JsonReader(_Choices, _completions_event)

PROTOCOLS: Mapping[str, ApiProtocol] = {
    "/v1/chat/completions": ApiProtocol(
        usage_on_request=True,
        read_event=_CHAT_EVENTS,
        read_body=JsonReader(_Choices, _choices_body),
        finish_is_token=True,
        read_events=_CHAT_EVENTS.all_in,
        count_tokens=JsonCounter(_ChatToken),
    ),
    "/v1/completions": ApiProtocol(
        usage_on_request=True,
        read_event=_COMPLETIONS_EVENTS,
        read_body=JsonReader(_Choices, _choices_body),
        finish_is_token=True,
        read_events=_COMPLETIONS_EVENTS.all_in,
        count_tokens=JsonCounter(_CompletionsToken),
    ),
    "/v1/responses": ApiProtocol(
        usage_on_request=False,
        read_event=JsonReader(_ResponsesEvent, _responses_event),
        read_body=JsonReader(_Response, _responses_body),
    ),
    "/v1/messages": ApiProtocol(
        usage_on_request=False,
        read_event=JsonReader(_MessagesEvent, _messages_event),
        read_body=JsonReader(_Message, _messages_body),
    ),
}
