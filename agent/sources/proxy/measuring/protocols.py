"""The protocols of the requests that are measured: what each of their events tells.

As vLLM 0.32 speaks them (`vllm/entrypoints/{openai,anthropic}`), and as OpenAI and Anthropic
describe them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from agent.sources.proxy.measuring.payload import Json, mapping
from agent.sources.proxy.measuring.usage import (
    TokenUsage,
    completions_usage,
    messages_usage,
    responses_usage,
)
from agent.sources.proxy.measuring.words import word

# Other words for why an answer ended, in those of chat completions.
_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "completed": "stop",
    "max_tokens": "length",
    "max_output_tokens": "length",
    "tool_use": "tool_calls",
}
_MAX_ERROR_LENGTH = 64


class Told(NamedTuple):
    """What one event, or one whole answer, tells.

    `token` says that generated text of any channel is in it, `visible` that some of it is no
    reasoning, `finishes` why choices ended, `final` that it is there for the token counts alone,
    `done` that nothing follows.
    """

    token: bool = False
    visible: bool = False
    usage: TokenUsage | None = None
    finishes: tuple[str, ...] = ()
    error: str | None = None
    final: bool = False
    done: bool = False


NOTHING = Told()


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """How one route speaks.

    `usage_asked` says that a stream counts its tokens only when it is asked to. `openings` end
    right before generated text in an event. Of events with generated text, `tells` are in each
    that tells more than its text, and `shows` in each with text that is no reasoning.
    """

    usage_asked: bool
    event: Callable[[Json], Told]
    answer: Callable[[Json], Told]
    openings: tuple[bytes, ...]
    tells: tuple[bytes, ...] = ()
    shows: tuple[bytes, ...] = ()
    # Whether an event with empty text was a token all the same.
    silent_tokens: bool = False


def _choices(payload: Json) -> list[Json]:
    choices = payload.get("choices")
    return [mapping(choice) for choice in choices] if isinstance(choices, list) else []


def _reason(value: object) -> str | None:
    if value is None:
        return None
    told = word(value)
    return None if told is None else _REASONS.get(told, told)


def _error(error: object) -> str | None:
    """A short word for an error that an engine described; never its message, which may quote."""
    if not error:
        return None
    for name in ("type", "code"):
        told = mapping(error).get(name)
        if isinstance(told, str) and len(told) <= _MAX_ERROR_LENGTH and _is_identifier(told):
            return told
    return "stream_error"


def _is_identifier(text: str) -> bool:
    return text.isascii() and text.replace(".", "_").replace("-", "_").isidentifier()


def _chat_event(payload: Json) -> Told:
    choices = _choices(payload)
    visible = thought = False
    for choice in choices:
        delta = mapping(choice.get("delta"))
        if delta.get("content") or delta.get("tool_calls"):
            visible = True
        elif delta.get("reasoning") or delta.get("reasoning_content"):
            thought = True
    return _choices_told(payload, choices, token=visible or thought, visible=visible)


def _completions_event(payload: Json) -> Told:
    # An event per token, whose text is empty while the bytes of a character are incomplete.
    choices = _choices(payload)
    token = bool(choices)
    return _choices_told(payload, choices, token=token, visible=token)


def _choices_answer(payload: Json) -> Told:
    return _choices_told(payload, _choices(payload))


def _choices_told(
    payload: Json, choices: list[Json], *, token: bool = False, visible: bool = False
) -> Told:
    usage = payload.get("usage")
    counted = completions_usage(usage) if isinstance(usage, dict) else None
    reasons = [_reason(choice.get("finish_reason")) for choice in choices]
    return Told(
        token,
        visible,
        counted,
        tuple([reason for reason in reasons if reason]),
        _error(payload.get("error")),
        counted is not None and payload.get("choices") == [],
    )


def _responses_event(payload: Json) -> Told:
    kind = payload.get("type")
    if not isinstance(kind, str):
        return NOTHING
    if kind.endswith(".delta"):
        token = bool(payload.get("delta"))
        return Told(token, token and "reasoning" not in kind)
    if kind == "error":
        return Told(error=_error(payload.get("error") or {"code": payload.get("code")}), done=True)
    if kind in ("response.completed", "response.incomplete", "response.failed"):
        return _responses_answer(mapping(payload.get("response")))._replace(done=True)
    return NOTHING


def _responses_answer(payload: Json) -> Told:
    usage = payload.get("usage")
    failed = payload.get("status") == "failed"
    return Told(
        usage=responses_usage(usage) if isinstance(usage, dict) else None,
        finishes=() if failed else _responses_finish(payload),
        error=_error(payload.get("error") or failed),
    )


def _responses_finish(payload: Json) -> tuple[str, ...]:
    output = payload.get("output")
    items = [mapping(item).get("type") for item in output] if isinstance(output, list) else []
    incomplete = mapping(payload.get("incomplete_details")).get("reason")
    called = "tool_calls" if "function_call" in items else None
    reason = _reason(incomplete) or called or _reason(payload.get("status"))
    return (reason,) if reason else ()


def _messages_event(payload: Json) -> Told:
    kind = payload.get("type")
    read = _MESSAGES_EVENTS.get(kind) if isinstance(kind, str) else None
    return read(payload) if read else NOTHING


def _message_start(payload: Json) -> Told:
    usage = mapping(payload.get("message")).get("usage")
    # Its count of output is that of a beginning.
    told = messages_usage(usage)._replace(output_tokens=None) if isinstance(usage, dict) else None
    return Told(usage=told)


def _content_block_delta(payload: Json) -> Told:
    delta = mapping(payload.get("delta"))
    visible = bool(delta.get("text") or delta.get("partial_json"))
    return Told(visible or bool(delta.get("thinking")), visible)


def _message_delta(payload: Json) -> Told:
    reason = _reason(mapping(payload.get("delta")).get("stop_reason"))
    usage = payload.get("usage")
    told = messages_usage(usage) if isinstance(usage, dict) else None
    return Told(usage=told, finishes=(reason,) if reason else ())


_MESSAGES_EVENTS: Mapping[str, Callable[[Json], Told]] = {
    "message_start": _message_start,
    "content_block_delta": _content_block_delta,
    "message_delta": _message_delta,
    "message_stop": lambda _: Told(done=True),
    "error": lambda payload: Told(error=_error(payload.get("error") or True), done=True),
}


def _messages_answer(payload: Json) -> Told:
    reason = _reason(payload.get("stop_reason"))
    usage = payload.get("usage")
    return Told(
        usage=messages_usage(usage) if isinstance(usage, dict) else None,
        finishes=(reason,) if reason else (),
        error=_error(payload.get("error")),
    )


# A JSON text has these bytes only as names of members: inside a string each quote is escaped. They
# go on to the beginning of the value, because the tokens in `top_logprobs` are names of members
# too, and those have numbers.
COUNTS = b'"usage":{'
_CHOICES_TELL = (b'"finish_reason":"', b'"error":{', COUNTS)

PROTOCOLS: Mapping[str, Protocol] = {
    "/v1/chat/completions": Protocol(
        usage_asked=True,
        event=_chat_event,
        answer=_choices_answer,
        openings=(b'"content":"', b'"reasoning":"', b'"reasoning_content":"', b'"arguments":"'),
        tells=_CHOICES_TELL,
        shows=(b'"content":"', b'"tool_calls":['),
    ),
    "/v1/completions": Protocol(
        usage_asked=True,
        event=_completions_event,
        answer=_choices_answer,
        openings=(b'"text":"',),
        tells=_CHOICES_TELL,
        silent_tokens=True,
    ),
    "/v1/responses": Protocol(
        usage_asked=False,
        event=_responses_event,
        answer=_responses_answer,
        openings=(b'"delta":"',),
        shows=(b"response.output_text.delta", b"response.function_call_arguments.delta"),
    ),
    "/v1/messages": Protocol(
        usage_asked=False,
        event=_messages_event,
        answer=_messages_answer,
        openings=(b'"text":"', b'"thinking":"', b'"partial_json":"'),
    ),
}
