"""Rules for the time of the request's own prefill."""

from agent.analysis.causes.baselines import missing_tokens
from agent.analysis.causes.engine_rules import (
    core_waited,
    gpu_slowed,
    missed_by_others,
    missed_share,
    request_cold,
)
from agent.analysis.causes.evidence import missed_text, prompts_text, seconds, source_text
from agent.analysis.causes.missed_case import Claim, MissedCase


def cache_miss(case: MissedCase, left_s: float) -> Claim | None:
    """The prefix cache had fewer tokens of the prompt than it usually has of such a prompt."""
    record, share = case.record, case.usual.cached_share
    if record.cached_tokens is None or record.input_tokens is None:
        missed = case.missed_hits(case.prefill)
        if missed is None:
            return None
        return Claim(left_s, (missed_text(missed), "the request's own cached tokens are unknown"))
    if share is None:
        return None
    missing = missing_tokens(record.input_tokens, record.cached_tokens, share)
    if not missing:
        return None
    text = (
        f"the prefix cache had {record.cached_tokens:,} of {record.input_tokens:,} prompt tokens, "
        f"usually {share:.0%} of such a prompt"
    )
    return Claim(missing * case.prefill_token_s, (text,))


def cache_missed_by_others(case: MissedCase, left_s: float) -> Claim | None:
    """Steps computed more tokens of others' prompts, because the prefix cache had fewer of them."""
    return missed_by_others(case, case.prefill, _others_s)


def _others_tokens(case: MissedCase) -> float:
    if case.prefill.source == "plugin":
        return max(0.0, case.prefill.activity.prefill_tokens - case.computed)
    return case.prompts(case.prefill).tokens


def _others_s(case: MissedCase) -> float:
    return _others_tokens(case) * case.prefill_token_s


def contention(case: MissedCase, left_s: float) -> Claim | None:
    """Steps also computed the prompts of others."""
    prompts = case.prompts(case.prefill)
    tokens = _others_tokens(case) * (1 - missed_share(case, case.prefill))
    claimed_s = tokens * case.prefill_token_s
    if not claimed_s:
        return None
    text = (
        f"{tokens:,.0f} prompt tokens of others at {seconds(1000 * case.prefill_token_s)} a 1,000"
    )
    return Claim(claimed_s, (f"{text} ({source_text(case.prefill)})", prompts_text(prompts)))


def batch_load(case: MissedCase, left_s: float) -> Claim | None:
    """Steps also generated tokens for many others."""
    done = case.prefill.activity
    if case.prefill.source != "plugin" or not done.batch_s:
        return None
    text = f"{done.running:.0f} other requests generated in the same steps"
    return Claim(done.batch_s, (f"{text} ({source_text(case.prefill)})",))


def gpu_throttled(case: MissedCase, left_s: float) -> Claim | None:
    """The GPU was throttled."""
    return gpu_slowed(case, (case.scheduled_at, case.first_at))


def cpu_starved(case: MissedCase, left_s: float) -> Claim | None:
    """The core had no processor."""
    return core_waited(case, (case.scheduled_at, case.first_at))


def cold_start(case: MissedCase, left_s: float) -> Claim | None:
    """The engine had just started."""
    return request_cold(case, left_s)
