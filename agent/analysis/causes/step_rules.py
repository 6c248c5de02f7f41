"""Rules for the time in the engine's steps: the request's own prefill, then its decoding."""

from agent.analysis.causes.baselines import missing_tokens
from agent.analysis.causes.engine_rules import (
    core_waited,
    gpu_slowed,
    held_text,
    missed_by_others,
    missed_share,
    missed_text,
    period_prompts_texts,
    requests_text,
    seconds,
    slow_text,
    source_text,
    stalled,
)
from agent.analysis.causes.missed_case import Claim, Hold, MissedCase, Worked
from agent.analysis.causes.periods import Period
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
    if not missing or not case.cache_lost:
        return None
    text = (
        f"the prefix cache had {record.cached_tokens:,} of {record.input_tokens:,} prompt tokens, "
        f"usually {share:.0%} of such a prompt"
    )
    return Claim(missing * case.prefill_token_s, (text,))


def prefill_missed_by_others(case: MissedCase, left_s: float) -> Claim | None:
    """Steps computed more tokens of others' prompts, because the prefix cache had fewer of them."""
    return missed_by_others(case, case.prefill, _others_s(case, case.prefill, case.prefill_work))


def _others_s(case: MissedCase, period: Period, worked: Worked | None) -> float:
    """The time of others' prompts in the steps of a period; 0 if that is unknown."""
    if worked is not None:
        return worked.others_tokens * worked.prompt_token_s
    return case.prompts(period).tokens * case.prefill_token_s


def more_contention(case: MissedCase, left_s: float) -> Claim | None:
    """Steps also computed more prompts of others than usual."""
    return _of_prompts(case, case.prefill, case.prefill_work, more=True)


def contention(case: MissedCase, left_s: float) -> Claim | None:
    """Steps also computed the prompts of others."""
    return _of_prompts(case, case.prefill, case.prefill_work)


def _of_prompts(
    case: MissedCase, period: Period, worked: Worked | None, again: float = 0.0, more: bool = False
) -> Claim | None:
    """A claim on the time of prompts of others; with `more` on the tokens beyond the usual."""
    if worked is None:
        tokens, token_s = float(case.prompts(period).tokens), case.prefill_token_s
    else:
        tokens, token_s = worked.others_tokens, worked.prompt_token_s
    if tokens * token_s <= 0:
        return None
    claimed = tokens * (1 - missed_share(case, period)) - again
    hold = None
    if more:
        claimed, hold = case.more_prompts(period, claimed)
    if claimed <= 0:
        return None
    # An estimate by tokens may be longer than the period.
    took_s = min(claimed * token_s, period.seconds)
    beyond = " beyond the usual" if more else ""
    text = (
        f"{claimed:,.0f} prompt tokens of others{beyond} took {seconds(took_s)} of "
        f"{seconds(period.seconds)}, at {seconds(1000 * token_s)} a 1,000 ({source_text(period)})"
    )
    return _held(Claim(claimed * token_s, (text, *period_prompts_texts(case, period))), hold)


def _held(claim: Claim, hold: Hold | None) -> Claim:
    """The claim, on what had held the requests before."""
    if hold is None:
        return claim
    return Claim(claim.seconds, (*claim.evidence, held_text(hold)), hold.cause)


def prefill_more_load(case: MissedCase, left_s: float) -> Claim | None:
    """Steps also generated more tokens for others than usual."""
    return _of_batch(case, case.prefill, case.prefill_work, more=True)


def prefill_batch_load(case: MissedCase, left_s: float) -> Claim | None:
    """Steps also generated tokens for others."""
    return _of_batch(case, case.prefill, case.prefill_work)


def _of_batch(
    case: MissedCase, period: Period, worked: Worked | None, more: bool = False
) -> Claim | None:
    """A claim on the time of tokens generated for others; with `more` on those beyond the usual."""
    if worked is None or not worked.costs.token_s:
        return None
    generated = worked.work.tokens
    tokens = generated - (worked.work.steps if period is case.decode else 0.0)
    hold = None
    if more:
        tokens, hold = case.more_generated(period, generated)
    claimed_s = tokens * worked.costs.token_s
    if claimed_s <= 0:
        return None
    beyond = "more than usual" if more else "longer than those of one request"
    text = (
        f"{requests_text(period.activity.running)} ran, and made the steps {seconds(claimed_s)} "
        f"{beyond} ({source_text(period)})"
    )
    return _held(Claim(claimed_s, (text,)), hold)


