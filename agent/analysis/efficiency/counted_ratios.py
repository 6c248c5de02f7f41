"""Ratios of an engine's own counters over booked minutes: its prefix cache and its drafts."""

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
