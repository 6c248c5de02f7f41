"""Rules that hold in several phases: the processor, the GPU and the start of an engine."""

from agent.analysis.causes.evidence import seconds
from agent.analysis.causes.missed_case import Claim, MissedCase
from agent.analysis.causes.periods import Period

# An engine whose core waits this share of the time for a processor is short of it. Others take a
# processor now and then on any machine.
STARVED_SHARE = 0.15
# A GPU that throttling slows by less is not the cause.
THROTTLED_SHARE = 0.05
# An engine compiles and fills its caches with its first requests.
COLD_S = 60.0


def core_waited(period: Period, left_s: float) -> Claim | None:
    """The core waited for a processor for a part of the period."""
    waited_s = period.core_wait_s
    if waited_s is None or waited_s < STARVED_SHARE * period.seconds:
        return None
    return Claim(
        min(left_s, waited_s),
        (
            f"the engine's core was ready to run and had no processor for {seconds(waited_s)} "
            f"of {seconds(period.seconds)} (the kernel's run delay)",
        ),
    )


def front_waited(period: Period, left_s: float) -> Claim | None:
    """The process that takes requests waited for a processor for a part of the period."""
    waited_s = period.front_wait_s
    if waited_s is None or waited_s < STARVED_SHARE * period.seconds:
        return None
    return Claim(
        min(left_s, waited_s),
        (
            f"the engine's front was ready to run and had no processor for {seconds(waited_s)} "
            f"of {seconds(period.seconds)} (the kernel's run delay)",
        ),
    )


def gpu_slowed(period: Period, left_s: float) -> Claim | None:
    """A throttled GPU was slower than it usually is."""
    slow_s = period.gpu_slow_s
    if slow_s is None or slow_s < THROTTLED_SHARE * period.seconds:
        return None
    return Claim(
        min(left_s, slow_s),
        (
            f"a throttled GPU lost {seconds(slow_s)} of {seconds(period.seconds)} against its "
            "usual clock (by its clock and its throttle reasons)",
        ),
    )


def all_of(claim: Claim | None, left_s: float) -> Claim | None:
    """The claim on all that is left: in a queue, what slows the engine delays everything."""
    return None if claim is None else claim._replace(seconds=left_s)


def cold(case: MissedCase, left_s: float) -> Claim | None:
    """The engine had just started."""
    ready_at = case.timeline.ready_at
    if ready_at is None or not -COLD_S <= case.arrived_at - ready_at <= COLD_S:
        return None
    since_s = case.arrived_at - ready_at
    text = f"{seconds(since_s)} after" if since_s >= 0 else f"{seconds(-since_s)} before"
    return Claim(left_s, (f"the request came {text} the engine's first sample since its start",))
