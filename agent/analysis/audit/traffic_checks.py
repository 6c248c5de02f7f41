"""Checks of the engine's limits against its traffic."""

import json
from collections.abc import Sequence
from functools import partial
from math import ceil, inf
from statistics import median

from agent.analysis.audit.checks import (
    AuditCheck,
    CheckResult,
    by_label,
    cache_capacity,
    failed,
    finished,
    flag,
    flags_are_known,
    highest_bound,
    limit_given,
    max_length,
    max_running,
    mean_input,
    mean_length,
    passed,
    ranks,
    share,
    total_of,
    unknown,
    value_of,
    warned,
    without_exposition,
    without_flags,
)
from agent.analysis.histogram_bounds import Bounds, quantile_bounds
from agent.catalog import engine_facts as fact
from agent.catalog.definitions import DEEP_QUEUE
from agent.catalog.engine_flags import DEFAULT_RUNNING, DEFAULT_STEP_TOKENS
from agent.catalog.time_units import MINUTE_S
from agent.records.audit import AuditEvidence, EvidencePart, LoadHistory

_CHECK = partial(AuditCheck, "Traffic")

_RARE = 0.01
# A mean this near to the limit means that most requests reach it.
_NEAR_LIMIT = 0.9
# Steps after which a batch that was never fuller is not chance, and by how much it must be less.
_ENOUGH_STEPS, _FAR_BELOW = 1000, 4
# Drafts of 3 to 5 tokens pay with most models. Longer ones are mostly rejected; shorter ones, if
# nearly all are accepted, leave steps to save.
_LEAST_DRAFT, _MOST_DRAFT = 3, 5
_POOR_ACCEPTANCE, _HIGH_ACCEPTANCE = 0.5, 0.8
_LENGTH = "length"
_VLLM = "vllm"
_FIND_REFUSALS = "read the engine's log; for prompts that are too long raise --max-model-len"
_LESS_QUEUE = "add a replica, or raise --max-num-seqs if the KV cache has room"
# Minutes with samples that count as the whole hour: the newest one is not over.
_WHOLE_HOUR = 58
# A mean batch this near to the limit was full most of the time. Under the other share of the KV
# cache there is room for more requests.
_USUALLY_FULL, _ROOMY_CACHE = 0.9, 0.5
# Half of what vLLM chooses for the smallest engine.
_SMALL_BATCH = 64
# Each step reads all weights, which takes a GPU as long as to compute this many tokens at most:
# 16-bit products a second by bytes a second, over all GPUs of hardware.toml.
SMALLEST_STEP = 512
# If at least this many clients, and half of those that left, left after the same time, then they
# have a time-out: clients that change their mind leave at any time. A time-out is seconds long, and
# differs only by the time on the way to the engine.
_FEWEST_TOGETHER = 5
_SHORTEST_TIME_OUT_S = 1.0
_SAME_SHARE, _SAME_S = 1.02, 0.1


def longest_requests(evidence: AuditEvidence) -> CheckResult:
    """Whether requests end because they reach --max-model-len."""
    limit = max_length(evidence)
    if limit is None:
        nowhere = "/v1/models does not name max_model_len, and no flag is visible"
        return unknown(evidence.unread.get(EvidencePart.MODELS, nowhere))
    if evidence.agent is not None and evidence.agent.lengths:
        return _by_rows(evidence.agent.lengths, limit)
    if evidence.engine.sample is None:
        return unknown(f"{limit} tokens; {without_exposition(evidence)}")
    if not finished(evidence):
        return unknown(f"{limit} tokens; no request has finished since the engine's start")
    return _by_histograms(evidence, limit)


def _by_rows(lengths: tuple[tuple[int, int], ...], limit: int) -> CheckResult:
    totals = [given + made for given, made in lengths]
    reached = sum(total >= limit for total in totals)
    seen = f"{limit} tokens; the longest of {len(totals)} requests had {max(totals)}"
    if not reached:
        return passed(seen)
    seen += f", {share(reached, len(totals))} reached it"
    return _too_short(seen, limit, rare=reached / len(totals) < _RARE)


def _by_histograms(evidence: AuditEvidence, limit: int) -> CheckResult:
    """Without the length of each request: by finish reasons, bounds and the mean."""
    ended = finished(evidence)
    cut = by_label(evidence, fact.REQUESTS_FINISHED).get(_LENGTH)
    if cut is None:
        return unknown("the exposition does not say why requests ended")
    mean = mean_length(evidence)
    seen = f"{limit} tokens" if mean is None else f"{limit} tokens; requests have {mean:,.0f}"
    engine = evidence.engine
    bounds = [highest_bound(each) for each in (engine.input_lengths, engine.output_lengths)]
    longest = None if None in bounds else sum(bound for bound in bounds if bound is not None)
    if not cut or (longest is not None and longest < limit):
        return passed(f"{seen}, none reached it")
    seen += f", {share(cut, ended)} ended by a length"
    if mean is not None and mean >= _NEAR_LIMIT * limit:
        return _too_short(seen, limit, rare=False)
    return unknown(
        f"{seen}; whether by --max-model-len or by the client's max_tokens is not known",
        "give --agent, whose rows have the length of each request",
    )


