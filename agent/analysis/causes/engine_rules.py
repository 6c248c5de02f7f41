"""Rules that hold in several phases: the processor, the GPU and the start of an engine."""

from agent.analysis.causes.evidence import seconds
from agent.analysis.causes.missed_case import Claim, MissedCase

# An engine whose core waits this share of the time for a processor is short of it. Others take a
# processor now and then on any machine.
STARVED_SHARE = 0.15
# A GPU that throttling slows by less is not the cause.
THROTTLED_SHARE = 0.05
# An engine whose GPU loses this share of its time grows a queue by that alone.
ALL_QUEUE_SHARE = 0.5
# An engine compiles and fills its caches with its first requests.
COLD_S = 30.0

Span = tuple[float, float]
_CORE, _FRONT = 0, 1


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
    return claim._replace(seconds=min(claim.seconds, slow_s)) if enough else None


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


def in_queue(claim: Claim, case: MissedCase, left_s: float, all_at: float) -> Claim:
    """The claim on a queue, of which it has all from this share of lost time on."""
    lost_share = claim.seconds / case.backlog.seconds
    return claim._replace(seconds=left_s * min(1.0, lost_share / all_at))


def cold(case: MissedCase, left_s: float) -> Claim | None:
    """The engine had just started."""
    ready_at = case.timeline.ready_at
    if ready_at is None or not -COLD_S <= case.arrived_at - ready_at <= COLD_S:
        return None
    since_s = case.arrived_at - ready_at
    text = f"{seconds(since_s)} after" if since_s >= 0 else f"{seconds(-since_s)} before"
    return Claim(left_s, (f"the request came {text} the engine's first sample since its start",))
