"""What tokens cost that met an objective."""

from collections import defaultdict
from collections.abc import Sequence
from math import fsum

from agent.records.minute import MinuteRow

_MILLION = 1e6


def usd_per_million_by_objective(windows: Sequence[MinuteRow]) -> dict[str, float]:
    """Dollars of the whole bill over a million output tokens of requests that met each objective.

    Of windows with a price that tell these tokens by objective; an objective that no request met
    is left out.
    """
    told = [(window.bill_usd, window.good_tokens_by_objective) for window in windows]
    known = [(usd, tokens) for usd, tokens in told if usd is not None and tokens is not None]
    good: defaultdict[str, list[float]] = defaultdict(list)
    for _, tokens in known:
        for objective, count in tokens.items():
            good[objective].append(count)
    bill = fsum(usd for usd, _ in known)
    return {
        objective: bill / fsum(counts) * _MILLION
        for objective, counts in good.items()
        if fsum(counts) > 0
    }
