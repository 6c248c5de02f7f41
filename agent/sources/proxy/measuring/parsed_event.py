"""What one event or one whole response says, in the same words for all protocols."""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from agent.sources.proxy.measuring.engine_times import EngineTimes
from agent.sources.proxy.measuring.json_values import Json, JsonReader, as_object, short_text
from agent.sources.proxy.measuring.token_usage import TokenUsage

# Finish reasons of other protocols, in the words of chat completions.
_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "completed": "stop",
    "max_tokens": "length",
    "max_output_tokens": "length",
    "cancelled": "abort",
    "tool_use": "tool_calls",
}
# Of a finish reason that is not a short word.
OTHER_REASON = "other"
MAX_REASON_LENGTH = 64
_MAX_ERROR_LENGTH = 64
_MAX_ID_LENGTH = 320


class ParsedEvent(NamedTuple):
    """The content of one stream event, or of one whole response body.

    `token`: it has generated text of any channel. `visible`: some of the text is not reasoning.
    `finish_reasons`: why choices ended. `usage_only`: it is there for the token counts alone.
    `done`: nothing follows. `engine_times` come with the last usage.
    """

    token: bool = False
    visible: bool = False
    usage: TokenUsage | None = None
    finish_reasons: tuple[str, ...] = ()
    error: str | None = None
    usage_only: bool = False
    done: bool = False
    engine_times: EngineTimes | None = None


NOTHING = ParsedEvent()
# Most events are one of these; readers may compare by identity.
VISIBLE_TOKEN = ParsedEvent(token=True, visible=True)
HIDDEN_TOKEN = ParsedEvent(token=True)


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


def finish_reason(value: object) -> str | None:
    """Return why a choice ended; OTHER_REASON for what is not a short word."""
    if not isinstance(value, str) or not value:
        return None
    reason = short_text(value, MAX_REASON_LENGTH) or OTHER_REASON
    return _REASONS.get(reason, reason)


def error_code(error: object) -> str | None:
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


def usage_of(usage: object, read: Callable[[Json], TokenUsage]) -> TokenUsage | None:
    """Return the token counts of a `usage` object, None without one."""
    return read(usage) if isinstance(usage, dict) else None


def text_only(*, token: bool, visible: bool) -> ParsedEvent:
    """Return the shared event that has text, or no text, and nothing else."""
    if visible:
        return VISIBLE_TOKEN
    return HIDDEN_TOKEN if token else NOTHING
