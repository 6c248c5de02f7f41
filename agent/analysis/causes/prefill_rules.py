"""Rules for the time of the request's own prefill."""

from agent.analysis.causes.engine_rules import cold, core_waited, gpu_slowed
from agent.analysis.causes.evidence import by, missed_text, prompts_text, seconds
from agent.analysis.causes.missed_case import Claim, MissedCase

# A cache that usually has less of a prompt is worth little.
USUAL_HITS = 0.2
# The request missed at least this part of what the cache usually has of such prompts.
_MISSED_SHARE = 0.3


def cache_miss(case: MissedCase, left_s: float) -> Claim | None:
    """The prefix cache did not have what it usually has of such a prompt."""
    record, share = case.record, case.usual.cached_share
    if record.cached_tokens is None or record.input_tokens is None:
        missed = case.timeline.missed_hits(case.scheduled_at, case.first_at)
        if missed is None:
            return None
        return Claim(left_s, (missed_text(missed), "the request's own cached tokens are unknown"))
    if share is None or share < USUAL_HITS:
        return None
    missing = share * record.input_tokens - record.cached_tokens
    if missing < _MISSED_SHARE * share * record.input_tokens:
        return None
    text = (
        f"the prefix cache had {record.cached_tokens:,} of {record.input_tokens:,} prompt tokens, "
        f"usually {share:.0%} of such a prompt"
    )
    return Claim(missing * case.prefill_token_s, (text,))


def cache_missed_by_others(case: MissedCase, left_s: float) -> Claim | None:
    """Steps computed more of the others' prompts, as the prefix cache had less of them."""
    missed = case.timeline.missed_hits(case.scheduled_at, case.first_at)
    if missed is None:
        return None
    claimed_s = missed.share * _others_tokens(case) * case.prefill_token_s
    return Claim(claimed_s, (missed_text(missed),))


def _others_tokens(case: MissedCase) -> float:
    if case.prefill.source == "plugin":
        return max(0.0, case.prefill.activity.prefill_tokens - case.computed)
    return case.prompts(case.prefill).tokens


def contention(case: MissedCase, left_s: float) -> Claim | None:
    """Steps also computed the prompts of others."""
    prompts, tokens = case.prompts(case.prefill), _others_tokens(case)
    claimed_s = tokens * case.prefill_token_s
    if not claimed_s:
        return None
    text = (
        f"{tokens:,.0f} prompt tokens of others at {seconds(1000 * case.prefill_token_s)} a 1,000"
    )
    return Claim(claimed_s, (f"{text} ({by(case.prefill)})", prompts_text(prompts)))


def batch_load(case: MissedCase, left_s: float) -> Claim | None:
    """Steps also generated tokens for many others."""
    done = case.prefill.activity
    if case.prefill.source != "plugin" or not done.batch_s:
        return None
    text = f"{done.running:.0f} other requests generated in the same steps ({by(case.prefill)})"
    return Claim(done.batch_s, (text,))


def gpu_throttled(case: MissedCase, left_s: float) -> Claim | None:
    """The GPU was throttled."""
    return gpu_slowed(case, (case.scheduled_at, case.first_at))


def cpu_starved(case: MissedCase, left_s: float) -> Claim | None:
    """The core had no processor."""
    return core_waited(case, (case.scheduled_at, case.first_at))


def cold_start(case: MissedCase, left_s: float) -> Claim | None:
    """The engine had just started."""
    return cold(case, left_s)
