"""Ratios of an engine's own counts over booked minutes: prefix cache, drafts and batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

from agent.records.minute import MinuteRow


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCache:
    """Tokens looked up in the prefix cache and found there, by the engines' own counters."""

    query_tokens: float
    hit_tokens: float
    hit_ratio: float | None
    """null where nothing was looked up"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Speculative decoding, by the engines' own counters. Ratios are null without drafts."""

    drafts: float
    draft_tokens: float
    accepted_tokens: float
    acceptance_rate: float | None
    """accepted over drafted tokens"""
    # As vLLM's own log counts it.
    mean_accepted_length: float | None
    """accepted tokens of a draft, and the one that the model adds itself"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFill:
    """How full the batches of engines were. Shares are null where a limit or a count is unknown."""

    requests: float | None
    """running requests over the most that may run, a mean over time, idle included"""
    # vLLM counts only steps that gave output, with all tokens of a prompt in its last step.
    tokens: float | None
    """estimated share of a step's token limit; too high or null if prompts take several steps"""


def batch_fill(minutes: Sequence[MinuteRow]) -> BatchFill | None:
    """The batches of these minutes together; None where neither share is known."""
    requests = _sums(minutes, "running_request_s", "place_s")
    tokens = _sums(minutes, "limited_step_tokens", "step_room_tokens")
    if requests is None and tokens is None:
        return None
    of_steps = None if tokens is None else _ratio(*tokens)
    return BatchFill(
        requests=None if requests is None else _ratio(*requests),
        tokens=None if of_steps is None or of_steps > 1 else of_steps,
    )


def prefix_cache(minutes: Sequence[MinuteRow]) -> PrefixCache | None:
    """The prefix caches of these minutes together; None where no engine counts both."""
    found = _sums(minutes, "prefix_query_tokens", "prefix_hit_tokens")
    if found is None:
        return None
    queried, hit = found
    return PrefixCache(query_tokens=queried, hit_tokens=hit, hit_ratio=_ratio(hit, queried))


def speculation(minutes: Sequence[MinuteRow]) -> Speculation | None:
    """The drafts of these minutes together; None where no engine counts all three."""
    found = _sums(minutes, "drafts", "draft_tokens", "accepted_draft_tokens")
    if found is None:
        return None
    drafts, tokens, accepted = found
    per_draft = _ratio(accepted, drafts)
    return Speculation(
        drafts=drafts,
        draft_tokens=tokens,
        accepted_tokens=accepted,
        acceptance_rate=_ratio(accepted, tokens),
        mean_accepted_length=None if per_draft is None else 1 + per_draft,
    )


def _sums(minutes: Sequence[MinuteRow], *names: str) -> list[float] | None:
    """The sums over the minutes that know all of these figures; None without any."""
    known = [
        values
        for minute in minutes
        if None not in (values := [getattr(minute.work, name) for name in names])
    ]
    return [fsum(column) for column in zip(*known, strict=True)] if known else None


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
