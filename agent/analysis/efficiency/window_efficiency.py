"""How well GPUs were used over many windows, from what each of them kept."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Any

from agent.analysis.physics.roofline import ACTIONS, Bound, Roof, RooflinePosition, bound, position
from agent.records.minute import MinuteRow
from agent.records.model import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilisation:
    """MFU and MBU of some work, where it stood under the roofline, and what to do first.

    `achieved_flops_per_s` and `achieved_bytes_per_s` are of all GPUs together.
    """

    achieved_flops_per_s: float
    achieved_bytes_per_s: float
    mfu: float | None
    mbu: float | None
    position: RooflinePosition | None
    bound: Bound | None
    actions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowEfficiency:
    """Windows together. `mfu` and `mbu` are over all time that is known, as the requests tell them.

    The phases are over the seconds in which they went on, `busy` over those in which an engine
    worked; each None where there was none of it. `engine` and `hardware` are (MFU, MBU) by the
    other two sources. `steps` are the ways in which steps were counted.

    `rejected_draft_share` is the share of the output tokens that were computed, drafted ones among
    them, that were drafts which verification rejected; `preemptions` threw running requests back,
    whose tokens are computed again. Each None where no engine tells it.
    """

    mfu: float | None
    mbu: float | None
    prefill: Utilisation | None
    decode: Utilisation | None
    busy: Utilisation | None
    engine: tuple[float | None, float | None]
    hardware: tuple[float | None, float | None]
    steps: frozenset[str]
    disagreements: tuple[Mapping[str, Any], ...]
    rejected_draft_share: float | None
    preemptions: float | None


# Seconds, FLOPs and bytes of a part of a window.
_Part = Callable[[MinuteRow], tuple[float, float, float]]


def window_efficiency(windows: Sequence[MinuteRow]) -> WindowEfficiency | None:
    """The windows together; None where there are none.

    Figures of windows whose model or peaks are unknown are left out.
    """
    if not windows:
        return None
    known = [window for window in windows if window.prefill_flops is not None]
    return WindowEfficiency(
        mfu=_share(known, _known, 1),
        mbu=_share(known, _known, 2),
        prefill=_use(
            [window for window in known if window.prefill_s is not None],
            _prefill,
            can_fill_cache=False,
        ),
        decode=_use(known, _decode, can_fill_cache=True),
        busy=_use(known, lambda w: (w.busy_s, *_all_work(w)), can_fill_cache=True),
        engine=(_mean(windows, "engine_mfu", 1), _mean(windows, "engine_mbu", 2)),
        hardware=(_mean(windows, "hardware_mfu", 1), _mean(windows, "hardware_mbu", 2)),
        steps=frozenset(window.steps for window in known if window.steps is not None),
        disagreements=_newest_disagreements(windows),
        rejected_draft_share=_rejected_draft_share(windows),
        preemptions=_told_sum(windows, "preemptions"),
    )


def _prefill(window: MinuteRow) -> tuple[float, float, float]:
    return window.prefill_s or 0.0, window.prefill_flops or 0.0, window.prefill_bytes or 0.0


def _decode(window: MinuteRow) -> tuple[float, float, float]:
    return window.decode_s or 0.0, window.decode_flops or 0.0, window.decode_bytes or 0.0


def _all_work(window: MinuteRow) -> tuple[float, float]:
    (_, prefill, filled), (_, decode, read) = _prefill(window), _decode(window)
    return prefill + decode, filled + read - (window.shared_bytes or 0.0)


def _known(window: MinuteRow) -> tuple[float, float, float]:
    """Over the time of which it is known what was done."""
    return max(window.length_s - window.unknown_s, 0.0), *_all_work(window)


def _peak(window: MinuteRow, figure: int) -> float | None:
    return (None, window.peak_flops_per_s, window.peak_bytes_per_s)[figure]


def _share(windows: Sequence[MinuteRow], part: _Part, figure: int) -> float | None:
    """What was done of what could have been, in FLOPs (1) or bytes (2)."""
    told = [(part(w), peak) for w in windows if (peak := _peak(w, figure)) is not None]
    could = fsum(parts[0] * peak for parts, peak in told)
    return fsum(parts[figure] for parts, _ in told) / could if could > 0 else None


def _use(windows: Sequence[MinuteRow], part: _Part, *, can_fill_cache: bool) -> Utilisation | None:
    parts = [part(window) for window in windows]
    seconds, flops, moved = (fsum(column) for column in zip((0.0,) * 3, *parts, strict=True))
    if seconds <= 0 or flops <= 0:
        return None
    roof, work = _roof(windows, part, seconds), Work(flops, moved)
    full_s = fsum(window.cache_full_s for window in windows)
    full = can_fill_cache and full_s > seconds / 2
    found = None if roof is None else bound(work, roof, cache_full=full)
    return Utilisation(
        achieved_flops_per_s=flops / seconds,
        achieved_bytes_per_s=moved / seconds,
        mfu=_share(windows, part, 1),
        mbu=_share(windows, part, 2),
        position=None if roof is None else position(work, seconds, roof),
        bound=found,
        actions=() if found is None else ACTIONS[found],
    )


def _roof(windows: Sequence[MinuteRow], part: _Part, seconds: float) -> Roof | None:
    """The best of the GPUs that were at it; None where one of them is unknown."""
    peaks = []
    for window in windows:
        share = part(window)[0] / seconds
        if share and (window.peak_flops_per_s is None or window.peak_bytes_per_s is None):
            return None
        peaks.append(
            (share * (window.peak_flops_per_s or 0.0), share * (window.peak_bytes_per_s or 0.0))
        )
    return Roof(*(fsum(column) for column in zip(*peaks, strict=True)))


def _newest_disagreements(windows: Sequence[MinuteRow]) -> tuple[Mapping[str, Any], ...]:
    """Those of every engine's window of the newest minute."""
    newest = max(window.starts_at for window in windows)
    last = [window for window in windows if window.starts_at == newest]
    return tuple(each for window in last for each in window.disagreements)


def _mean(windows: Sequence[MinuteRow], name: str, figure: int) -> float | None:
    """Over the windows that tell it, each by what its GPUs could have done in FLOPs (1) or bytes.

    By the GPU-seconds where a peak is unknown.
    """
    told = [window for window in windows if getattr(window, name) is not None]
    peaks = [_peak(window, figure) for window in told]
    known = [peak for peak in peaks if peak is not None]
    each = known if len(known) == len(told) else [float(window.gpus or 1) for window in told]
    weights = [window.length_s * could for window, could in zip(told, each, strict=True)]
    done = fsum(getattr(w, name) * weight for w, weight in zip(told, weights, strict=True))
    return done / fsum(weights) if told else None


def _told_sum(windows: Sequence[MinuteRow], name: str) -> float | None:
    told = [value for window in windows if (value := getattr(window, name)) is not None]
    return fsum(told) if told else None


def _rejected_draft_share(windows: Sequence[MinuteRow]) -> float | None:
    """None where nothing was drafted."""
    told = [window for window in windows if window.accepted_draft_tokens is not None]
    drafted = fsum(window.draft_tokens or 0.0 for window in told)
    if not drafted:
        return None
    rejected = max(drafted - fsum(window.accepted_draft_tokens or 0.0 for window in told), 0.0)
    return rejected / (fsum(window.counted_output_tokens for window in told) + rejected)
