"""Rules and sentences of evidence that several phases share: processor, GPU, cache and start."""

from typing import NamedTuple

import numpy as np

from agent.analysis.causes.baselines import MISSED_SHARE
from agent.analysis.causes.engine_timeline import COLD_S
from agent.analysis.causes.missed_case import Claim, Hold, MissedCase, Worked
from agent.analysis.causes.periods import MissedHits, Period, Prompts

# At most this many of the largest prompts are named.
_NAMED = 3
_SOURCES = {"plugin": "by its plugin", "samples": "by its samples", None: "source unknown"}


def source_text(period: Period) -> str:
    """The source of a period's figures."""
    return _SOURCES[period.source]


def prompts_texts(prompts: Prompts) -> tuple[str, ...]:
    """How many prompts of other requests were prefilled, with how many tokens; empty if none."""
    named = ", ".join([f"{size:,}" for size in _largest(prompts)]) if prompts.many else ""
    if not named:
        return ()
    many = f"{prompts.many} prompts" if prompts.many > 1 else "1 prompt"
    return (
        f"{many} of other requests with {prompts.tokens:,} computed tokens were prefilled "
        f"meanwhile, the largest of {named} tokens (by their rows)",
    )


def _largest(prompts: Prompts) -> list[int]:
    """The largest prompts of others, in falling order."""
    sizes, own, found = prompts.sizes, prompts.own, list[int]()
    if not isinstance(sizes, np.ndarray):
        found = sorted(sizes, reverse=True)[: _NAMED + 1]
        if own in found:
            found.remove(own)
        return found[:_NAMED]
    # A few searches are quicker than to sort thousands.
    left = sizes.copy()
    for _ in range(min(_NAMED, prompts.many)):
        index = left.argmax()
        if own and left[index] == own:
            own, left[index] = 0, -1
            index = left.argmax()
        found.append(int(left[index]))
        left[index] = -1
    return found


def period_prompts_texts(case: MissedCase, period: Period) -> tuple[str, ...]:
    """`prompts_texts` of a period, made once."""
    key = "texts", period.start
    if key not in case.found:
        case.found[key] = prompts_texts(case.prompts(period))
    texts: tuple[str, ...] = case.found[key]
    return texts


def missed_text(missed: MissedHits) -> str:
    """The share of prompt tokens that the prefix cache had, and usually has."""
    return (
        f"the prefix cache had {missed.now:.0%} of the looked-up prompt tokens, usually "
        f"{missed.usual:.0%} (by the engine's samples)"
    )


def requests_text(many: float) -> str:
    """A number of requests."""
    text = f"{many:.0f}"
    return "1 request" if text == "1" else f"{text} requests"


def seconds(value_s: float) -> str:
    """A duration in a readable unit."""
    return f"{1000 * value_s:.3g} ms" if abs(value_s) < 1 else f"{value_s:.3g} s"


# From this share of the time on, the core lacks a processor. On any machine, other processes take a
# processor now and then.
STARVED_SHARE = 0.15
# A GPU that throttling slows by less than this share is not the cause.
THROTTLED_SHARE = 0.05
# A GPU that loses this share of its time explains the whole queue.
ALL_QUEUE_SHARE = 0.5

_CORE, _FRONT = 0, 1


class LostPrompts(NamedTuple):
    """The part of computed prompt tokens that the prefix cache usually has, and its evidence."""

    share: float
    text: str


def core_waited(case: MissedCase, period: Period, worked: Worked | None) -> Claim | None:
    """The core waited for a processor in a period, and its steps were slow.

    Without slow steps the wait cost nothing: the core of an engine with workers polls for their
    results during their steps, and waits for a processor while it does.
    """
    claim = _waited(case, period.start, period.end, _CORE)
    if claim is None or worked is None:
        return claim
    slow_s = worked.slow_s
    enough = slow_s >= STARVED_SHARE * period.seconds
    return Claim(min(claim.seconds, slow_s), claim.evidence) if enough else None