def _too_short(seen: str, limit: int, *, rare: bool) -> CheckResult:
    change = f"raise --max-model-len above {limit}, as far as the model and the KV cache allow"
    return warned(seen, change) if rare else failed(seen, change)


def refused_requests(evidence: AuditEvidence) -> CheckResult:
    """How many requests for text got a 4xx, a 503 at the admission, or another 5xx."""
    sample, answered = evidence.engine.sample, evidence.engine.answered
    if sample is None or (answered is None and (sample.dialect != _VLLM or finished(evidence))):
        return unknown(without_exposition(evidence))
    asked = sum((answered or {}).values())
    if answered is None or not asked:
        # vLLM's HTTP server counts a path from its first request on.
        return unknown("no request for text has come since the engine's start")
    turned_away = total_of(evidence, fact.ADMISSION_REJECTIONS) or 0.0
    refused = answered.get("4xx", 0.0)
    broken = max(0.0, answered.get("5xx", 0.0) - turned_away)
    seen = f"{share(refused + turned_away, asked)} since the engine's start"
    if broken:
        seen += f"; {share(broken, asked)} failed with a 5xx"
    if turned_away / asked >= _RARE:
        return failed(seen, "raise --max-num-queued-reqs and --max-num-queued-tokens, or add GPUs")
    if broken / asked >= _RARE:
        return failed(seen, "read the engine's log for errors")
    if refused == asked:
        return failed(seen, _FIND_REFUSALS)
    return warned(seen, _FIND_REFUSALS) if refused / asked >= _RARE else passed(seen)


def client_time_outs(evidence: AuditEvidence) -> CheckResult:
    """Whether clients give up after a time of their own."""
    agent = evidence.agent
    if agent is None:
        return unknown(evidence.why_unread(EvidencePart.AGENT))
    if agent.left_after_s is None:
        return unknown(
            "no request came through the proxy, and the engine's plugin is not heard of",
            "install goodput-agent-vllm in the engine's environment: docs/vllm-plugin.md",
        )
    if not agent.requests:
        return unknown("the agent has no request since the engine's start")
    seen = f"clients left {share(len(agent.left_after_s), agent.requests)}"
    together = _most_together(agent.left_after_s)
    if len(together) < max(_FEWEST_TOGETHER, len(agent.left_after_s) / 2):
        return passed(f"{seen}, and no time-out shows")
    return warned(
        f"{seen}, {len(together)} of them after {median(together):.3g} s",
        "add a replica or lower max_tokens, so that requests end in time; or raise the time-out of "
        "the clients or of a proxy before the engine",
    )


def _most_together(durations_s: Sequence[float]) -> Sequence[float]:
    """The most that could be one time-out."""
    long = sorted(each for each in durations_s if each >= _SHORTEST_TIME_OUT_S)
    runs = (
        [each for each in long[first:] if each <= _SAME_SHARE * shortest + _SAME_S]
        for first, shortest in enumerate(long)
    )
    return max(runs, key=len, default=())


def warm_up(evidence: AuditEvidence) -> CheckResult:
    """Whether users' requests were the ones that warmed the engine up."""
    agent = evidence.agent
    if agent is None:
        return unknown(evidence.why_unread(EvidencePart.AGENT))
    if not agent.requests:
        return unknown("the agent has no request since the engine's start")
    if not agent.cold:
        return passed("no request since the engine's start missed because it had just started")
    return warned(
        f"{agent.cold:,} requests missed because the engine had just started",
        "send requests of your own before the engine gets traffic, as in a start-up probe",
    )


def queue(evidence: AuditEvidence) -> CheckResult:
    """How many requests wait now and waited in the last hour, and how long."""
    waiting = value_of(evidence, fact.REQUESTS_WAITING)
    if waiting is None:
        return unknown(without_exposition(evidence))
    load = _load(evidence)
    seen, usually = f"{waiting:,.0f} requests wait now", load and load.waiting
    if load is not None and usually is not None:
        seen += f"; in {_hour(load)} {usually:,.1f} on average"
    waited, since = _waited(evidence)
    limit_s = min(evidence.limits.ttft_s, default=inf)
    if waited is not None and waited.lower > limit_s:
        seen += f"; {since}5 % waited over {waited.lower:.3g} s, beyond a TTFT of {limit_s:g} s"
        return warned(seen, _LESS_QUEUE)
    if waited is not None and waited.upper is not None:
        seen += f"; {since}95 % waited {waited.upper:.3g} s at most"
    deepest = max(waiting, usually or 0.0)
    return warned(seen, _LESS_QUEUE) if deepest > DEEP_QUEUE else passed(seen)


