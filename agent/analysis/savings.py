"""Whether offloaded KV values and speculative decoding pay, from what one engine counted.

Both are estimates: no counter says what the engine would have done without.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import fsum
from typing import NamedTuple

from agent.analysis.engine_counts import counted, total_counts
from agent.catalog import engine_facts as fact
from agent.records.engine_counts import CountsRow, EngineCounts


class Pays(StrEnum):
    """Whether something pays; unknown if the counts do not show it."""

    PAYS = "pays"
    DOES_NOT_PAY = "does_not_pay"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """KV values loaded from outside the GPU: seconds of prefill saved against seconds of loading.

    `saved_s` is an estimate: the loaded tokens at the prefill time of a computed token.
    """

    query_tokens: float
    hit_tokens: float
    hit_ratio: float
    saved_s: float | None
    load_s: float | None
    """null if the engine does not measure it, as of most connectors"""
    verdict: Pays


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """Speculative decoding: how many drafted tokens were accepted, and how much faster it made it.

    `speedup` is an estimate, tokens per second with drafts over those without, at the batch that
    ran. It includes no time of the drafter itself, so that the truth is lower. `at_least` and
    `at_most` need no estimate: they are for steps that take as long as their tokens, and for steps
    that all take the same time.
    """

    drafts: float
    acceptance_ratio: float | None
    mean_accepted_length: float
    accepted_ratio_by_position: Mapping[int, float]
    drafts_per_step: float | None
    speedup: float | None
    at_least: float
    at_most: float
    verdict: Pays


class EngineSavings(NamedTuple):
    """What an engine's caches outside its GPU and its drafts gave; None without them."""

    agent: str
    engine: str
    offload: Offload | None
    speculation: Drafting | None


def savings_by_engine(rows: Iterable[CountsRow]) -> list[EngineSavings]:
    """The engines that have either, by name."""
    by_engine: defaultdict[tuple[str, str], list[CountsRow]] = defaultdict(list)
    for row in rows:
        by_engine[row.agent, row.engine].append(row)
    found = []
    for (agent, engine), own in sorted(by_engine.items()):
        total = total_counts(row.counts for row in own)
        assert total is not None, "each engine has a row"
        each = EngineSavings(agent, engine, offload(total), drafting(total, own))
        if each.offload is not None or each.speculation is not None:
            found.append(each)
    return found


def offload(counts: EngineCounts) -> Offload | None:
    """None for an engine that looks up nothing outside its GPU."""
    queries = counted(counts, fact.EXTERNAL_CACHE_QUERY_TOKENS)
    hits = counted(counts, fact.EXTERNAL_CACHE_HIT_TOKENS)
    if not queries or hits is None:
        return None
    per_token_s = _prefill_s_per_token(counts)
    saved_s = None if per_token_s is None else hits * per_token_s
    load_s = _load_s(counts)
    return Offload(
        query_tokens=queries,
        hit_tokens=hits,
        hit_ratio=hits / queries,
        saved_s=saved_s,
        load_s=load_s,
        verdict=_verdict(None if saved_s is None or not load_s else saved_s / load_s),
    )


def _verdict(gain: float | None) -> Pays:
    if gain is None:
        return Pays.UNKNOWN
    return Pays.PAYS if gain > 1 else Pays.DOES_NOT_PAY


def _load_s(counts: EngineCounts) -> float | None:
    """From slower tiers into host memory, and from there into the GPU: a request waits for both."""
    into_gpu = counted(counts, fact.KV_OFFLOAD_LOAD_TIME)
    if into_gpu is None:
        return None
    return into_gpu + (counted(counts, fact.KV_OFFLOAD_TIER_READ_TIME) or 0.0)


def _prefill_s_per_token(counts: EngineCounts) -> float | None:
    """Seconds of prefill of a token that was computed."""
    prefill = counts.histograms.get(fact.PREFILL_TIME.name)
    prompts = counted(counts, fact.INPUT_TOKENS)
    cached = counted(counts, fact.CACHED_INPUT_TOKENS)
    if prefill is None or prompts is None or cached is None or prompts <= cached:
        return None
    return prefill.sum / (prompts - cached)


