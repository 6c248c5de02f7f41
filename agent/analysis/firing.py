"""When the pages on an error budget fired, by the verdicts of each minute.

Windows, thresholds and hold time are those of the rules that `render` writes. Prometheus evaluates
them at its own moments, so its alerts may begin and end up to two minutes later.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agent.analysis.burn_rates import BURN, HOLD_S, MIN_MISSED, OUTAGE, TIERS, BurnPlan
from agent.catalog.time_units import MINUTE_S

_Counts = NDArray[np.int64]
_Flags = NDArray[np.bool_]
_HELD = round(HOLD_S / MINUTE_S) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Firing:
    """A page that fired, in Unix seconds; None is before the first and after the last moment."""

    alert: str
    rule: str
    from_s: float | None
    until_s: float | None


class MinuteVerdicts(NamedTuple):
    """Judged requests of each minute from `from_s` on: how many met, and how many missed."""

    from_s: int
    met: _Counts
    missed: _Counts


def minute_verdicts(
    from_s: int, until_s: float, counted: Mapping[int, tuple[int, int]]
) -> MinuteVerdicts:
    """All minutes of a window, of (met, missed) by the Unix second that a minute starts at."""
    starts = range(from_s, int(until_s), MINUTE_S)
    minutes = [counted.get(start, (0, 0)) for start in starts]
    met, missed = np.array(minutes, dtype=np.int64).reshape(-1, 2).T
    return MinuteVerdicts(from_s, met, missed)


def pages_look_back_s(plans: Sequence[BurnPlan]) -> float:
    """How long before a moment requests may have ended that decide whether a page fires then."""
    windows_s = [rule.window_s for found in plans if (rule := found.outage)]
    windows_s += [burn.long_s for found in plans for burn in found.kept if burn.tier.pages]
    return max(windows_s, default=0.0) + HOLD_S


def firings(found: BurnPlan, verdicts: MinuteVerdicts, shown_from_s: float) -> list[Firing]:
    """The pages that fired at or after a moment, the quickest rule first."""
    return [
        Firing(alert=alert, rule=rule, from_s=from_s, until_s=until_s)
        for alert, rule, flags in _rules(found, verdicts)
        for from_s, until_s in _spans(flags, verdicts.from_s, shown_from_s)
    ]


def _rules(found: BurnPlan, verdicts: MinuteVerdicts) -> Iterator[tuple[str, str, _Flags]]:
    quicker = np.zeros(len(verdicts.met), dtype=np.bool_)
    if found.outage:
        outage = (found.outage.window_s,)
        flags = _held(_exceeded(verdicts, outage, found.outage.threshold))
        quicker |= flags
        yield OUTAGE, "outage", flags
    for burn in found.kept:
        if not burn.tier.pages:
            continue
        exceeded = _exceeded(verdicts, (burn.long_s, burn.short_s), burn.threshold)
        if burn.tier is TIERS[0]:
            flags = _held(exceeded)
            quicker |= flags
            yield BURN, "fast burn", flags
        else:
            lately = _sums(quicker.astype(np.int64), burn.short_s) > 0
            yield BURN, "slow burn", _held(exceeded & ~lately)


def _exceeded(verdicts: MinuteVerdicts, windows_s: tuple[float, ...], threshold: Decimal) -> _Flags:
    flags: _Flags = _sums(verdicts.missed, windows_s[0]) >= MIN_MISSED
    for window_s in windows_s:
        missed = _sums(verdicts.missed, window_s)
        judged = missed + _sums(verdicts.met, window_s)
        flags &= missed > float(threshold) * judged
    return flags


def _sums(counts: _Counts, window_s: float) -> _Counts:
    """The sums over the window that ends with each minute."""
    minutes = max(round(window_s / MINUTE_S), 1)
    total = np.concatenate(([0], np.cumsum(counts)))
    ends = np.arange(1, len(total))
    return np.asarray(total[ends] - total[np.maximum(ends - minutes, 0)])


def _held(flags: _Flags) -> _Flags:
    """Whether a flag is set for as long as an alert waits before it fires."""
    return np.asarray(_sums(flags.astype(np.int64), _HELD * MINUTE_S) == _HELD)


def _spans(
    flags: _Flags, from_s: int, shown_from_s: float
) -> Iterator[tuple[float | None, float | None]]:
    """When flags are set, each of them at the end of its minute."""
    changes = np.flatnonzero(np.diff(flags, prepend=False, append=False))
    for first, after in changes.reshape(-1, 2).tolist():
        begin, end = (from_s + MINUTE_S * (place + 1) for place in (first, after))
        if end > shown_from_s or after == len(flags):
            yield (
                begin if begin > shown_from_s else None,
                end if after < len(flags) else None,
            )