def _load(evidence: AuditEvidence) -> LoadHistory | None:
    return None if evidence.agent is None else evidence.agent.load


def _hour(load: LoadHistory) -> str:
    minutes = load.covered_s / MINUTE_S
    return "the last hour" if minutes >= _WHOLE_HOUR else f"{minutes:.0f} min of the last hour"


def _waited(evidence: AuditEvidence) -> tuple[Bounds | None, str]:
    """The bounds of how long 95 % waited in the agent's hour, or since the engine's start."""
    load, sample = _load(evidence), evidence.engine.sample
    if load is not None and load.waited_over_s is not None:
        return Bounds(load.waited_over_s, load.waited_within_s, None), ""
    histogram = None if sample is None else sample.histograms.get(fact.QUEUE_TIME.name)
    found = None if histogram is None else quantile_bounds(histogram, 0.95)
    return found, "since the engine's start "


def batch_limit(evidence: AuditEvidence) -> CheckResult:
    """Whether --max-num-seqs holds requests back, or was never needed."""
    batch = max_running(evidence)
    running = value_of(evidence, fact.REQUESTS_RUNNING)
    if running is None:
        return unknown(without_exposition(evidence))
    load, slots = _load(evidence), (batch or 0) * ranks(evidence)
    seen = f"{running:,.0f} of {slots} run now" if batch else f"{running:,.0f} run now"
    if load is not None and load.running is not None:
        seen += f", {load.running:,.1f} on average in {_hour(load)}"
    if batch is None:
        return _without_limit(evidence, seen)
    held = _held_back(evidence, slots) or _waited_beside_room(evidence, slots)
    if held is not None:
        return warned(f"{seen}{held}", f"raise --max-num-seqs above {batch}")
    return _never_filled(evidence, batch, seen)


def _without_limit(evidence: AuditEvidence, seen: str) -> CheckResult:
    if not flags_are_known(evidence):
        return unknown(f"{seen}; {without_flags(evidence)}")
    small, large = DEFAULT_RUNNING
    return unknown(
        f"{seen}; not given, so vLLM chose it: {small}, or {large:,} on large GPUs",
        "give --max-num-seqs, so that a full batch can be told from a slow one",
    )


def _held_back(evidence: AuditEvidence, slots: int) -> str | None:
    """What shows that requests wait for a place beside a cache with room, now or in the hour."""
    load = _load(evidence)
    gauges = fact.REQUESTS_RUNNING, fact.REQUESTS_WAITING, fact.KV_CACHE_USAGE
    found = [_held(slots, *(value_of(evidence, gauge) for gauge in gauges))]
    if load is not None:
        usual = _USUALLY_FULL * slots
        found.append(_held(usual, load.running, load.waiting, load.cache_usage))
    return next(filter(None, found), None)


def _waited_beside_room(evidence: AuditEvidence, slots: int) -> str | None:
    """What shows that a batch far below vLLM's defaults made requests wait."""
    waited, _ = _waited(evidence)
    capacity, mean = cache_capacity(evidence), mean_length(evidence)
    if waited is None or capacity is None or not mean or slots >= _SMALL_BATCH:
        return None
    fit = capacity / mean
    too_long = waited.lower > min(evidence.limits.ttft_s, default=inf)
    if not too_long or fit < _FAR_BELOW * slots:
        return None
    return f"; 5 % waited over {waited.lower:.3g} s beside a KV cache for {fit:,.0f}"


def _held(
    full: float, running: float | None, waiting: float | None, used: float | None
) -> str | None:
    if running is None or waiting is None or used is None:
        return None
    if running < full or waiting < 1 or used >= _ROOMY_CACHE:
        return None
    return f", {waiting:,.0f} wait, KV cache {100 * used:.0f} % full"


def step_budget(evidence: AuditEvidence) -> CheckResult:
    """Whether a step may compute enough tokens to be worth reading the weights."""
    budget = limit_given(evidence, fact.MAX_STEP_TOKENS)
    if budget is None:
        budget = _step_tokens(evidence)
    if budget is None and not flags_are_known(evidence):
        return unknown(without_flags(evidence))
    if budget is None:
        small, large = DEFAULT_STEP_TOKENS
        return passed(f"not given, so vLLM chose it: {small:,} to {large:,} by the GPU")
    seen = f"{budget:,} tokens"
    prompt = mean_input(evidence)
    if prompt is not None:
        steps = ceil(prompt / budget)
        seen += f"; the mean prompt of {prompt:,.0f} needs {steps} step{'s' * (steps > 1)}"
    if budget >= SMALLEST_STEP or evidence.gpus == ():
        return passed(seen)
    return warned(
        seen,
        f"remove --max-num-batched-tokens, or set it to {DEFAULT_STEP_TOKENS[0]}",
    )


