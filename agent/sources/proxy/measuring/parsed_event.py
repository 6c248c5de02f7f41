"""What one event or one whole response says, in the same words for all protocols."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard

import msgspec

from agent.analysis.latency import MAX_TOKENS, ReportedPhases, screen, tpot_s
from agent.records.request import EngineView, RequestRecord, Status
from agent.sources.proxy.measuring.json_values import Json, JsonReader, as_object, short_text


class TokenUsage(NamedTuple):
    """An engine's token counts of a request; `input_tokens` includes the cached ones."""

    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    reasoning_tokens: int | None = None

    def updated(self, newer: "TokenUsage") -> "TokenUsage":
        """Return these counts, replaced by the newer ones that are known."""
        return TokenUsage(
            *[old if new is None else new for old, new in zip(self, newer, strict=True)]
        )

    def possible(self) -> "TokenUsage":
        """Return these counts without parts that are larger than their whole."""
        cached = _part(self.cached_tokens, self.input_tokens)
        reasoning = _part(self.reasoning_tokens, self.output_tokens)
        if cached is self.cached_tokens and reasoning is self.reasoning_tokens:
            return self
        return self._replace(cached_tokens=cached, reasoning_tokens=reasoning)


def completions_usage(usage: Json) -> TokenUsage:
    """Return the counts of `/v1/chat/completions` and `/v1/completions`."""
    reasoning = _count(as_object(usage.get("completion_tokens_details")).get("reasoning_tokens"))
    return TokenUsage(
        _count(usage.get("prompt_tokens")),
        _count(as_object(usage.get("prompt_tokens_details")).get("cached_tokens")),
        _count(usage.get("completion_tokens")),
        # SGLang puts it beside the other counts.
        _count(usage.get("reasoning_tokens")) if reasoning is None else reasoning,
    )


def responses_usage(usage: Json) -> TokenUsage:
    """Return the counts of `/v1/responses`."""
    return TokenUsage(
        _count(usage.get("input_tokens")),
        _count(as_object(usage.get("input_tokens_details")).get("cached_tokens")),
        _count(usage.get("output_tokens")),
        _count(as_object(usage.get("output_tokens_details")).get("reasoning_tokens")),
    )


def messages_usage(usage: Json) -> TokenUsage:
    """Return the counts of `/v1/messages`, where `input_tokens` excludes cache reads and writes."""
    uncached = _count(usage.get("input_tokens"))
    cached = _count(usage.get("cache_read_input_tokens"))
    created = _count(usage.get("cache_creation_input_tokens"))
    total = None if uncached is None else uncached + (cached or 0) + (created or 0)
    details = as_object(usage.get("output_tokens_details"))
    thinking = _count(details.get("thinking_tokens", usage.get("thinking_tokens")))
    return TokenUsage(_count(total), cached, _count(usage.get("output_tokens")), thinking)


def _part(part: int | None, whole: int | None) -> int | None:
    # Spans are screened alike.
    return None if part is not None and whole is not None and part > whole else part


def _count(value: object) -> int | None:
    # A bool is an int, too.
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKENS:
        return value
    return None


_MS = 1e-3


class EngineTimes(NamedTuple):
    """The phases of a request as its engine measured them, in seconds, unknown None.

    They are those of vLLM's span. A request is in the queue until the scheduler takes it, in
    prefill until its first token and in decode until its last one.
    """

    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None


class _Metrics(msgspec.Struct, gc=False):
    queue_time_ms: Any = None
    # vLLM counts it from scheduling, without the queue: this is prefill, and no TTFT.
    time_to_first_token_ms: Any = None
    # From the first token to the last one.
    generation_time_ms: Any = None


def engine_times(metrics: object) -> EngineTimes | None:
    """Return the phases in a `metrics` object, None if it has none of them."""
    if not isinstance(metrics, dict):
        return None
    found = msgspec.convert(metrics, _Metrics)
    times = EngineTimes(
        _seconds(found.queue_time_ms),
        _seconds(found.time_to_first_token_ms),
        _seconds(found.generation_time_ms),
    )
    return None if times == (None, None, None) else times


def _seconds(value_ms: object) -> float | None:
    # A bool is an int, and an int may be too large for a float.
    if isinstance(value_ms, int | float) and not isinstance(value_ms, bool):
        return value_ms * _MS if -1e12 < value_ms < 1e12 else float("nan")
    return None


class WithEngineTimes(NamedTuple):
    """A record with its engine's times, and whether all of them were possible."""

    record: RequestRecord
    all_possible: bool


def with_engine_times(record: RequestRecord, times: EngineTimes, status: Status) -> WithEngineTimes:
    """Add the engine's times of a request of one choice, as its span would have them.

    The engine's TTFT begins when the request was queued, so it lacks the time of tokenizing, which
    is in a span's TTFT. No phase may be longer than the request was for its user.
    """
    phases, findings, _ = screen(
        ReportedPhases(record.e2e_s, None, *times, record.input_tokens, record.output_tokens)
    )
    ttft_s = _sum(phases.queue_s, phases.prefill_s) or None
    view = EngineView(
        status=status,
        ttft_s=ttft_s,
        tpot_s=tpot_s(phases.decode_s, record.output_tokens),
        e2e_s=_sum(ttft_s, phases.decode_s),
        holdback_s=None if record.ttft_s is None or ttft_s is None else record.ttft_s - ttft_s,
    )
    added = record._replace(
        queue_s=phases.queue_s,
        prefill_s=phases.prefill_s,
        decode_s=phases.decode_s,
        engine_view=view,
    )
    return WithEngineTimes(added, not findings)


def _sum(one_s: float | None, other_s: float | None) -> float | None:
    return None if one_s is None or other_s is None else one_s + other_s


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


class ResponseError(NamedTuple):
    """An error in a response: a short code, and the HTTP status that it stands for."""

    code: str
    http_status: int


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
    error: ResponseError | None = None
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


# Of errors without a number: parts of their short codes, without separators.
_STATUS_OF_NAMES = {
    "badrequest": 400,
    "invalid": 400,
    "validation": 400,
    "authentication": 401,
    "permission": 403,
    "notfound": 404,
    "toolarge": 413,
    "unprocessable": 422,
    "ratelimit": 429,
    "toomanyrequests": 429,
    "overloaded": 503,
    "unavailable": 503,
}
_SERVER_ERROR = 500


def response_error(error: object) -> ResponseError | None:
    """Return an engine's error without its message, which may quote a prompt."""
    if not error:
        return None
    content = as_object(error)
    codes = (content.get(name) for name in ("type", "code"))
    code = next((code for code in codes if _is_short_code(code)), "stream_error")
    return ResponseError(code, _http_status(content.get("code"), code))


def _is_short_code(code: object) -> TypeGuard[str]:
    return isinstance(code, str) and len(code) <= _MAX_ERROR_LENGTH and _is_identifier(code)


def _http_status(number: object, code: str) -> int:
    """Return the number of an error, or the status that its code means; 500 if neither is known."""
    if isinstance(number, str) and len(number) == 3 and number.isdecimal():
        number = int(number)
    if isinstance(number, int) and 400 <= number < 600:
        return number
    name = code.lower().replace("_", "").replace("-", "")
    means = (status for part, status in _STATUS_OF_NAMES.items() if part in name)
    return next(means, _SERVER_ERROR)


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
