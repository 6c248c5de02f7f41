"""Rules that hold in several phases: processor, GPU, prefix cache and start of an engine."""

from collections.abc import Callable
from typing import NamedTuple

from agent.analysis.causes.baselines import MISSED_SHARE
from agent.analysis.causes.engine_timeline import COLD_S
from agent.analysis.causes.evidence import missed_text, seconds
from agent.analysis.causes.missed_case import Claim, MissedCase
from agent.analysis.causes.periods import Period

# An engine whose core waits this share of the time for a processor is short of it. Others take a
# processor now and then on any machine.
STARVED_SHARE = 0.15
# A GPU that throttling slows by less is not the cause.
THROTTLED_SHARE = 0.05
# An engine whose GPU loses this share of its time grows a queue by that alone.
ALL_QUEUE_SHARE = 0.5
# Prompts that come on top of those that the cache lost count from this many times the usual.
MORE_PROMPTS = 2.0

Span = tuple[float, float]
_CORE, _FRONT = 0, 1


class LostPrompts(NamedTuple):
    """The part of computed prompt tokens that the prefix cache usually has, and its evidence."""

    share: float
    text: str


def core_waited(case: MissedCase, period: Span) -> Claim | None:
    """The core waited for a processor for a part of a period, and its steps were slow by that.

    A process that asks again and again whether there is work also waits for processors, and loses
    nothing: the core of an engine with workers does so during their steps.
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
    """The process that takes requests waited for a processor for a part of a period."""
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
    """A throttled GPU was slower than it usually is."""
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
    """What the prefix cache lost of others' prompts in a period; None for nothing, or chance."""
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
    """The part of the time of others' prompts that is due to the prefix cache."""
    all_s = prefill_s(case)
    lost = lost_prompts(case, period) if all_s else None
    return None if lost is None else Claim(missed_share(case, period) * all_s, (lost.text,))


def missed_share(case: MissedCase, period: Period) -> float:
    """The part of the time of others' prompts that is due to the prefix cache.

    Where the cache lost tokens, other prompts count too only above twice the usual: requests always
    share their steps with the usual number of prompts.
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
    """A claim on the queue in proportion to the lost time; from the share `all_at` on, on all."""
    lost_share = claim.seconds / case.backlog.seconds
    return Claim(left_s * min(1.0, lost_share / all_at), claim.evidence)


def cold(case: MissedCase, left_s: float, began_at: float, what: str) -> Claim | None:
    """The engine had just started when something began."""
    ready_at = case.timeline.ready_at
    if ready_at is None or not -COLD_S <= began_at - ready_at <= COLD_S:
        return None
    since_s = began_at - ready_at
    text = f"{seconds(since_s)} after" if since_s >= 0 else f"{seconds(-since_s)} before"
    return Claim(left_s, (f"the {what} {text} the engine's {case.timeline.ready_by}",))


def request_cold(case: MissedCase, left_s: float) -> Claim | None:
    """The engine had just started when the request came."""
    return cold(case, left_s, case.arrived_at, "request came")