def _step_tokens(evidence: AuditEvidence) -> int | None:
    by_engine = value_of(evidence, fact.MAX_STEP_TOKENS)
    return None if by_engine is None else round(by_engine)


def _never_filled(evidence: AuditEvidence, batch: int, seen: str) -> CheckResult:
    """A step has at least one token of each request in it, so its tokens bound the batch.

    Each step, and `batch`, is of one data-parallel rank.
    """
    steps = evidence.engine.step_tokens
    most = highest_bound(steps)
    if steps is None or most is None or steps.counts[-1] < _ENOUGH_STEPS:
        return passed(seen)
    if most * _FAR_BELOW > batch:
        return passed(seen)
    return warned(
        f"{seen}; never over {most:,.0f} in {steps.counts[-1]:,.0f} steps",
        f"--max-num-seqs {most * 2:.0f}: CUDA graphs of larger batches take memory from the cache",
    )


def chunked_prefill(evidence: AuditEvidence) -> CheckResult:
    """Whether long prompts are computed in pieces between the steps of others."""
    if flag(evidence, "--no-enable-chunked-prefill") is not None:
        return warned("off", "remove --no-enable-chunked-prefill")
    if not flags_are_known(evidence):
        return unknown(without_flags(evidence))
    return passed("not switched off")


def speculation(evidence: AuditEvidence) -> CheckResult:
    """Whether drafts have a sensible length, and are mostly accepted."""
    drafts = total_of(evidence, fact.SPEC_DECODE_DRAFTS)
    proposed = total_of(evidence, fact.SPEC_DECODE_DRAFT_TOKENS)
    accepted = total_of(evidence, fact.SPEC_DECODE_ACCEPTED_TOKENS)
    sample = evidence.engine.sample
    if sample is None:
        return unknown(without_exposition(evidence))
    if drafts is None:
        # Others count drafts only after the first one, or not at all.
        vllm = sample.dialect == "vllm"
        return passed("no speculative decoding") if vllm else unknown(without_exposition(evidence))
    if not drafts or not proposed or accepted is None:
        return unknown("no draft has been verified since the engine's start")
    depth, acceptance = proposed / drafts, accepted / proposed
    seen = f"{depth:.1f} tokens in a draft, {share(accepted, proposed)} accepted"
    if depth < _LEAST_DRAFT and acceptance >= _HIGH_ACCEPTANCE:
        return warned(seen, _drafts_of(evidence, _LEAST_DRAFT))
    if acceptance >= _POOR_ACCEPTANCE and depth <= _MOST_DRAFT:
        return passed(seen)
    better = max(_LEAST_DRAFT, min(_MOST_DRAFT, round(depth) - 1))
    return warned(seen, f"{_drafts_of(evidence, better)}, or none")


def _drafts_of(evidence: AuditEvidence, tokens: int) -> str:
    text = flag(evidence, "--speculative-config") or ""
    try:
        config = json.loads(text)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        return f"--speculative-config with num_speculative_tokens {tokens}"
    changed = json.dumps({**config, "num_speculative_tokens": tokens})
    return f"--speculative-config '{changed}'"


TRAFFIC_CHECKS = (
    _CHECK(
        "--max-model-len",
        "a request that reaches it ends in mid-answer, and a longer prompt is refused",
        longest_requests,
    ),
    _CHECK(
        "refused requests",
        "clients see an error, and no span or latency shows it",
        refused_requests,
    ),
    _CHECK(
        "client time-outs",
        "the engine has worked for an answer that its client no longer waits for",
        client_time_outs,
    ),
    _CHECK(
        "warm-up", "the first users after each start wait for what the engine prepares", warm_up
    ),
    _CHECK("queue", "waiting is part of the time to the first token", queue),
    _CHECK(
        "--max-num-seqs",
        "too low, requests wait beside free memory; too high, memory is reserved in vain",
        batch_limit,
    ),
    _CHECK(
        "step budget",
        "each step reads all weights, so with few tokens in a step a prompt takes longer",
        step_budget,
    ),
    _CHECK(
        "chunked prefill",
        "without it a long prompt stops the tokens of all other requests until it is computed",
        chunked_prefill,
    ),
    _CHECK(
        "speculation depth",
        "a rejected draft is computed in vain, and slows a full batch down",
        speculation,
    ),
)
