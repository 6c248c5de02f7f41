"""Checks of the prefix cache and of the memory for KV values."""

from functools import partial

from agent.analysis.audit.checks import AuditCheck, CheckResult, failed, passed, unknown, warned
from agent.analysis.audit.known_values import (
    finished,
    flag,
    max_length,
    max_running,
    mean_length,
    ranks,
    share,
    total_of,
    value_of,
    without_exposition,
)
from agent.catalog import engine_facts as fact
from agent.catalog.definitions import FULL_CACHE
from agent.records.audit import AuditEvidence

_CHECK = partial(AuditCheck, "KV cache")

# Below this share of preempted requests the cache is full now and then, not as a rule.
_FEW_PREEMPTED = 0.01
# With fewer requests of the mean length in the cache, hardly anything is batched.
_FEWEST_REQUESTS = 2
# Memory of the GPU for the engine: below, the cache is small; above, other users of it may fail.
_LOWEST_FRACTION, _HIGHEST_FRACTION = 0.85, 0.95

_MORE_CACHE = (
    "raise --gpu-memory-utilization (on a CPU VLLM_CPU_KVCACHE_SPACE), or --kv-cache-dtype fp8, "
    "or more GPUs with --tensor-parallel-size"
)


def prefix_caching(evidence: AuditEvidence) -> CheckResult:
    """Whether prompts reuse KV values of earlier ones."""
    # A later flag may switch it on again, so the flag counts only where the engine says nothing.
    switch = "--no-enable-prefix-caching"
    by_flag = None if flag(evidence, switch) is None else "False"
    state = evidence.engine.cache_config.get("enable_prefix_caching", by_flag)
    if state == "False":
        return failed("off", f"remove {switch}")
    if state != "True":
        return unknown(without_exposition(evidence))
    asked = value_of(evidence, fact.PREFIX_CACHE_QUERY_TOKENS)
    found = value_of(evidence, fact.PREFIX_CACHE_HIT_TOKENS)
    if not asked or found is None:
        return passed("on")
    return passed(f"on; found {share(found, asked)} prompt tokens")


def cache_size(evidence: AuditEvidence) -> CheckResult:
    """Whether the cache holds as many requests of the traffic's length as the batch may."""
    capacity = _capacity(evidence)
    if capacity is None:
        return unknown(without_exposition(evidence))
    override = evidence.engine.cache_config.get("num_gpu_blocks_override", "None")
    seen = f"{capacity:,.0f} tokens"
    if override != "None":
        return failed(
            f"{seen}, cut to {override} blocks by a flag", "remove --num-gpu-blocks-override"
        )
    return _against_traffic(evidence, capacity, seen)


def _against_traffic(evidence: AuditEvidence, capacity: float, seen: str) -> CheckResult:
    longest, mean, batch = max_length(evidence), mean_length(evidence), max_running(evidence)
    count = ranks(evidence)
    if longest is not None:
        seen += f", {capacity / longest:,.1f} requests of --max-model-len {longest}"
    if mean is None:
        if longest and batch and capacity >= longest * batch * count:
            return passed(f"{seen}, and {_batch(batch, count)}")
        return unknown(f"{seen}; no request has finished, so the traffic's length is unknown")
    fit = capacity / mean
    seen += f", {fit:,.1f} of the mean {mean:,.0f} tokens"
    if fit < _FEWEST_REQUESTS:
        return failed(seen, _MORE_CACHE)
    if batch is None:
        return passed(seen)
    seen += f"; {_batch(batch, count)}"
    if fit < batch * count:
        fewer = max(int(fit / count), 1)
        return warned(seen, f"{_MORE_CACHE}; or lower --max-num-seqs to {fewer}")
    return passed(seen)


def _batch(batch: int, count: int) -> str:
    return f"--max-num-seqs {batch}" + (f" on each of {count} ranks" if count > 1 else "")


def _capacity(evidence: AuditEvidence) -> float | None:
    tokens = value_of(evidence, fact.KV_CAPACITY_TOKENS)
    if tokens is not None:
        return tokens
    blocks = value_of(evidence, fact.KV_BLOCKS)
    per_block = value_of(evidence, fact.KV_BLOCK_TOKENS)
    return None if blocks is None or per_block is None else blocks * per_block


def preemptions(evidence: AuditEvidence) -> CheckResult:
    """How often a running request lost its place since the engine's start."""
    lost = total_of(evidence, fact.PREEMPTIONS)
    if lost is None:
        return unknown(without_exposition(evidence))
    ended = finished(evidence)
    if not ended:
        return unknown("no request has finished since the engine's start")
    seen = f"{lost:,.0f} in {ended:,.0f} requests since the engine's start"
    if not lost:
        return passed(seen)
    change = f"{_MORE_CACHE}; or lower --max-num-seqs"
    return warned(seen, change) if lost / ended < _FEW_PREEMPTED else failed(seen, change)


def cache_usage(evidence: AuditEvidence) -> CheckResult:
    """Whether requests wait now because the cache is full."""
    used = value_of(evidence, fact.KV_CACHE_USAGE)
    waiting = value_of(evidence, fact.REQUESTS_WAITING)
    if used is None or waiting is None:
        return unknown(without_exposition(evidence))
    seen = f"{100 * used:.0f} % now, {waiting:.0f} requests wait"
    if used < FULL_CACHE:
        return passed(seen)
    return failed(seen, _MORE_CACHE) if waiting else warned(seen, _MORE_CACHE)


def memory_fraction(evidence: AuditEvidence) -> CheckResult:
    """Whether the engine may take a sensible share of the GPU's memory."""
    text = evidence.engine.cache_config.get("gpu_memory_utilization", "")
    try:
        fraction = float(text)
    except ValueError:
        return unknown(without_exposition(evidence))
    if evidence.gpus is not None and not evidence.gpus:
        return unknown("the engine has no GPU")
    seen = f"{fraction:g}"
    if _LOWEST_FRACTION <= fraction <= _HIGHEST_FRACTION:
        return passed(seen)
    nearest = max(_LOWEST_FRACTION, min(_HIGHEST_FRACTION, fraction))
    return warned(seen, f"--gpu-memory-utilization {nearest:g}, unless others share the GPU")


CACHE_CHECKS = (
    _CHECK(
        "prefix caching",
        "without it the engine computes a system prompt or a conversation anew for each request",
        prefix_caching,
    ),
    _CHECK(
        "size for the traffic",
        "a cache that holds fewer requests than the batch leaves the GPU half empty",
        cache_size,
    ),
    _CHECK(
        "preemptions",
        "a preempted request loses its KV values and computes them again, while its client waits",
        preemptions,
    ),
    _CHECK("usage", "requests wait in the queue while the cache is full", cache_usage),
    _CHECK(
        "memory fraction",
        "what is left of the GPU's memory is no cache; with too little left, others run out of it",
        memory_fraction,
    ),
)
