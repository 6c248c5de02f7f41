"""Counts without what does not count any more."""

from collections.abc import Mapping
from typing import Any

from agent.analysis.quantiles import BinRun
from agent.analysis.tally import Tally, VerdictCounts


def difference(whole: Tally, part: Tally) -> Tally:
    """What is left of `whole` without `part`, which was counted into it.

    Equal to the tally of the other requests alone: no zeros are left behind. Where `part` was not
    counted into it after all, because its rollup was let go, nothing falls below zero.
    """
    return Tally(
        requests=max(0, whole.requests - part.requests),
        statuses=_less(whole.statuses, part.statuses),
        seen_at_proxy=max(0, whole.seen_at_proxy - part.seen_at_proxy),
        input_tokens=max(0, whole.input_tokens - part.input_tokens),
        input_tokens_known=max(0, whole.input_tokens_known - part.input_tokens_known),
        output_tokens=max(0, whole.output_tokens - part.output_tokens),
        output_tokens_known=max(0, whole.output_tokens_known - part.output_tokens_known),
        verdicts=_verdicts(whole, part),
        bins=_bins(whole, part),
    )


def _less(counts: Mapping[Any, int], part: Mapping[Any, int]) -> dict[Any, int]:
    left = {key: count - part.get(key, 0) for key, count in counts.items()}
    return {key: count for key, count in left.items() if count > 0}


def _verdicts(whole: Tally, part: Tally) -> dict[tuple[str, str], VerdictCounts]:
    left = {}
    for key, counts in whole.verdicts.items():
        gone = part.verdicts.get(key, VerdictCounts())
        if counts.requests > gone.requests:
            left[key] = VerdictCounts(
                counts.requests - gone.requests,
                max(0, counts.output_tokens - gone.output_tokens),
            )
    return left


def _bins(whole: Tally, part: Tally) -> dict[str, BinRun]:
    left = {}
    for measure, run in whole.bins.items():
        gone = part.bins[measure].bins() if measure in part.bins else {}
        bins = _less(run.bins(), gone)
        if bins:
            left[measure] = BinRun.of(bins)
    return left