def front_waited(case: MissedCase, left_s: float) -> Claim | None:
    """The front waited for a processor until the request's first token."""
    return _waited(case, case.arrived_at, case.first_at, _FRONT)


def front_waited_in_stream(case: MissedCase, left_s: float) -> Claim | None:
    """The front waited for a processor while it sent the stream, as measured inside it."""
    return _waited(case, case.first_at, case.record.ended_at, _FRONT) if case.in_front else None


def _waited(case: MissedCase, start: float, end: float, process: int) -> Claim | None:
    waited_s = case.timeline.processor_waits.lost_s(start, end, process)
    if not waited_s or waited_s < STARVED_SHARE * (end - start):
        return None
    text = (
        f"the engine's {('core', 'front')[process]} was ready to run and had no processor for "
        f"{seconds(waited_s)} of {seconds(end - start)} more than usual (the kernel's run delay)"
    )
    return Claim(waited_s, (text,))


def gpu_slowed(case: MissedCase, period: Period) -> Claim | None:
    """A throttled GPU was slower than usual in a period."""
    slow_s = case.timeline.gpu_slowness.lost_s(period.start, period.end)
    if not slow_s or slow_s < THROTTLED_SHARE * period.seconds:
        return None
    text = (
        f"a throttled GPU lost {seconds(slow_s)} of {seconds(period.seconds)} against its usual "
        "clock (by its clock and its throttle reasons)"
    )
    return Claim(slow_s, (text,))


def lost_prompts(case: MissedCase, period: Period) -> LostPrompts | None:
    """The part of others' prompts in a period that the prefix cache usually has, found once."""
    known = case.found
    key = "lost", period.start
    if key not in known:
        known[key] = _lost_prompts(case, period)
    lost: LostPrompts | None = known[key]
    return lost


def _lost_prompts(case: MissedCase, period: Period) -> LostPrompts | None:
    """The part of others' prompts in a period that the prefix cache usually has.

    None if it is nothing, or so little that it may be chance.
    """
    share = case.prompts(period).missing_share
    if share is None:
        missed = case.missed_hits(period)
        return None if missed is None else LostPrompts(missed.share, missed_text(missed))
    if share < MISSED_SHARE or not case.lost_by_others(period):
        return None
    text = f"the prefix cache usually has {share:.0%} of the prompt tokens of others"
    return LostPrompts(share, f"{text} that were computed meanwhile (by the rows of the requests)")


def missed_share(case: MissedCase, period: Period) -> float:
    """The share of the computed prompt tokens of others that the prefix cache lost."""
    lost = lost_prompts(case, period)
    return 0.0 if lost is None else lost.share


def missed_by_others(case: MissedCase, period: Period, prefill_s: float) -> Claim | None:
    """A claim on the part of the `prefill_s` of others' prompts that the prefix cache missed."""
    lost = lost_prompts(case, period) if prefill_s else None
    return None if lost is None else Claim(lost.share * prefill_s, (lost.text,))


def stalled(case: MissedCase, start: float, end: float) -> Claim | None:
    """Single steps of a period took many times as long as their tokens need."""
    stalls = [*case.timeline.stalled(start, end)]
    if not stalls:
        return None
    texts = [
        f"the step that ended at {stall.until:.3f} (Unix time) took "
        f"{seconds(stall.until - stall.since)}, and its tokens need {seconds(stall.usual_s)} "
        "(by its plugin)"
        for stall in stalls[:_NAMED]
    ]
    return Claim(sum(stall.lost_s for stall in stalls), tuple(texts))


def held_text(hold: Hold) -> str:
    """Why more requests than usual ran at once."""
    return f"no more came than usual since {hold.since:.0f} (Unix time): {hold.text} had held them"


def slow_text(worked: Worked, period: Period) -> str:
    """How much longer steps took than they usually take with such tokens."""
    return (
        f"the steps took {seconds(worked.slow_s)} of {seconds(worked.work.seconds)} longer than "
        f"their tokens explain ({source_text(period)}), and nothing that the agent reads shows why"
    )


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
