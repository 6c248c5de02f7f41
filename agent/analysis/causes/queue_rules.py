"""Rules for the time in the engine's queue: first those on changes, then those on what held it."""

from agent.analysis.causes.engine_rules import (
    ALL_QUEUE_SHARE,
    cold,
    core_waited,
    gpu_slowed,
    held_text,
    in_queue,
    lost_prompts,
    missed_share,
    period_prompts_texts,
    requests_text,
    seconds,
    slow_text,
    source_text,
    stalled,
)
from agent.analysis.causes.missed_case import STALL_BEFORE_S, Claim, MissedCase
from agent.analysis.causes.periods import Change

# Twice as much as usual, and more than chance: four standard deviations of a Poisson process.
SURGE = 2.0
_DEVIATIONS = 4.0
_FEWEST_ARRIVALS = 5.0
# From this multiple of the usual tokens per request on, prompts are longer than usual.
_LONGER = 1.25
# A queue does not wait for prompts that take less than this share of the engine's time.
PREFILL_SHARE = 0.3
# From this multiple of the usual number on, more requests run than usual.
CROWDED = 1.5
# From this share on, it is most of the time with a queue.
_MOST_OF = 0.5
# A request that waits for more steps than this waits for others that piled up.
_PILED_UP_STEPS = 10.0
# A queue that is seen for less than this share of the wait explains nothing.
SEEN_SHARE = 0.1


def cold_start(case: MissedCase, left_s: float) -> Claim | None:
    """The engine had just started when the queue began, and its first steps are slow."""
    claim = cold(case, left_s, case.backlog.start, "queue began")
    if claim is None or _slow_share(case) < PREFILL_SHARE:
        return None
    return None if _lacks_capacity(case) else claim


def cpu_starved(case: MissedCase, left_s: float) -> Claim | None:
    """The core had no processor while the queue grew."""
    claim = core_waited(case, case.backlog, case.backlog_work)
    if claim is None or _lacks_capacity(case):
        return None
    # The requests ahead take longer by the lost time only: most of their work was there anyway.
    return in_queue(claim, case, left_s, all_at=1.0)


def gpu_throttled(case: MissedCase, left_s: float) -> Claim | None:
    """The GPU was throttled while the queue grew."""
    claim = gpu_slowed(case, case.backlog)
    if claim is None or _lacks_capacity(case):
        return None
    return in_queue(claim, case, left_s, all_at=ALL_QUEUE_SHARE)


def deferred(case: MissedCase, left_s: float) -> Claim | None:
    """The engine deferred requests: each waits for something of its own, such as a transfer."""
    return _held(case, left_s, case.backlog.activity.deferred_s, "requests were deferred")


def burst(case: MissedCase, left_s: float) -> Claim | None:
    """More requests came than usual."""
    change = case.change
    if change is None or change.arrivals < _FEWEST_ARRIVALS or not _surges(change):
        return None
    return Claim(
        left_s,
        (
            f"{change.arrivals:.0f} requests came in {seconds(change.seconds)}, and "
            f"{change.usual_arrivals:.1f} usually do in that time (by the engine's samples)",
        ),
    )


def kv_pressure_in_burst(case: MissedCase, left_s: float) -> Claim | None:
    """More requests came than usual, and more KV cache would have taken them."""
    return kv_pressure(case, left_s) if burst(case, left_s) else None


def sequence_cap_in_burst(case: MissedCase, left_s: float) -> Claim | None:
    """More requests came than usual, and more slots of the batch would have taken them."""
    return sequence_cap(case, left_s) if burst(case, left_s) else None


def cache_miss(case: MissedCase, left_s: float) -> Claim | None:
    """The prefix cache served less than usual, so the engine computes more."""
    if not _prefills(case):
        return None
    lost = lost_prompts(case, case.backlog)
    return None if lost is None else Claim(left_s, (lost.text,))


def long_prompts_came(case: MissedCase, left_s: float) -> Claim | None:
    """More prompt tokens came than usual, and in longer prompts."""
    change = case.change
    if change is None or not _prefills(case) or not _longer(change):
        return None
    # What the prefix cache lost does not come in longer prompts.
    came = change.prefill_tokens * (1 - missed_share(case, case.backlog))
    if came < SURGE * max(1.0, change.usual_prefill_tokens):
        return None
    return Claim(
        left_s,
        (
            f"{change.prefill_tokens:,.0f} prompt tokens were computed in "
            f"{seconds(change.seconds)}, and {change.usual_prefill_tokens:,.0f} usually are in "
            "that time (by the engine's samples)",
            *period_prompts_texts(case, case.backlog),
        ),
    )


def stall(case: MissedCase, left_s: float) -> Claim | None:
    """A single step held all that waited."""
    start = min(case.backlog.start, case.queued_at - STALL_BEFORE_S)
    return stalled(case, start, case.scheduled_at)


