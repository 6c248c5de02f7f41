"""A check of the audit, its result, and values that several checks need."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from agent.catalog import engine_facts as fact
from agent.catalog.engine_flags import NO_STATISTICS
from agent.catalog.metric import Metric
from agent.records.audit import AuditEvidence, EvidencePart
from agent.records.engine import HistogramSnapshot


class AuditFinding(StrEnum):
    """What a check found; it is unknown if evidence is missing."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The finding, the value seen (or why it is unknown), and what to change."""

    finding: AuditFinding
    seen: str
    change: str | None = None


@dataclass(frozen=True, slots=True)
class AuditCheck:
    """One row of the audit: its area and name, why it matters, and the function that judges."""

    area: str
    name: str
    why: str
    judge: Callable[[AuditEvidence], CheckResult]


def passed(seen: str) -> CheckResult:
    """A pass: nothing to change."""
    return CheckResult(AuditFinding.PASS, seen)


def warned(seen: str, change: str) -> CheckResult:
    """A warning: costly, or possibly intended."""
    return CheckResult(AuditFinding.WARN, seen, change)


def failed(seen: str, change: str) -> CheckResult:
    """A failure: it does harm now."""
    return CheckResult(AuditFinding.FAIL, seen, change)


def unknown(reason: str, change: str | None = None) -> CheckResult:
    """Evidence is missing; `change` says how to provide it."""
    return CheckResult(AuditFinding.UNKNOWN, reason, change)


VersionKey = tuple[int, ...]

_RELEASE = re.compile(r"v?(\d+(?:\.\d+)*)(.*)")
# Of a version before its release: 0.22.0rc1, 0.22.0.dev7.
_BEFORE = re.compile(r"[.-]?(a|b|rc|dev)")
_NUMBERS = 4


def version_key(version: str | None) -> VersionKey | None:
    """The numbers of a version, of which one before a release sorts below it; None if unknown."""
    found = _RELEASE.fullmatch(version or "")
    if found is None:
        return None
    numbers = [int(part) for part in found[1].split(".")][:_NUMBERS]
    before = -1 if _BEFORE.match(found[2]) else 0
    return (*numbers, *[0] * (_NUMBERS - len(numbers)), before)


def is_older(version: str | None, than: str) -> bool | None:
    """Whether a version comes before another one; None if it is unknown."""
    key, other = version_key(version), version_key(than)
    return None if key is None or other is None else key < other


def value_of(evidence: AuditEvidence, metric: Metric, *labels: str) -> float | None:
    """A fact of the engine's exposition."""
    sample = evidence.engine.sample
    return None if sample is None else sample.fact(metric.name, *labels)


def total_of(evidence: AuditEvidence, metric: Metric) -> float | None:
    """A fact over all values of its labels; None if there is none."""
    found = by_label(evidence, metric)
    return sum(found.values()) if found else None


def by_label(evidence: AuditEvidence, metric: Metric) -> Mapping[str, float]:
    """A fact by its first label, which is empty for a fact without labels."""
    sample = evidence.engine.sample
    if sample is None:
        return {}
    return {
        next(iter(labels), ""): value
        for (name, labels), value in sample.facts.items()
        if name == metric.name
    }


def without_exposition(evidence: AuditEvidence) -> str:
    """Why a fact of the exposition is unknown."""
    if evidence.engine.sample is not None:
        return "the exposition does not contain it"
    if flag(evidence, NO_STATISTICS) is not None:
        return f"the engine's statistics are off ({NO_STATISTICS})"
    return evidence.why_unread(EvidencePart.EXPOSITION)


def flag(evidence: AuditEvidence, name: str) -> str | None:
    """The value of a flag, empty for a switch; None if it is not given or not visible."""
    line = evidence.command_line
    return None if line is None else line.flags.get(name)


def flags_are_known(evidence: AuditEvidence) -> bool:
    """Whether a flag that is not in the command line is not set at all."""
    line = evidence.command_line
    return line is not None and line.whole


def without_flags(evidence: AuditEvidence) -> str:
    """Why it is unknown whether a flag is set."""
    if not flags_are_known(evidence) and evidence.command_line is not None:
        return "it is not in the command line; --config names a file of flags, which is not read"
    return evidence.why_unread(EvidencePart.COMMAND_LINE)


def max_running(evidence: AuditEvidence) -> int | None:
    """Most requests in the batch of one data-parallel rank, as `--max-num-seqs` says."""
    return limit_given(evidence, fact.MAX_RUNNING_REQUESTS)


def limit_given(evidence: AuditEvidence, limit: Metric) -> int | None:
    """A limit of one data-parallel rank, by flags or by the engine's settings."""
    line = evidence.command_line
    given = None if line is None else line.limits.get(limit.name)
    return evidence.stated_limits.get(limit.name) if given is None else given


def ranks(evidence: AuditEvidence) -> int:
    """The engine's data-parallel ranks, each with a batch and a KV cache of its own."""
    return round(value_of(evidence, fact.DATA_PARALLEL_RANKS) or 1)


def cache_capacity(evidence: AuditEvidence) -> float | None:
    """Tokens that the KV caches of all ranks hold."""
    tokens = value_of(evidence, fact.KV_CAPACITY_TOKENS)
    if tokens is not None:
        return tokens
    blocks = value_of(evidence, fact.KV_BLOCKS)
    per_block = value_of(evidence, fact.KV_BLOCK_TOKENS)
    return None if blocks is None or per_block is None else blocks * per_block


def max_length(evidence: AuditEvidence) -> int | None:
    """Most tokens of one request."""
    if evidence.engine.max_model_len is not None:
        return evidence.engine.max_model_len
    return limit_given(evidence, fact.MAX_CONTEXT_TOKENS)


def finished(evidence: AuditEvidence) -> float:
    """Requests that the engine finished since its start."""
    return total_of(evidence, fact.REQUESTS_FINISHED) or 0.0


def mean_length(evidence: AuditEvidence) -> float | None:
    """Mean tokens of a finished request, input and output; None before the first one."""
    parts = (evidence.engine.input_lengths, evidence.engine.output_lengths)
    means = [_mean(part) for part in parts]
    return None if None in means else sum(mean for mean in means if mean is not None)


def mean_input(evidence: AuditEvidence) -> float | None:
    """Mean tokens of a finished request's prompt; None before the first one."""
    return _mean(evidence.engine.input_lengths)


def _mean(histogram: HistogramSnapshot | None) -> float | None:
    if histogram is None or not histogram.counts[-1]:
        return None
    return histogram.sum / histogram.counts[-1]


def highest_bound(histogram: HistogramSnapshot | None) -> float | None:
    """The upper bound of the highest bucket with a value; None without values."""
    if histogram is None or not histogram.counts[-1]:
        return None
    full = histogram.counts[-1]
    return next(
        bound
        for bound, count in zip(histogram.bounds, histogram.counts, strict=True)
        if count == full
    )


def share(part: float, whole: float) -> str:
    """A share in words, such as `3 of 120 (2.5 %)`."""
    return f"{part:,.0f} of {whole:,.0f} ({100 * part / whole:.3g} %)"