def drafting(counts: EngineCounts, rows: Sequence[CountsRow] = ()) -> Drafting | None:
    """None for an engine that drafts nothing. `rows` are its counts by minute or hour."""
    drafts = counted(counts, fact.SPEC_DECODE_DRAFTS)
    drafted = counted(counts, fact.SPEC_DECODE_DRAFT_TOKENS)
    accepted = counted(counts, fact.SPEC_DECODE_ACCEPTED_TOKENS)
    if not drafts or drafted is None or accepted is None:
        return None
    steps = counted(counts, fact.STEPS)
    length, verified = 1 + accepted / drafts, 1 + drafted / drafts
    speedup = _speedup(drafts / steps, length, verified, rows) if steps else None
    return Drafting(
        drafts=drafts,
        acceptance_ratio=accepted / drafted if drafted else None,
        mean_accepted_length=length,
        accepted_ratio_by_position={
            position: tokens / drafts for position, tokens in _by_position(counts)
        },
        drafts_per_step=drafts / steps if steps else None,
        speedup=speedup,
        at_least=length / verified,
        at_most=length,
        verdict=_verdict(speedup),
    )


def _by_position(counts: EngineCounts) -> list[tuple[int, float]]:
    name = fact.SPEC_DECODE_ACCEPTED_BY_POSITION.name
    return sorted(
        (int(labels[0]), tokens)
        for (metric, labels), tokens in counts.counters.items()
        if metric == name and labels[0].isdecimal()
    )


# Points and their spread below which a line says nothing about other batches.
_LEAST_POINTS, _LEAST_SPREAD = 5, 1.5


def _speedup(
    drafts_per_step: float, length: float, verified: float, rows: Iterable[CountsRow]
) -> float | None:
    """Tokens of a step with drafts over those without, each over the time of its step.

    The time of a step is a line over the tokens that it verifies, through the rows. None if the
    batches of the rows are too alike for a line, or longer steps were not slower.
    """
    line = _line([point for row in rows if (point := _step_of(row.counts)) is not None])
    if line is None:
        return None
    fixed_s, token_s = line
    with_drafts_s = fixed_s + token_s * drafts_per_step * verified
    without_s = fixed_s + token_s * drafts_per_step
    return length * without_s / with_drafts_s


def _step_of(counts: EngineCounts) -> tuple[float, float, float] | None:
    """Verified tokens of a mean step, its seconds, and the number of steps."""
    steps = counted(counts, fact.STEPS)
    drafts = counted(counts, fact.SPEC_DECODE_DRAFTS)
    drafted = counted(counts, fact.SPEC_DECODE_DRAFT_TOKENS)
    gaps = counts.histograms.get(fact.INTER_TOKEN_LATENCY.name)
    if not steps or not drafts or drafted is None or gaps is None or not gaps.counts[-1]:
        return None
    return (drafts + drafted) / steps, gaps.sum / gaps.counts[-1], steps


def _line(points: Sequence[tuple[float, float, float]]) -> tuple[float, float] | None:
    """Intercept and slope of the weighted least squares; None if they say nothing."""
    if len(points) < _LEAST_POINTS:
        return None
    tokens = [each for each, _, _ in points]
    if max(tokens) < _LEAST_SPREAD * min(tokens):
        return None
    whole = fsum(weight for _, _, weight in points)
    mean_x = fsum(x * weight for x, _, weight in points) / whole
    mean_y = fsum(y * weight for _, y, weight in points) / whole
    spread = fsum(weight * (x - mean_x) ** 2 for x, _, weight in points)
    slope = fsum(weight * (x - mean_x) * (y - mean_y) for x, y, weight in points) / spread
    intercept = mean_y - slope * mean_x
    return (intercept, slope) if slope >= 0 and intercept >= 0 else None
