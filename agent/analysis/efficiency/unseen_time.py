"""How long requests without a row were at work, by the engine's counts and the pace of rows."""

from collections.abc import Sequence
from math import fsum
from typing import NamedTuple

from agent.analysis.efficiency.engine_observation import SampleInterval
from agent.analysis.efficiency.request_activity import RequestActivity
from agent.analysis.efficiency.time_range import TimeRange, covered_s

# So few prompt tokens take as long as one: their step waits for the weights. The ridges of GPUs for
# servers are 150 to 400 FLOPs per byte, and so as many tokens in 16 bits.
FREE_TOKENS = 256


class Pace(NamedTuple):
    """Seconds of a step that decodes and of a prompt token; None where they are unknown."""

    step_s: float | None = None
    token_s: float | None = None


def pace_of(active: Sequence[RequestActivity]) -> Pace:
    """How fast rows were. Small prompts take a whole step, so only the longest ones count."""
    decoding = [each for each in active if each.decoded_tokens and each.decode.length_s]
    steps = fsum(each.decoded_tokens / each.choices for each in decoding)
    timed = [each for each in active if each.timed and each.prefill.length_s]
    most = max((each.computed_tokens for each in timed), default=0)
    longest = [each for each in timed if each.computed_tokens >= max(most / 2, 1)]
    tokens = sum(max(each.computed_tokens, FREE_TOKENS) for each in longest)
    return Pace(
        fsum(each.decode.length_s for each in decoding) / steps if steps else None,
        _prefilling_s(longest) / tokens if longest else None,
    )


def _prefilling_s(active: Sequence[RequestActivity]) -> float:
    """Seconds in which any of them was in prefill."""
    ranges = [each.prefill for each in active]
    time = TimeRange(min(ranges).from_at, max(each.until for each in ranges))
    return covered_s(ranges, time)


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


def beyond_s(interval: SampleInterval, near: Sequence[RequestActivity], pace: Pace) -> float | None:
    """Seconds of the steps that the engine counted beyond those of rows; None where unknown.

    With drafts a step has several tokens of a stream, and the steps of rows are unknown.
    """
    growth = interval.growth
    if growth.steps is None or pace.step_s is None or growth.draft_tokens:
        return None
    return max(growth.steps - _steps_of(near, interval.time), 0.0) * pace.step_s


def _steps_of(active: Sequence[RequestActivity], time: TimeRange) -> float:
    """Steps that gave tokens to rows: those that decode, and prompts' last ones without decode."""
    decoding = [each for each in active if each.decoded_tokens]
    ranges = [each.decode for each in decoding]
    decoding_s, working_s = covered_s(ranges, time), covered_s((a.whole for a in active), time)
    together_s = fsum(each.within(time).length_s for each in ranges)
    streams = [each.decoded_tokens / each.choices * each.decode.share_in(time) for each in decoding]
    prompts = {each.prefill.until for each in active if each.first_in(time)}
    alone = 1.0 - decoding_s / working_s if working_s else 0.0
    decoded = fsum(streams) * decoding_s / together_s if together_s else 0.0
    return len(prompts) * alone + decoded