def slow_steps(case: MissedCase, left_s: float) -> Claim | None:
    """Steps were slow for no known reason, so requests piled up and filled the engine."""
    share, worked = _slow_share(case), case.backlog_work
    if not share or worked is None or _lacks_capacity(case):
        return None
    step_s = worked.work.seconds / max(1.0, worked.work.steps)
    # Requests that wait for a few steps wait as much longer as these take longer.
    piled_up = left_s > _PILED_UP_STEPS * step_s
    return Claim(left_s * (1.0 if piled_up else share), (slow_text(worked, case.backlog),))


def kv_pressure(case: MissedCase, left_s: float) -> Claim | None:
    """The KV cache was full."""
    return _held(case, left_s, case.backlog.activity.kv_full_s, "the KV cache was full")


def sequence_cap(case: MissedCase, left_s: float) -> Claim | None:
    """All slots of the batch were taken."""
    slots = case.timeline.limits.running
    text = "all places of the batch were taken"
    if slots is not None:
        text = f"all {slots:.0f} places of the batch were taken"
    return _held(case, left_s, case.backlog.activity.at_cap_s, text)


def prefill_backlog(case: MissedCase, left_s: float) -> Claim | None:
    """Steps were at their limit of prompt tokens."""
    held_s = case.backlog.activity.budget_full_s
    return _held(case, left_s, held_s, "steps were full of prompt tokens")


def long_step_under_way(case: MissedCase, left_s: float) -> Claim | None:
    """The steps while the request waited were busy with more prompts of others than usual.

    Not where it waited for room longer than these prompts took.
    """
    waited_for, done = _waited_for(case), case.backlog.activity
    took_s = waited_for * case.prefill_token_s
    room_s = done.kv_full_s + done.at_cap_s
    if took_s < PREFILL_SHARE * left_s or took_s * done.waits_s < room_s * left_s:
        return None
    tokens, hold = case.more_prompts(case.queue, waited_for)
    claim = _under_way(case, left_s, tokens)
    if claim is None or hold is None:
        return claim
    return Claim(claim.seconds, (*claim.evidence, held_text(hold)), hold.cause)


def step_under_way(case: MissedCase, left_s: float) -> Claim | None:
    """The steps while the request waited were busy with prompts of others."""
    return _under_way(case, left_s, _waited_for(case))


def _waited_for(case: MissedCase) -> float:
    """The prompt tokens of others in the steps while the request waited."""
    tokens = float(case.prompts(case.queue).tokens)
    if case.queue.source == "plugin":
        tokens = max(tokens, case.queue.activity.prefill_tokens)
    return tokens


def _under_way(case: MissedCase, left_s: float, tokens: float) -> Claim | None:
    claimed_s = tokens * case.prefill_token_s
    if claimed_s < PREFILL_SHARE * left_s:
        return None
    text = (
        f"prompts of others took {seconds(min(claimed_s, left_s))} of the steps while the request "
        f"waited ({source_text(case.queue)})"
    )
    return Claim(claimed_s, (text, *period_prompts_texts(case, case.queue)))


def _lacks_capacity(case: MissedCase) -> bool:
    """Whether memory or the limit of requests held the queue, with no more running than usual.

    A slow engine also fills its memory and its slots, but then more requests run than usual. Only
    the time with a queue counts.
    """
    change, done = case.change, case.backlog.activity
    held = ((done.kv_full_s, done.kv_running_s), (done.at_cap_s, done.cap_running_s))
    short_s = sum(
        held_s
        for held_s, running_s in held
        if change is None or running_s <= CROWDED * change.usual_running * held_s
    )
    return short_s >= _MOST_OF * done.waits_s > 0


def _surges(change: Change) -> bool:
    usual = change.usual_arrivals
    beyond_chance = change.arrivals - usual >= _DEVIATIONS * max(1.0, usual) ** 0.5
    return change.arrivals >= SURGE * usual and beyond_chance


def _longer(change: Change) -> bool:
    usual = change.usual_prefill_tokens
    return change.prefill_tokens * change.usual_arrivals >= _LONGER * usual * change.arrivals


def _prefills(case: MissedCase) -> bool:
    """Whether prompts take much of the engine's time."""
    worked, done = case.backlog_work, case.backlog.activity
    if worked is None:
        return done.prefill_tokens * case.prefill_token_s >= PREFILL_SHARE * done.seconds > 0
    return worked.prompts_s >= PREFILL_SHARE * worked.work.seconds > 0


def _slow_share(case: MissedCase) -> float:
    """The share of the steps' time that their tokens do not explain; 0 if that is little."""
    worked = case.backlog_work
    return worked.slow_s / worked.work.seconds if worked is not None and worked.slow_s else 0.0


def _held(case: MissedCase, left_s: float, held_s: float, text: str) -> Claim | None:
    """A claim on the share of the time with a queue in which one thing held the queue.

    The time counts from the begin of the queue, because the requests ahead waited, too.
    """
    done = case.backlog.activity
    if held_s <= 0 or done.waits_s < SEEN_SHARE * (case.scheduled_at - case.queued_at):
        return None
    share = held_s / done.waits_s
    evidence = (
        f"{text} for {share:.0%} of the time with a queue ({source_text(case.backlog)}): "
        f"{requests_text(done.running)} ran"
    )
    return Claim(left_s * share, (evidence,))
