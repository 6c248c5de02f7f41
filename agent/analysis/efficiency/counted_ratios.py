"""Ratios of an engine's own counts over booked minutes: prefix cache, drafts and batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

from agent.records.minute import MinuteRow


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCache:
    """Tokens that engines looked up in their prefix cache and found there.

    `hit_ratio` is None where nothing was looked up.
    """

    query_tokens: float
    hit_tokens: float
    hit_ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """What verification accepted of the drafts. Ratios are None where nothing was drafted.

    `mean_accepted_length` counts the tokens of a draft that were accepted and the one that the
    model adds itself, as vLLM's own log does.
    """

    drafts: float
    draft_tokens: float
    accepted_tokens: float
    acceptance_rate: float | None
    mean_accepted_length: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFill:
    """How full batches were, each None where the engine's limit or count is unknown.

    `requests` is running requests over the most that may run, a mean over time with idle time in
    it; `tokens` is the tokens of a step over the most that it may compute, a mean over steps. That
    is an estimate: vLLM counts only steps that gave output, with all tokens of a prompt in its last
    step, so it is too high where prompts take several steps, and None above 1.
    """

    requests: float | None
    tokens: float | None


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