def prefill_stalled(case: MissedCase, left_s: float) -> Claim | None:
    """A single step of the prefill took many times as long as its tokens need."""
    return stalled(case, case.prefill.start, case.prefill.end)


def prefill_slow(case: MissedCase, left_s: float) -> Claim | None:
    """The steps of the prefill were slow for no known reason."""
    return _slow(case, case.prefill, case.prefill_work)


def _slow(case: MissedCase, period: Period, worked: Worked | None) -> Claim | None:
    if worked is None or not worked.slow_s:
        return None
    slow_s = worked.slow_s - _seen_s(case, period, worked)
    return Claim(slow_s, (slow_text(worked, period),)) if slow_s > 0 else None


def _seen_s(case: MissedCase, period: Period, worked: Worked) -> float:
    """The seconds by which steps were slow for reasons that are seen."""
    if not case.signs:
        return 0.0
    seen = [
        gpu_slowed(case, period),
        core_waited(case, period, worked),
        stalled(case, period.start, period.end),
    ]
    if period is case.decode and period.source != "plugin":
        seen.append(speculation(case, 0.0))
    return sum(claim.seconds for claim in seen if claim is not None)


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
    done, again, worked = case.decode.activity, _again(case), case.decode_work
    if not again or worked is None:
        return None
    text = f"{again:,.0f} tokens of {done.preempted:.0f} preempted requests were computed again"
    return Claim(again * worked.prompt_token_s, (f"{text} ({source_text(case.decode)})",))


def _again(case: MissedCase) -> float:
    """The prompt tokens that were computed again after preemptions; 0 if that is unknown."""
    done = case.decode.activity
    if case.decode.source != "plugin" or done.preempted < 1:
        return 0.0
    if not case.timeline.steps_have_tokens:
        return 0.0
    prompts = case.prompts(case.decode)
    longest = max(map(int, prompts.sizes), default=0)
    return max(0.0, min(done.prefill_tokens - prompts.tokens, done.preempted * longest))


def decode_missed_by_others(case: MissedCase, left_s: float) -> Claim | None:
    """Steps computed more tokens of others' prompts, because the prefix cache had fewer of them."""
    return missed_by_others(case, case.decode, _others_s(case, case.decode, case.decode_work))


def more_interference(case: MissedCase, left_s: float) -> Claim | None:
    """Steps also computed more prompts of others than usual."""
    return _of_prompts(case, case.decode, case.decode_work, _again(case), more=True)


def interference(case: MissedCase, left_s: float) -> Claim | None:
    """Steps also computed the prompts of others."""
    return _of_prompts(case, case.decode, case.decode_work, _again(case))


def decode_more_load(case: MissedCase, left_s: float) -> Claim | None:
    """Steps generated tokens for more others than usual."""
    return _of_batch(case, case.decode, case.decode_work, more=True)


def decode_batch_load(case: MissedCase, left_s: float) -> Claim | None:
    """Steps generated tokens for others."""
    return _of_batch(case, case.decode, case.decode_work)


def decode_stalled(case: MissedCase, left_s: float) -> Claim | None:
    """A single step of the decoding took many times as long as its tokens need."""
    return stalled(case, case.decode.start, case.decode.end)


def decode_slow(case: MissedCase, left_s: float) -> Claim | None:
    """The steps of the decoding were slow for no known reason."""
    return _slow(case, case.decode, case.decode_work)


def speculation(case: MissedCase, left_s: float) -> Claim | None:
    """Fewer tokens of the drafts were accepted than usual."""
    now = case.timeline.sampled.accepted_share(case.first_at, case.last_at)
    usual = None if now is None else case.timeline.sampled.usual_accepted_share(case.first_at)
    if now is None or usual is None or now > _FELL * usual:
        return None
    lost = 1 - (1 + now) / (1 + usual)
    text = f"a draft had {now:.2f} accepted tokens, usually {usual:.2f} (by the engine's samples)"
    return Claim(lost * case.decode.seconds, (text,))
