"""Reads the token counts in the `usage` objects of each protocol."""

from typing import NamedTuple

from agent.analysis.latency import MAX_TOKENS
from agent.sources.proxy.measuring.json_values import Json, as_object


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
        return self._replace(
            cached_tokens=_part(self.cached_tokens, self.input_tokens),
            reasoning_tokens=_part(self.reasoning_tokens, self.output_tokens),
        )


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
    return TokenUsage(_count(total), cached, _count(usage.get("output_tokens")))


def _part(part: int | None, whole: int | None) -> int | None:
    # Spans are screened alike.
    return None if part is not None and whole is not None and part > whole else part


def _count(value: object) -> int | None:
    # A bool is an int, too.
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKENS:
        return value
    return None
