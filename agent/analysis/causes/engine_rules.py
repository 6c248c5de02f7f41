"""Rules that hold in several phases: processor, GPU, prefix cache and start of an engine."""

from collections.abc import Callable
from typing import NamedTuple

from agent.analysis.causes.baselines import MISSED_SHARE
from agent.analysis.causes.engine_timeline import COLD_S
from agent.analysis.causes.evidence import missed_text, seconds
from agent.analysis.causes.missed_case import Claim, MissedCase
from agent.analysis.causes.periods import Period

# From this share of the time on, the core lacks a processor. On any machine, other processes take a
# processor now and then.
STARVED_SHARE = 0.15
# A GPU that throttling slows by less than this share is not the cause.
THROTTLED_SHARE = 0.05
# A GPU that loses this share of its time explains the whole queue.
ALL_QUEUE_SHARE = 0.5
# Prompt tokens that the cache did not lose are a cause when they are this multiple of the usual.
MORE_PROMPTS = 2.0

Span = tuple[float, float]
_CORE, _FRONT = 0, 1


class LostPrompts(NamedTuple):
    """The part of computed prompt tokens that the prefix cache usually has, and its evidence."""

    share: float
    text: str


def core_waited(case: MissedCase, period: Span) -> Claim | None:
    """The core waited for a processor in a period, and its steps were slow.

    Without slow steps the wait cost nothing: the core of an engine with workers polls for their
    results during their steps, and waits for a processor while it does.
    """
    claim = _waited(case, period, _CORE)
    if claim is None:
        return None
    slow_s = case.timeline.period(*period).activity.slow_s
    if slow_s is None:
        return claim
    enough = slow_s >= STARVED_SHARE * (period[1] - period[0])
    return Claim(min(claim.seconds, slow_s), claim.evidence) if enough else None


def front_waited(case: MissedCase, period: Span) -> Claim | None:
    """The front waited for a processor in a period."""
    return _waited(case, period, _FRONT)


def _waited(case: MissedCase, period: Span, process: int) -> Claim | None:
    start, end = period
    waited_s = case.timeline.processor_waits.lost_s(start, end, process)
    if not waited_s or waited_s < STARVED_SHARE * (end - start):
        return None
    text = (
        f"the engine's {('core', 'front')[process]} was ready to run and had no processor for "
        f"{seconds(waited_s)} of {seconds(end - start)} more than usual (the kernel's run delay)"
    )
    return Claim(waited_s, (text,))


def gpu_slowed(case: MissedCase, period: Span) -> Claim | None:
    """A throttled GPU was slower than usual in a period."""
    start, end = period
    slow_s = case.timeline.gpu_slowness.lost_s(start, end)
    if not slow_s or slow_s < THROTTLED_SHARE * (end - start):
        return None
    text = (
        f"a throttled GPU lost {seconds(slow_s)} of {seconds(end - start)} against its usual clock "
        "(by its clock and its throttle reasons)"
    )
    return Claim(slow_s, (text,))


def lost_prompts(case: MissedCase, period: Period) -> LostPrompts | None:
    """The part of others' prompts in a period that the prefix cache usually has.

    None where it is nothing, or so little that it may be chance.
    """
    share = case.prompts(period).missing_share
    if share is None:
        missed = case.missed_hits(period)
        return None if missed is None else LostPrompts(missed.share, missed_text(missed))
    if share < MISSED_SHARE:
        return None
    text = f"the prefix cache usually has {share:.0%} of the prompt tokens of others"
    return LostPrompts(share, f"{text} that were computed meanwhile (by the rows of the requests)")


def missed_by_others(
    case: MissedCase, period: Period, prefill_s: Callable[[MissedCase], float]
) -> Claim | None:
    """A claim on the part of the time of others' prompts that is due to the prefix cache."""
    all_s = prefill_s(case)
    lost = lost_prompts(case, period) if all_s else None
    return None if lost is None else Claim(missed_share(case, period) * all_s, (lost.text,))


def missed_share(case: MissedCase, period: Period) -> float:
    """The share of the time of others' prompts that is due to the prefix cache.

    Where the cache lost tokens, it is all of the time unless the remaining tokens are more than
    MORE_PROMPTS times the usual: requests always share their steps with some prompts.
    """
    lost = lost_prompts(case, period)
    if lost is None:
        return 0.0
    usual_per_s = case.timeline.sampled.usual_prompt_tokens_per_s(period.start)
    if usual_per_s is None:
        return lost.share
    rest = (1 - lost.share) * case.prompts(period).tokens
    return 1.0 if rest <= MORE_PROMPTS * usual_per_s * period.seconds else lost.share


def in_queue(claim: Claim, case: MissedCase, left_s: float, all_at: float) -> Claim:
    """A claim on the queue in proportion to the lost share; on all of it from `all_at` on."""
    lost_share = claim.seconds / case.backlog.seconds
    return Claim(left_s * min(1.0, lost_share / all_at), claim.evidence)


def cold(case: MissedCase, left_s: float, began_at: float, what: str) -> Claim | None:
    """The engine had just started when `what` happened at `began_at` (Unix time)."""
    ready_at = case.timeline.ready_at
    if ready_at is None or not -COLD_S <= began_at - ready_at <= COLD_S:
        return None
    since_s = began_at - ready_at
    text = f"{seconds(since_s)} after" if since_s >= 0 else f"{seconds(-since_s)} before"
    return Claim(left_s, (f"the {what} {text} the engine's {case.timeline.ready_by}",))


def request_cold(case: MissedCase, left_s: float) -> Claim | None:
    """The engine had just started when the request came."""
    return cold(case, left_s, case.arrived_at, "request came")
