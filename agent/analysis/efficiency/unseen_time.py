"""How long requests without a row were at work, by the engine's counts and the pace of rows."""

from typing import NamedTuple

import numpy as np

from agent.analysis.efficiency.engine_observation import SampleInterval
from agent.analysis.efficiency.request_activity import Activities
from agent.analysis.efficiency.time_range import EVER, TimeRange, covered_s

# So few prompt tokens take as long as one: their step waits for the weights. The ridges of GPUs for
# servers are 150 to 400 FLOPs per byte, and so as many tokens in 16 bits.
FREE_TOKENS = 256


class Pace(NamedTuple):
    """Seconds of a step that decodes and of a prompt token; None where they are unknown."""

    step_s: float | None = None
    token_s: float | None = None


def pace_of(active: Activities) -> Pace:
    """How fast rows were. Small prompts take a whole step, so only the longest ones count."""
    decoding = active.chosen((active.decoded_tokens > 0) & (active.decode.length_s > 0))
    steps = float((decoding.decoded_tokens / decoding.choices).sum())
    timed = active.chosen(active.timed & (active.prefill.length_s > 0))
    most = timed.computed_tokens.max(initial=0.0)
    longest = timed.chosen(timed.computed_tokens >= max(most / 2, 1.0))
    tokens = float(np.maximum(longest.computed_tokens, FREE_TOKENS).sum())
    return Pace(
        float(decoding.decode.length_s.sum()) / steps if steps else None,
        covered_s(longest.prefill, EVER) / tokens if tokens else None,
    )


def alone_s(interval: SampleInterval, pace: Pace) -> float | None:
    """Seconds that all that the engine counted took, where no row was at work.

    None where the pace is unknown, or a prompt may be at work that is not counted yet.
    """
    growth = interval.growth
    unfinished = not growth.output_tokens and any(each != 0 for each in interval.running)
    if unfinished or growth.output_tokens is None or pace.step_s is None or pace.token_s is None:
        return None
    steps = growth.output_tokens if growth.steps is None else growth.steps
    return steps * pace.step_s + (growth.computed_tokens or 0.0) * pace.token_s


def beyond_s(interval: SampleInterval, near: Activities, pace: Pace) -> float | None:
    """Seconds of the steps that the engine counted beyond those of rows; None where unknown.

    With drafts a step has several tokens of a stream, and the steps of rows are unknown.
    """
    growth = interval.growth
    if growth.steps is None or pace.step_s is None or growth.draft_tokens:
        return None
    return max(growth.steps - _steps_of(near, interval.time), 0.0) * pace.step_s


def _steps_of(active: Activities, time: TimeRange) -> float:
    """Steps that gave tokens to rows: those that decode, and prompts' last ones without decode."""
    decoding = active.chosen(active.decoded_tokens > 0)
    decoding_s, working_s = covered_s(decoding.decode, time), covered_s(active.whole, time)
    together_s = float(decoding.decode.within_s(time).sum())
    streams = decoding.decoded_tokens / decoding.choices * decoding.decode.share_in(time)
    prompts = np.unique(active.first_at[active.first_in(time) > 0]).size
    alone = 1.0 - decoding_s / working_s if working_s else 0.0
    decoded = float(streams.sum()) * decoding_s / together_s if together_s else 0.0
    return prompts * alone + decoded
