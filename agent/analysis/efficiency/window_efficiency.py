"""How well GPUs were used over a user's window, from the stored minutes in it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Any

from agent.analysis.physics import ACTIONS, Bound, Roof, RooflinePosition, bound, position
from agent.records.minute import EngineWork, MinuteRow, total
from agent.records.model import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilisation:
    """MFU and MBU of some work, where it is under the roofline, and what to do about it.

    `achieved_flops_per_s` and `achieved_bytes_per_s` are of all GPUs together. What needs an
    unknown peak or unknown FLOPs is None.
    """

    achieved_flops_per_s: float | None
    achieved_bytes_per_s: float
    mfu: float | None
    mbu: float | None
    position: RooflinePosition | None
    bound: Bound | None
    actions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowEfficiency:
    """Stored minutes together. `mfu` and `mbu` are by the requests, over all known time.

    What engines did in minutes without any row is unknown.

    `prefill` and `decode` are over the seconds in which any request was in the phase, `busy` over
    those in which an engine worked; each is None if there was none of it. `counters`, `engine` and
    `hardware` are (MFU, MBU) by the other sources. `steps` names how steps were counted.

    `rejected_draft_share` is the part of all computed output tokens, drafts included, that
    verification rejected. `preemptions` counts running requests that were thrown back. Both are
    None if no engine reports them. With `weights_alone`, `decode` counts the bytes of weights and
    nothing else, because no architecture is known.
    """

    mfu: float | None
    mbu: float | None
    prefill: Utilisation | None
    decode: Utilisation | None
    busy: Utilisation | None
    counters: tuple[float | None, float | None]
    engine: tuple[float | None, float | None]
    hardware: tuple[float | None, float | None]
    steps: frozenset[str]
    disagreements: tuple[Mapping[str, Any], ...]
    rejected_draft_share: float | None
    preemptions: float | None
    weights_alone: bool


# Of all output tokens: the cuts between minutes may put so many into a minute without a row.
_FEW = 0.05
# Seconds, FLOPs and bytes of a part of the work.
_Part = Callable[[EngineWork], tuple[float, float, float]]
_FLOPS, _BYTES = 1, 2


def window_efficiency(minutes: Sequence[MinuteRow]) -> WindowEfficiency | None:
    """The minutes together, without figures of minutes whose model or peaks are unknown.

    None if there are no minutes.
    """
    if not minutes:
        return None
    sound = _sound_minutes(minutes)
    known = [minute for minute in sound if minute.work.needed is not None]
    decode = _utilisation(known, _decode, can_fill_cache=True)
    of_weights = None if decode is not None else _decode_of_weights(sound)
    return WindowEfficiency(
        mfu=_share(known, _known, _FLOPS),
        mbu=_share(known, _known, _BYTES),
        prefill=_utilisation(
            [minute for minute in known if minute.work.prefill_s is not None],
            _prefill,
            can_fill_cache=False,
        ),
        decode=decode or of_weights,
        busy=_utilisation(known, _busy, can_fill_cache=True),
        counters=(_mean(minutes, "counters_mfu", _FLOPS), _mean(minutes, "counters_mbu", _BYTES)),
        engine=(_mean(minutes, "engine_mfu", _FLOPS), _mean(minutes, "engine_mbu", _BYTES)),
        hardware=(_mean(minutes, "hardware_mfu", _FLOPS), _mean(minutes, "hardware_mbu", _BYTES)),
        steps=frozenset(minute.steps for minute in (known or sound) if minute.steps is not None),
        disagreements=_newest_disagreements(minutes),
        rejected_draft_share=_rejected_draft_share(minutes),
        preemptions=_preemptions(minutes),
        weights_alone=of_weights is not None,
    )


def _sound_minutes(minutes: Sequence[MinuteRow]) -> list[MinuteRow]:
    """All without those whose tokens are in no row, if these are many."""
    unseen = [m for m in minutes if m.work.counted_output_tokens > 0 and not _has_rows(m)]
    of_unseen = fsum(minute.work.counted_output_tokens for minute in unseen)
    counted = fsum(minute.work.counted_output_tokens for minute in minutes)
    many = of_unseen > _FEW * counted
    if many and len(unseen) == sum(m.work.counted_output_tokens > 0 for m in minutes):
        # Idle minutes alone would say 0.
        return []
    return [m for m in minutes if not (many and m in unseen)]


def _decode_of_weights(minutes: Sequence[MinuteRow]) -> Utilisation | None:
    """Decode of minutes whose bytes are known and whose FLOPs are not."""
    known = [m for m in minutes if m.work.decode_bytes is not None and m.work.decode_flops is None]
    seconds, _, moved = (
        fsum(column) for column in zip((0.0,) * 3, *[_decode(m.work) for m in known], strict=True)
    )
    if seconds <= 0 or moved <= 0:
        return None
    return Utilisation(
        achieved_flops_per_s=None,
        achieved_bytes_per_s=moved / seconds,
        mfu=None,
        mbu=_share(known, _decode, _BYTES),
        position=None,
        bound=None,
        actions=(),
    )


def _has_rows(minute: MinuteRow) -> bool:
    return minute.work.prompt_tokens + minute.work.output_tokens > 0


def _prefill(work: EngineWork) -> tuple[float, float, float]:
    return work.prefill_s or 0.0, work.prefill_flops or 0.0, work.prefill_bytes or 0.0


def _decode(work: EngineWork) -> tuple[float, float, float]:
    return work.decode_s or 0.0, work.decode_flops or 0.0, work.decode_bytes or 0.0


def _busy(work: EngineWork) -> tuple[float, float, float]:
    needed = work.needed or Work(0.0, 0.0)
    return work.busy_s, needed.flops, needed.bytes_moved


def _known(work: EngineWork) -> tuple[float, float, float]:
    """All work, over the busy and idle seconds."""
    return work.known_s, *_busy(work)[1:]


def _peak(minute: MinuteRow, figure: int) -> float | None:
    return minute.peak_flops_per_s if figure == _FLOPS else minute.peak_bytes_per_s


def _share(minutes: Sequence[MinuteRow], part: _Part, figure: int) -> float | None:
    """The FLOPs or bytes of a part over what the GPUs could have done in its seconds."""
    known = [(part(m.work), peak) for m in minutes if (peak := _peak(m, figure)) is not None]
    could = fsum(figures[0] * peak for figures, peak in known)
    return fsum(figures[figure] for figures, _ in known) / could if could > 0 else None


def _utilisation(
    minutes: Sequence[MinuteRow], part: _Part, *, can_fill_cache: bool
) -> Utilisation | None:
    parts = [part(minute.work) for minute in minutes]
    seconds, flops, moved = (fsum(column) for column in zip((0.0,) * 3, *parts, strict=True))
    if seconds <= 0 or flops <= 0:
        return None
    roof, work = _roof(minutes, part, seconds), Work(flops, moved)
    full_s = fsum(minute.work.cache_full_s for minute in minutes)
    full = can_fill_cache and full_s > seconds / 2
    found = None if roof is None else bound(work, roof, cache_full=full)
    return Utilisation(
        achieved_flops_per_s=flops / seconds,
        achieved_bytes_per_s=moved / seconds,
        mfu=_share(minutes, part, _FLOPS),
        mbu=_share(minutes, part, _BYTES),
        position=None if roof is None else position(work, seconds, roof),
        bound=found,
        actions=() if found is None else ACTIONS[found],
    )


def _roof(minutes: Sequence[MinuteRow], part: _Part, seconds: float) -> Roof | None:
    """The mean peaks, each minute by its seconds; None if a peak that counts is unknown."""
    peaks = []
    for minute in minutes:
        share = part(minute.work)[0] / seconds
        if share and (minute.peak_flops_per_s is None or minute.peak_bytes_per_s is None):
            return None
        peaks.append(
            (share * (minute.peak_flops_per_s or 0.0), share * (minute.peak_bytes_per_s or 0.0))
        )
    return Roof(*(fsum(column) for column in zip(*peaks, strict=True)))


def _newest_disagreements(minutes: Sequence[MinuteRow]) -> tuple[Mapping[str, Any], ...]:
    newest = max(minute.starts_at for minute in minutes)
    last = [minute for minute in minutes if minute.starts_at == newest]
    return tuple(each for minute in last for each in minute.disagreements)


def _mean(minutes: Sequence[MinuteRow], name: str, figure: int) -> float | None:
    """The mean of a ratio over the minutes that know it.

    Each minute is weighted by what its GPUs could have done, or by GPU-seconds if any peak is
    unknown.
    """
    known = [minute for minute in minutes if getattr(minute, name) is not None]
    peaks = [peak for minute in known if (peak := _peak(minute, figure)) is not None]
    if len(peaks) < len(known):
        peaks = [float(minute.gpus or 1) for minute in known]
    weights = [minute.length_s * could for minute, could in zip(known, peaks, strict=True)]
    done = fsum(getattr(m, name) * weight for m, weight in zip(known, weights, strict=True))
    return done / fsum(weights) if known else None


def _preemptions(minutes: Sequence[MinuteRow]) -> float | None:
    known = [m.work.preemptions for m in minutes if m.work.preemptions is not None]
    return fsum(known) if known else None


def _rejected_draft_share(minutes: Sequence[MinuteRow]) -> float | None:
    """None if nothing was drafted."""
    known = total(m.work for m in minutes if m.work.accepted_draft_tokens is not None)
    if known is None or not known.draft_tokens:
        return None
    rejected = max(known.draft_tokens - (known.accepted_draft_tokens or 0.0), 0.0)
    return rejected / (known.counted_output_tokens + rejected)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCache:
    """Tokens looked up in the prefix cache and found there, by the engines' own counters."""

    query_tokens: float
    hit_tokens: float
    hit_ratio: float | None
    """null if nothing was looked up"""


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
    """How full the batches of engines were. Shares are null if a limit or a count is unknown."""

    requests: float | None
    """running requests over the most that may run, a mean over time, idle included"""
    # vLLM counts only steps that gave output, with all tokens of a prompt in its last step.
    tokens: float | None
    """estimated share of a step's token limit; too high or null if prompts take several steps"""


def batch_fill(minutes: Sequence[MinuteRow]) -> BatchFill | None:
    """The batches of these minutes together; None if neither share is known."""
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
    """The prefix caches of these minutes together; None if no engine counts both."""
    found = _sums(minutes, "prefix_query_tokens", "prefix_hit_tokens")
    if found is None:
        return None
    queried, hit = found
    return PrefixCache(query_tokens=queried, hit_tokens=hit, hit_ratio=_ratio(hit, queried))


def speculation(minutes: Sequence[MinuteRow]) -> Speculation | None:
    """The drafts of these minutes together; None if no engine counts all three."""
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
