"""The protocols of the measured routes: how to read their events and response bodies.

As vLLM 0.32 implements them (`vllm/entrypoints/{openai,anthropic}`), and as OpenAI and Anthropic
document them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from agent.sources.proxy.measuring.json_values import Json, as_object, short_text
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiProtocol:
    """How to read one route.

    `operation` is its name in the GenAI conventions. `usage_on_request`: a stream counts tokens
    only if the request asks for it. `text_openings` end right before generated text in an event.
    `markers` are in every event that has more than text, `visible_markers` in every event with text
    that is not reasoning. `empty_text_is_token`: an event with empty text is a token, too.
    `finish_is_token`: the finish reason comes with the last token; elsewhere it comes later.
    """

    operation: str
    usage_on_request: bool
    read_event: Callable[[Json], ParsedEvent]
    read_body: Callable[[Json], ParsedEvent]
    text_openings: tuple[bytes, ...]
    markers: tuple[bytes, ...] = ()
    visible_markers: tuple[bytes, ...] = ()
    empty_text_is_token: bool = False
    finish_is_token: bool = False


def identity_of(payload: Json) -> tuple[str | None, str | None]:
    """Return the id and the model of a response, from its body or from an event that has them.

    `/v1/responses` and `/v1/messages` put them one level deeper in their first event.
    """
    inner = payload.get("response") or payload.get("message")
    found = inner if isinstance(inner, dict) else payload
    return short_text(found.get("id"), _MAX_ID_LENGTH), short_text(found.get("model"))


def _choices(payload: Json) -> list[Json]:
    choices = payload.get("choices")
    return [as_object(choice) for choice in choices] if isinstance(choices, list) else []


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


def _chat_event(payload: Json) -> ParsedEvent:
    choices = _choices(payload)
    visible = reasoning = False
    for choice in choices:
        delta = as_object(choice.get("delta"))
        if delta.get("content") or delta.get("tool_calls"):
            visible = True
        elif delta.get("reasoning") or delta.get("reasoning_content"):
            reasoning = True
    return _choices_event(payload, choices, token=visible or reasoning, visible=visible)


def _completions_event(payload: Json) -> ParsedEvent:
    # One event per token; its text is empty while the bytes of a character are incomplete.
    choices = _choices(payload)
    token = bool(choices)
    return _choices_event(payload, choices, token=token, visible=token)


def _choices_body(payload: Json) -> ParsedEvent:
    return _choices_event(payload, _choices(payload))


def _choices_event(
    payload: Json, choices: list[Json], *, token: bool = False, visible: bool = False
) -> ParsedEvent:
    usage = _usage(payload, completions_usage)
    reasons = [_reason(choice.get("finish_reason")) for choice in choices]
    return ParsedEvent(
        token,
        visible,
        usage,
        tuple([reason for reason in reasons if reason]),
        _error(payload.get("error")),
        usage is not None and payload.get("choices") == [],
    )


def _usage(payload: Json, read: Callable[[Json], TokenUsage]) -> TokenUsage | None:
    usage = payload.get("usage")
    return read(usage) if isinstance(usage, dict) else None


def _responses_event(payload: Json) -> ParsedEvent:
    kind = payload.get("type")
    if not isinstance(kind, str):
        return NOTHING
    if kind.endswith(".delta"):
        token = bool(payload.get("delta"))
        return ParsedEvent(token, token and "reasoning" not in kind)
    if kind == "error":
        error = _error(payload.get("error") or {"code": payload.get("code")})
        return ParsedEvent(error=error, done=True)
    if kind in ("response.completed", "response.incomplete", "response.failed"):
        return _responses_body(as_object(payload.get("response")))._replace(done=True)
    return NOTHING


def _responses_body(payload: Json) -> ParsedEvent:
    failed = payload.get("status") == "failed"
    return ParsedEvent(
        usage=_usage(payload, responses_usage),
        finish_reasons=() if failed else _responses_reasons(payload),
        error=_error(payload.get("error") or failed),
    )


def _responses_reasons(payload: Json) -> tuple[str, ...]:
    output = payload.get("output")
    items = [as_object(item).get("type") for item in output] if isinstance(output, list) else []
    incomplete = as_object(payload.get("incomplete_details")).get("reason")
    called = "tool_calls" if "function_call" in items else None
    reason = _reason(incomplete) or called or _reason(payload.get("status"))
    return (reason,) if reason else ()


def _messages_event(payload: Json) -> ParsedEvent:
    kind = payload.get("type")
    read = _MESSAGES_EVENTS.get(kind) if isinstance(kind, str) else None
    return read(payload) if read else NOTHING


def _message_start(payload: Json) -> ParsedEvent:
    usage = _usage(as_object(payload.get("message")), messages_usage)
    # Its output count is not the final one.
    return ParsedEvent(usage=usage and usage._replace(output_tokens=None))


def _content_block_delta(payload: Json) -> ParsedEvent:
    delta = as_object(payload.get("delta"))
    visible = bool(delta.get("text") or delta.get("partial_json"))
    return ParsedEvent(visible or bool(delta.get("thinking")), visible)


def _message_delta(payload: Json) -> ParsedEvent:
    reason = _reason(as_object(payload.get("delta")).get("stop_reason"))
    return ParsedEvent(
        usage=_usage(payload, messages_usage), finish_reasons=(reason,) if reason else ()
    )


_MESSAGES_EVENTS: Mapping[str, Callable[[Json], ParsedEvent]] = {
    "message_start": _message_start,
    "content_block_delta": _content_block_delta,
    "message_delta": _message_delta,
    "message_stop": lambda _: ParsedEvent(done=True),
    "error": lambda payload: ParsedEvent(error=_error(payload.get("error") or True), done=True),
}


def _messages_body(payload: Json) -> ParsedEvent:
    reason = _reason(payload.get("stop_reason"))
    return ParsedEvent(
        usage=_usage(payload, messages_usage),
        finish_reasons=(reason,) if reason else (),
        error=_error(payload.get("error")),
    )


# JSON text contains these bytes only as keys: inside a string each quote is escaped. They include
# the begin of the value, because the tokens in `top_logprobs` are keys, too, with numbers.
USAGE_MARKER = b'"usage":{'
_CHOICES_MARKERS = (b'"finish_reason":"', b'"error":{', USAGE_MARKER)

PROTOCOLS: Mapping[str, ApiProtocol] = {
    "/v1/chat/completions": ApiProtocol(
        operation="chat",
        usage_on_request=True,
        read_event=_chat_event,
        read_body=_choices_body,
        text_openings=(
            b'"content":"',
            b'"reasoning":"',
            b'"reasoning_content":"',
            b'"arguments":"',
        ),
        markers=_CHOICES_MARKERS,
        visible_markers=(b'"content":"', b'"tool_calls":['),
        finish_is_token=True,
    ),
    "/v1/completions": ApiProtocol(
        operation="text_completion",
        usage_on_request=True,
        read_event=_completions_event,
        read_body=_choices_body,
        text_openings=(b'"text":"',),
        markers=_CHOICES_MARKERS,
        empty_text_is_token=True,
        finish_is_token=True,
    ),
    "/v1/responses": ApiProtocol(
        operation="chat",
        usage_on_request=False,
        read_event=_responses_event,
        read_body=_responses_body,
        text_openings=(b'"delta":"',),
        visible_markers=(b"response.output_text.delta", b"response.function_call_arguments.delta"),
    ),
    "/v1/messages": ApiProtocol(
        operation="chat",
        usage_on_request=False,
        read_event=_messages_event,
        read_body=_messages_body,
        text_openings=(b'"text":"', b'"thinking":"', b'"partial_json":"'),
    ),
}
