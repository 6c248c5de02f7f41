"""Rules for the time in the engine's steps: the request's own prefill, then its decoding."""

from agent.analysis.causes.baselines import missing_tokens
from agent.analysis.causes.engine_rules import (
    missed_by_others,
    missed_share,
    missed_text,
    prompts_texts,
    seconds,
    source_text,
)
from agent.analysis.causes.missed_case import Claim, MissedCase
from agent.analysis.verdicts import later_tokens

# A request that got a token in all but this share of the steps was not preempted.
_SAT_OUT_SHARE = 0.05
# Fewer drafts are accepted than usual below this share of the usual.
_FELL = 0.8


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


def prefill_missed_by_others(case: MissedCase, left_s: float) -> Claim | None:
    """Steps computed more tokens of others' prompts, because the prefix cache had fewer of them."""
    return missed_by_others(case, case.prefill, _others_tokens(case) * case.prefill_token_s)


def _others_tokens(case: MissedCase) -> float:
    if case.prefill.source == "plugin":
        return max(0.0, case.prefill.activity.prefill_tokens - case.computed)
    return case.prompts(case.prefill).tokens


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
    return Claim(claimed_s, (f"{text} ({source_text(case.prefill)})", *prompts_texts(prompts)))


def prefill_batch_load(case: MissedCase, left_s: float) -> Claim | None:
    """Steps also generated tokens for many others."""
    done = case.prefill.activity
    if case.prefill.source != "plugin" or not done.batch_s:
        return None
    text = f"{done.running:.0f} other requests generated in the same steps"
    return Claim(done.batch_s, (f"{text} ({source_text(case.prefill)})",))


def preemption(case: MissedCase, left_s: float) -> Claim | None:
    """The request was preempted, because the KV cache was full, and computed again."""
    done = case.decode.activity
    own = None if case.ended is None else case.ended.preemptions
    if own == 0 or (own is None and done.preempted < 1):
        return None
    sat_out = done.steps - later_tokens(case.record)
    if done.steps <= 0 or (own is None and sat_out < _SAT_OUT_SHARE * done.steps):
        return None
    stalled_s = max(0.0, sat_out) / done.steps * case.decode.seconds
    if own:
        text = f"the engine preempted the request {own} times (by its plugin)"
        return Claim(max(stalled_s, case.record.max_gap_s or 0.0) or left_s, (text,))
    text = (
        f"the engine made {done.preempted:.0f} preemptions and {done.steps:.0f} steps, of which "
        f"the request got {later_tokens(case.record):.0f} ({source_text(case.decode)})"
    )
    return Claim(stalled_s, (text,))


def recomputation(case: MissedCase, left_s: float) -> Claim | None:
    """Steps computed the prompts of preempted requests again."""
    done, again = case.decode.activity, _again(case)
    if not again:
        return None
    text = f"{again:,.0f} tokens of {done.preempted:.0f} preempted requests were computed again"
    return Claim(
        done.prefill_s * again / done.prefill_tokens, (f"{text} ({source_text(case.decode)})",)
    )


def _again(case: MissedCase) -> float:
    """The prompt tokens that were computed again after preemptions; 0 if that is unknown."""
    done = case.decode.activity
    if case.decode.source != "plugin" or done.preempted < 1:
        return 0.0
    return max(0.0, done.prefill_tokens - case.prompts(case.decode).tokens)


def decode_missed_by_others(case: MissedCase, left_s: float) -> Claim | None:
    """Steps computed more tokens of others' prompts, because the prefix cache had fewer of them."""
    return missed_by_others(case, case.decode, _prefill_s(case))


def _prefill_s(case: MissedCase) -> float:
    """The time of the others' prompts in the steps of the decoding."""
    period = case.decode
    if period.source == "plugin" and case.timeline.steps_have_tokens:
        return period.activity.prefill_s
    # The plugin reports the tokens of a prompt at its last step: use the seconds of one token.
    tokens = period.activity.prefill_tokens if period.source == "plugin" else 0.0
    tokens = max(tokens, case.prompts(period).tokens)
    claimed_s = period.activity.prefill_s if period.source else 0.0
    return max(claimed_s, tokens * case.prefill_token_s)


def interference(case: MissedCase, left_s: float) -> Claim | None:
    """Steps also computed the prompts of others."""
    done, claimed_s = case.decode.activity, _prefill_s(case)
    if not claimed_s:
        return None
    # The rules before this one claim the rest of the prompts' time.
    share = 1 - missed_share(case, case.decode)
    if again := _again(case):
        share -= again / done.prefill_tokens
    claimed_s *= share
    if claimed_s <= 0:
        return None
    prompts = case.prompts(case.decode)
    # An estimate by tokens may be longer than the decoding.
    took_s, decode_s = min(claimed_s, case.decode.seconds), case.decode.seconds
    text = (
        f"steps with {done.prefill_tokens:,.0f} prompt tokens of others took {seconds(took_s)} of "
        f"the {seconds(decode_s)} of decoding ({source_text(case.decode)})"
    )
    return Claim(claimed_s, (text, *prompts_texts(prompts)))


def decode_batch_load(case: MissedCase, left_s: float) -> Claim | None:
    """Steps generated tokens for many others."""
    done = case.decode.activity
    if not case.decode.source or not done.batch_s:
        return None
    text = (
        f"{done.running:.0f} requests ran, and made the steps {seconds(done.batch_s)} longer than "
        f"those of few requests ({source_text(case.decode)})"
    )
    return Claim(done.batch_s, (text,))


def speculation(case: MissedCase, left_s: float) -> Claim | None:
    """Fewer tokens of the drafts were accepted than usual."""
    now = case.timeline.sampled.accepted_share(case.first_at, case.last_at)
    usual = None if now is None else case.timeline.sampled.usual_accepted_share(case.first_at)
    if now is None or usual is None or now > _FELL * usual:
        return None
    lost = 1 - (1 + now) / (1 + usual)
    text = f"a draft had {now:.2f} accepted tokens, usually {usual:.2f} (by the engine's samples)"
    return Claim(lost * case.decode.seconds, (text,))
