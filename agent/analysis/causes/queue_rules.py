"""Rules for the time in the engine's queue: first those on changes, then those on what held it."""

from agent.analysis.causes.activity import Activity
from agent.analysis.causes.engine_rules import (
    ALL_QUEUE_SHARE,
    cold,
    core_waited,
    gpu_slowed,
    in_queue,
    lost_prompts,
    prompts_texts,
    seconds,
    source_text,
)
from agent.analysis.causes.missed_case import Claim, MissedCase
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
# A queue that is seen for less than this share of the wait explains nothing.
SEEN_SHARE = 0.1


def cold_start(case: MissedCase, left_s: float) -> Claim | None:
    """The engine had just started when the queue began, and its first steps are slow."""
    claim = cold(case, left_s, case.backlog.start, "queue began")
    if claim is None or case.timeline.alone_s() is None or not _slow(case.backlog.activity):
        return None
    return None if _lacks_capacity(case) else claim


def cpu_starved(case: MissedCase, left_s: float) -> Claim | None:
    """The core had no processor while the queue grew."""
    claim = core_waited(case, case.backlog)
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


def cache_miss(case: MissedCase, left_s: float) -> Claim | None:
    """The prefix cache served less than usual, so the engine computes more."""
    if not _prefills(case.backlog.activity):
        return None
    lost = lost_prompts(case, case.backlog)
    return None if lost is None else Claim(left_s, (lost.text,))


def long_prompts_came(case: MissedCase, left_s: float) -> Claim | None:
    """More prompt tokens came than usual, and in longer prompts."""
    change = case.change
    if change is None or not _prefills(case.backlog.activity) or not _longer(change):
        return None
    if change.prefill_tokens < SURGE * max(1.0, change.usual_prefill_tokens):
        return None
    return Claim(
        left_s,
        (
            f"{change.prefill_tokens:,.0f} prompt tokens were computed in "
            f"{seconds(change.seconds)}, and {change.usual_prefill_tokens:,.0f} usually are in "
            "that time (by the engine's samples)",
            *prompts_texts(case.prompts(case.backlog)),
        ),
    )


def slow_steps(case: MissedCase, left_s: float) -> Claim | None:
    """Steps were slow for no known reason, so requests piled up and filled the engine."""
    done = case.backlog.activity
    if not _slow(done) or not case.prefill_token_s or case.timeline.alone_s() is None:
        return None
    known, by_steps = (cold_start, cpu_starved, gpu_throttled), case.backlog.source == "plugin"
    if _lacks_capacity(case) or any(rule(case, left_s) for rule in known):
        return None
    if by_steps and _uncounted_prompts_s(case) >= PREFILL_SHARE * done.residual_s:
        return None
    text = (
        f"the steps took {seconds(done.residual_s)} of {seconds(done.busy_s)} longer than their "
        f"tokens explain ({source_text(case.backlog)}), and neither processor nor GPU shows why"
    )
    share = done.residual_s / done.busy_s
    return Claim(left_s * min(1.0, share / ALL_QUEUE_SHARE), (text,))


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


def step_under_way(case: MissedCase, left_s: float) -> Claim | None:
    """The steps while the request waited were busy with prompts of others."""
    prompts = case.prompts(case.queue)
    claimed_s = prompts.tokens * case.prefill_token_s
    if case.queue.source == "plugin":
        claimed_s = max(claimed_s, case.queue.activity.prefill_s)
    if claimed_s < PREFILL_SHARE * left_s:
        return None
    text = (
        f"prompts of others took {seconds(min(claimed_s, left_s))} of the steps while the request "
        f"waited ({source_text(case.queue)})"
    )
    return Claim(claimed_s, (text, *prompts_texts(prompts)))


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


def _uncounted_prompts_s(case: MissedCase) -> float:
    """Seconds of others' prompts in steps of the plugin that do not count their tokens.

    The engine counts the tokens of a prompt in the last of its steps, so the steps before look slow
    for no reason. Between two samples, in contrast, lie all steps of most prompts.
    """
    taken_s = case.prompts(case.backlog).tokens * case.prefill_token_s
    return taken_s - case.backlog.activity.prefill_s


def _surges(change: Change) -> bool:
    usual = change.usual_arrivals
    beyond_chance = change.arrivals - usual >= _DEVIATIONS * max(1.0, usual) ** 0.5
    return change.arrivals >= SURGE * usual and beyond_chance


def _longer(change: Change) -> bool:
    usual = change.usual_prefill_tokens
    return change.prefill_tokens * change.usual_arrivals >= _LONGER * usual * change.arrivals


def _prefills(done: Activity) -> bool:
    return done.prefill_s >= PREFILL_SHARE * done.busy_s > 0


def _slow(done: Activity) -> bool:
    """Whether steps took longer than their tokens explain."""
    return done.residual_s >= PREFILL_SHARE * done.busy_s > 0


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
        f"{done.running:.0f} requests ran"
    )
    return Claim(left_s * share, (evidence,))
